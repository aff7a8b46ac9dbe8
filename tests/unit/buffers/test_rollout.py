"""Rollouts: rows, their successors, and the final observations of episodes."""

from __future__ import annotations

import numpy as np

from zhixing.buffers.rollout import Rollout
from zhixing.core.tree import Field

NUMBER = Field((), np.dtype(np.float32))
SPEC = {"obs": {"x": NUMBER}, "mask": Field((2,), np.dtype(bool)), "reward": NUMBER}


def filled(steps: int = 3) -> Rollout:
    """Return a rollout with the observations 10 t + n."""
    rollout = Rollout(SPEC, steps, 2)
    for t in range(steps + 1):
        rollout.write(t, obs={"x": np.array([10 * t, 10 * t + 1])}, mask=np.array([[t % 2, 1]] * 2, bool))
    for t in range(steps):
        rollout.write(t, reward=np.array([t, -t]))
    return rollout


def test_next_observation_is_the_next_row() -> None:
    batch = filled().batch()
    assert batch.obs["x"].tolist() == [[0, 1], [10, 11], [20, 21]]
    assert batch.next_obs["x"].tolist() == [[10, 11], [20, 21], [30, 31]]
    assert batch.next_mask[:, 0].tolist() == [[True, True], [False, True], [True, True]]
    assert batch.reward.tolist() == [[0, 0], [1, -1], [2, -2]]


def test_final_observations_replace_the_next_row() -> None:
    rollout = filled()
    rollout.write_final(1, np.array([1]), "obs", {"x": np.array([-1.0, 99.0])})
    rollout.write_final(1, np.array([1]), "mask", np.array([[True, True], [False, False]]))
    rollout.write_final(2, np.array([0, 1]), "obs", {"x": np.array([77.0, 88.0])})
    batch = rollout.batch()
    assert batch.next_obs["x"].tolist() == [[10, 11], [20, 99], [77, 88]]
    assert batch.next_mask[1].tolist() == [[False, True], [False, False]]
    assert batch.obs["x"].tolist() == [[0, 1], [10, 11], [20, 21]]  # the first observation of the next episode stays


def test_final_observations_are_copied() -> None:
    rollout, obs = filled(), np.array([5.0, 6.0])
    rollout.write_final(0, np.array([0]), "obs", {"x": obs})
    obs[:] = 0.0  # the environment reuses its array
    assert rollout.batch().next_obs["x"][0].tolist() == [5.0, 11.0]


def test_next_observations_are_assembled_only_when_read() -> None:
    rollout = filled()
    batch = rollout.batch()
    assert "next_obs=<not read yet>" in repr(batch)
    rollout.write_final(0, np.array([1]), "obs", {"x": np.array([0.0, 42.0])})
    assert batch.next_obs["x"][0].tolist() == [10.0, 42.0]
    assert batch.next_obs is batch.next_obs


def test_a_shorter_batch_has_its_own_successors() -> None:
    batch = filled(4).batch(num_steps=2)
    assert len(batch) == 2
    assert batch.next_obs["x"].tolist() == [[10, 11], [20, 21]]


def test_clear_discards_final_observations() -> None:
    rollout = filled()
    rollout.write_final(0, np.array([0]), "obs", {"x": np.array([5.0, 6.0])})
    rollout.clear()
    assert rollout.batch().next_obs["x"][0].tolist() == [10.0, 11.0]


def test_a_longer_rollout_copies_rows_and_final_observations() -> None:
    old = filled(2)
    old.write_final(1, np.array([0]), "obs", {"x": np.array([99.0, 0.0])})
    new = Rollout(SPEC, 4, 2)
    new.copy_from(old)
    new.write(3, obs={"x": np.array([30, 31])}, mask=np.ones((2, 2), bool))
    batch = new.batch(num_steps=3)
    assert batch.obs["x"].tolist() == [[0, 1], [10, 11], [20, 21]]  # with the observation of the step to come
    assert batch.next_obs["x"].tolist() == [[10, 11], [99, 21], [30, 31]]
    assert batch.reward[:2].tolist() == [[0, 0], [1, -1]]


def test_arrays_are_reused() -> None:
    rollout = filled()
    batch = rollout.batch()
    rollout.write(0, obs={"x": np.array([5.0, 6.0])})
    assert batch.obs["x"][0].tolist() == [5.0, 6.0]
    assert np.shares_memory(batch.obs["x"], rollout.arrays["obs"]["x"])


def test_tuples_of_hidden_state_are_stored() -> None:
    rollout = Rollout({"hidden": (NUMBER, NUMBER)}, 2, 1)
    rollout.write(0, hidden=(np.array([1.0]), np.array([2.0])))
    batch = rollout.batch()
    assert [part.tolist() for part in batch.hidden] == [[[1.0], [0.0]], [[2.0], [0.0]]]
    assert "next_obs" not in batch

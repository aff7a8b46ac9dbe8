from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from buffer_streams import BOOL, F32, FLAG, I64, assert_same_batch, stack
from hypothesis import given, settings
from hypothesis import strategies as st

import zhixing as zx
from zhixing.buffers import HER, Buffer, NStep, Prioritized, SequenceView, Uniform
from zhixing.buffers.her import steps_left
from zhixing.core.batch import Batch
from zhixing.core.tree import Field
from zhixing.errors import UserError

SPEC = {
    "obs": {"achieved_goal": Field((2,), F32), "desired_goal": Field((2,), F32), "observation": Field((), I64)},
    "action": Field((), I64),
    "reward": Field((), F32),
    "terminated": FLAG,
    "truncated": FLAG,
}


def reward(achieved: Any, desired: Any, info: Any) -> Any:
    """Return a different number for each pair of goals; accepts one pair or a batch."""
    assert info == {}
    return (achieved - 3.0 * desired).sum(-1)


def terminated(achieved: Any, desired: Any, info: Any) -> Any:
    return (achieved == desired).all(-1)


class Stream:
    """One environment whose achieved goals all differ. Every observation has a unique number."""

    def __init__(self, seed: int, end: float, jump: float = 0.0) -> None:
        self.rng = np.random.default_rng(seed)
        self.number, self.end, self.jump = seed * 1_000_000, end, jump
        self.begin()

    def begin(self) -> None:
        self.goal = self.rng.random(2).astype(np.float32)
        self.obs = self.observe()

    def observe(self) -> dict[str, Any]:
        self.number += 1
        achieved = self.rng.random(2).astype(np.float32)
        return {"achieved_goal": achieved, "desired_goal": self.goal, "observation": np.int64(self.number)}

    def step(self) -> dict[str, Any]:
        if self.rng.random() < self.jump:  # an interrupted stream: a row that doesn't continue the one before
            self.begin()
        next_obs = self.observe()
        ends = self.rng.random(2) < self.end / 2
        row = {
            "obs": self.obs,
            "action": np.int64(0),
            "reward": np.float32(self.rng.normal()),
            "terminated": ends[0],
            "truncated": ends[1],
            "next_obs": next_obs,
        }
        self.obs = next_obs
        if ends.any():
            self.begin()
        return row


def filled(
    num_envs: int, rows: int, steps: int, end: float = 0.2, jump: float = 0.0, seed: int = 0, **parts: Any
) -> tuple[Buffer, dict[int, dict[str, Any]]]:
    """Return a buffer, and all transitions ever added by their index."""
    buffer = Buffer(SPEC, rows * num_envs, num_envs, **parts)
    streams = [Stream(seed * 100 + i, end, jump) for i in range(num_envs)]
    history: dict[int, dict[str, Any]] = {}
    while steps:
        length = min(steps, int(streams[0].rng.integers(1, 4)))  # single steps and blocks
        block = [[stream.step() for stream in streams] for _ in range(length)]
        buffer.add(Batch(**stack([stack(row) for row in block])))
        history.update(enumerate((row for step in block for row in step), len(history)))
        steps -= length
    return buffer, history


def rest_of_episode(history: dict[int, dict[str, Any]], index: int, num_envs: int) -> list[dict[str, Any]]:
    """Return the transition and the later ones of its episode."""
    transitions = [history[index]]
    while not (transitions[-1]["terminated"] or transitions[-1]["truncated"]):
        index += num_envs
        if index not in history or history[index]["obs"]["observation"] != transitions[-1]["next_obs"]["observation"]:
            break
        transitions.append(history[index])
    return transitions


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1000),
    num_envs=st.integers(1, 3),
    rows=st.integers(1, 30),
    steps=st.integers(1, 70),
    end=st.sampled_from([0.0, 0.1, 0.5, 2.0]),
    jump=st.sampled_from([0.0, 0.2]),
    prioritized=st.booleans(),
    with_end=st.booleans(),
)
def test_relabeled_samples_equal_a_naive_search(
    seed: int, num_envs: int, rows: int, steps: int, end: float, jump: float, prioritized: bool, with_end: bool
) -> None:
    """Each new goal was achieved at that step or later in the same episode, whatever ended or was overwritten."""
    sampler = Prioritized() if prioritized else Uniform()
    her = HER(reward, terminated if with_end else None, ratio=0.7)
    buffer, history = filled(num_envs, rows, steps, end, jump, seed, sampler=sampler, her=her)
    batch = buffer.sample(64, np.random.default_rng(seed)).numpy()
    for i, index in enumerate(batch.index.tolist()):
        stored = history[index]
        for name in ("obs", "next_obs"):
            sampled = getattr(batch, name)
            for part in ("achieved_goal", "observation"):
                assert np.array_equal(sampled[part][i], stored[name][part])
        goal = batch.obs["desired_goal"][i]
        assert np.array_equal(batch.next_obs["desired_goal"][i], goal)
        assert batch.truncated[i] == stored["truncated"]
        if np.array_equal(goal, stored["obs"]["desired_goal"]):  # not relabeled
            assert batch.reward[i] == stored["reward"]
            assert batch.terminated[i] == stored["terminated"]
            continue
        achieved = [row["next_obs"]["achieved_goal"] for row in rest_of_episode(history, index, num_envs)]
        assert any(np.array_equal(goal, candidate) for candidate in achieved)
        assert batch.reward[i] == pytest.approx(float(reward(achieved[0], goal, {})), abs=1e-6)
        ends = np.array_equal(goal, achieved[0]) if with_end else stored["terminated"]
        assert batch.terminated[i] == ends


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 1000), num_envs=st.integers(1, 3), rows=st.integers(1, 40), steps=st.integers(1, 90))
def test_steps_left_equals_a_naive_search(seed: int, num_envs: int, rows: int, steps: int) -> None:
    buffer, history = filled(num_envs, rows, steps, 0.08, 0.05, seed)
    index = buffer.ring.indices()
    expected = [len(rest_of_episode(history, i, num_envs)) - 1 for i in index.tolist()]
    assert steps_left(buffer.ring, index).tolist() == expected


def test_fraction_of_relabeled_transitions_is_the_ratio() -> None:
    for ratio in (0.0, 0.3, 0.8, 1.0):
        buffer, history = filled(4, 200, 200, her=HER(reward, terminated, ratio))
        batch = buffer.sample(20_000, np.random.default_rng(0)).numpy()
        stored = np.stack([history[i]["obs"]["desired_goal"] for i in batch.index.tolist()])
        fraction = (batch.obs["desired_goal"] != stored).any(1).mean()
        assert fraction == pytest.approx(ratio, abs=4 * (ratio * (1 - ratio) / 20_000) ** 0.5)


def test_remaining_steps_are_equally_likely() -> None:
    """For the second of 5 steps, each of the goals of steps 2 to 5 is chosen with probability 1/4."""
    buffer, history = filled(1, 10, 5, end=0.0, her=HER(reward, ratio=1.0))
    batch = buffer.sample(20_000, np.random.default_rng(0)).numpy()
    goals = batch.obs["desired_goal"][batch.index == 1]
    for step in range(5):
        fraction = (goals == history[step]["next_obs"]["achieved_goal"]).all(1).mean()
        assert fraction == pytest.approx(0.25 if step else 0.0, abs=0.03)


def test_final_observation_can_be_the_goal() -> None:
    """Every step ends its episode, so the only possible goal is in the final observation, which no row holds."""
    buffer, history = filled(2, 20, 50, end=2.0, her=HER(reward, terminated, ratio=1.0))
    batch = buffer.sample(100, np.random.default_rng(0)).numpy()
    ends = [i for i in batch.index.tolist() if history[i]["terminated"] or history[i]["truncated"]]
    assert len(ends) > 50
    for i, index in enumerate(batch.index.tolist()):
        if index in ends:
            assert np.array_equal(batch.obs["desired_goal"][i], history[index]["next_obs"]["achieved_goal"])
            assert batch.terminated[i]


@pytest.mark.parametrize("sampler", [Uniform(), Prioritized()])
def test_relabeling_leaves_stored_transitions_unchanged(sampler: Uniform | Prioritized) -> None:
    buffer, _ = filled(3, 20, 50, sampler=sampler, her=HER(reward, terminated))
    before = buffer.state_dict()
    sample = buffer.sample(256, np.random.default_rng(0))
    for leaf in (sample.obs["desired_goal"], sample.next_obs["desired_goal"], sample.reward):
        leaf.zero_()
    for name, rows in buffer.state_dict()["rows"].items():
        assert torch.equal(rows, before["rows"][name]), name


def test_same_seed_gives_the_same_samples_after_loading() -> None:
    her = HER(reward, terminated)
    buffer, _ = filled(3, 20, 50, her=her)
    restored = Buffer(SPEC, 60, 3, her=her)
    restored.load_state_dict(buffer.state_dict())
    assert_same_batch(buffer.sample(64, np.random.default_rng(5)), restored.sample(64, np.random.default_rng(5)))


def test_reward_functions_without_batch_support_are_called_per_row() -> None:
    """As in Gymnasium-Robotics' mazes, where `bool(norm(achieved - desired) <= 0.45)` of a batch is one flag."""

    def single_reward(achieved: Any, desired: Any, info: Any) -> float:
        return float(np.linalg.norm(achieved - desired))

    def single_terminated(achieved: Any, desired: Any, info: Any) -> bool:
        return bool(np.linalg.norm(achieved - desired) <= 0.2)

    buffer, _ = filled(2, 50, 50, 0.1, her=HER(single_reward, single_terminated, ratio=1.0))
    batch = buffer.sample(200, np.random.default_rng(0)).numpy()
    distance = np.linalg.norm(batch.next_obs["achieved_goal"] - batch.next_obs["desired_goal"], axis=-1)
    assert batch.reward == pytest.approx(distance)
    assert np.array_equal(batch.terminated, distance <= 0.2)
    assert batch.terminated.dtype == BOOL


def test_reward_that_is_not_a_number_is_rejected() -> None:
    buffer, _ = filled(1, 10, 10, her=HER(lambda achieved, desired, info: achieved, ratio=1.0))
    with pytest.raises(UserError, match="expected one number"):
        buffer.sample(8, np.random.default_rng(0))


def test_unsuitable_buffers_are_rejected() -> None:
    her = HER(reward)
    for parts in ({"view": NStep(3, 0.9)}, {"view": SequenceView(3)}):
        with pytest.raises(UserError, match=r"single transitions \(replay.n_step=1"):
            Buffer(SPEC, 10, her=her, **parts)
    flat = {**SPEC, "obs": Field((2,), F32)}
    with pytest.raises(UserError, match="achieved_goal and desired_goal are missing, the environment has one array"):
        Buffer(flat, 10, her=her)
    half = {**SPEC, "obs": {"observation": Field((2,), F32), "achieved_goal": Field((2,), F32)}}
    with pytest.raises(UserError, match="desired_goal is missing, the environment has only observation, achieved_goal"):
        Buffer(half, 10, her=her)
    unequal = {**SPEC, "obs": {"desired_goal": Field((3,), F32), "achieved_goal": Field((2,), F32)}}
    with pytest.raises(UserError, match="must be equal"):
        Buffer(unequal, 10, her=her)
    with pytest.raises(UserError, match="ratio must be in"):
        HER(reward, ratio=1.5)


def load_config(**settings: Any) -> Any:
    base = {"env_steps": 600, "learning_starts": 100, "eval_every": 0, "eval_episodes": 2, "batch_size": 16}
    quick = {"updates_per_step": 0.25, "train_every": 2, "num_envs": 2, "tensorboard": False}
    named = {"algorithm": "dqn", "env": "toy/bit-flip-5", "replay__her": True, "net__hidden_sizes": [16]}
    return zx.config.load(**{**named, **base, **quick, **settings})


def test_a_run_computes_rewards_with_its_env(tmp_path: Path) -> None:
    session = zx.Session(load_config(replay__her_ratio=1.0), tmp_path / "run", quiet=True)
    session.run()
    batch = session.loop.buffer.sample(200, np.random.default_rng(0)).numpy()
    achieved = (batch.next_obs["achieved_goal"] == batch.next_obs["desired_goal"]).all(1)
    assert np.array_equal(batch.reward, np.where(achieved, 0.0, -1.0))
    assert np.array_equal(batch.terminated, achieved)
    assert 0.2 < achieved.mean() < 0.9


def test_her_in_an_unsuitable_run_is_rejected(tmp_path: Path) -> None:
    for changes, message in (
        ({"env": "CartPole-v1"}, r"replay.her needs a goal environment; CartPole-v1 has no method compute_reward"),
        ({"replay__n_step": 3}, r"replay.n_step=1"),
        ({"net__recurrent": "gru"}, r"no recurrent network"),
    ):
        with pytest.raises(UserError, match=message):
            zx.Session(load_config(**changes), tmp_path / "run", quiet=True)


def test_a_run_with_her_resumes_exactly(tmp_path: Path) -> None:
    from conftest import differing_tensors

    class Stop(zx.Callback):
        def iteration_end(self, loop: zx.TrainingLoop, metrics: object) -> None:
            if loop.env_steps >= 350:
                loop.stop("interrupted")

    cfg = load_config(replay__prioritized=True, replay__capacity=200)
    zx.Session(cfg, tmp_path / "whole", quiet=True).run()
    with pytest.raises(KeyboardInterrupt):
        zx.Session(cfg, tmp_path / "parts", [Stop()], quiet=True).run()
    zx.Session.resume(tmp_path / "parts", quiet=True).run()
    assert differing_tensors(tmp_path / "whole", tmp_path / "parts") == []

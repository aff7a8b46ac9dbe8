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
from zhixing.buffers import Buffer, Hindsight, NStep, Prioritized, Reservoir, Sequence, Uniform
from zhixing.buffers.her import steps_left
from zhixing.buffers.ring import Ring
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
    """A number of its own for each pair, of one pair or of many."""
    assert info == {}
    return (achieved - 3.0 * desired).sum(-1)


def terminated(achieved: Any, desired: Any, info: Any) -> Any:
    return (achieved == desired).all(-1)


class Stream:
    """One environment whose achieved goals are all different; every observation has a number of its own."""

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
        if self.rng.random() < self.jump:  # rows that don't follow the ones before, without an end
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
    """A buffer, and all transitions ever added by their index."""
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


def rest(history: dict[int, dict[str, Any]], index: int, num_envs: int) -> list[dict[str, Any]]:
    """The transition and those after it in its episode, as far as there are any."""
    found = [history[index]]
    while not (found[-1]["terminated"] or found[-1]["truncated"]):
        index += num_envs
        if index not in history or history[index]["obs"]["observation"] != found[-1]["next_obs"]["observation"]:
            break
        found.append(history[index])
    return found


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
def test_goals_rewards_and_ends_are_those_of_a_plain_search(
    seed: int, num_envs: int, rows: int, steps: int, end: float, jump: float, prioritized: bool, with_end: bool
) -> None:
    """Whatever ended or was overwritten: each new goal was reached at that step or later in the same episode."""
    sampler = Prioritized() if prioritized else Uniform()
    relabel = Hindsight(reward, terminated if with_end else None, ratio=0.7)
    buffer, history = filled(num_envs, rows, steps, end, jump, seed, sampler=sampler, relabel=relabel)
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
        if np.array_equal(goal, stored["obs"]["desired_goal"]):  # the rest is as it was stored
            assert batch.reward[i] == stored["reward"]
            assert batch.terminated[i] == stored["terminated"]
            continue
        reached = [row["next_obs"]["achieved_goal"] for row in rest(history, index, num_envs)]
        assert any(np.array_equal(goal, one) for one in reached)
        assert batch.reward[i] == pytest.approx(float(reward(reached[0], goal, {})), abs=1e-6)
        ends = np.array_equal(goal, reached[0]) if with_end else stored["terminated"]
        assert batch.terminated[i] == ends


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 1000), num_envs=st.integers(1, 3), rows=st.integers(1, 40), steps=st.integers(1, 90))
def test_steps_left_are_those_of_a_plain_search(seed: int, num_envs: int, rows: int, steps: int) -> None:
    buffer, history = filled(num_envs, rows, steps, 0.08, 0.05, seed)
    assert isinstance(buffer.storage, Ring)
    index = buffer.storage.all()
    expected = [len(rest(history, i, num_envs)) - 1 for i in index.tolist()]
    assert steps_left(buffer.storage, index).tolist() == expected


def test_share_of_relabelled_transitions_is_the_ratio() -> None:
    for ratio in (0.0, 0.3, 0.8, 1.0):
        buffer, history = filled(4, 200, 200, relabel=Hindsight(reward, terminated, ratio))
        batch = buffer.sample(20_000, np.random.default_rng(0)).numpy()
        own = np.stack([history[i]["obs"]["desired_goal"] for i in batch.index.tolist()])
        share = (batch.obs["desired_goal"] != own).any(1).mean()
        assert share == pytest.approx(ratio, abs=4 * (ratio * (1 - ratio) / 20_000) ** 0.5)


def test_every_step_left_is_as_likely() -> None:
    """An episode of 5 steps: from its second, the goals of steps 2 to 5 each come in a quarter of the draws."""
    buffer, history = filled(1, 10, 5, end=0.0, relabel=Hindsight(reward, ratio=1.0))
    batch = buffer.sample(20_000, np.random.default_rng(0)).numpy()
    drawn = batch.obs["desired_goal"][batch.index == 1]
    for step in range(5):
        share = (drawn == history[step]["next_obs"]["achieved_goal"]).all(1).mean()
        assert share == pytest.approx(0.25 if step else 0.0, abs=0.03)


def test_true_last_observation_can_be_the_goal() -> None:
    """Every step ends its episode: the only goal is what it led to, which no row holds."""
    buffer, history = filled(2, 20, 50, end=2.0, relabel=Hindsight(reward, terminated, ratio=1.0))
    batch = buffer.sample(100, np.random.default_rng(0)).numpy()
    ends = [i for i in batch.index.tolist() if history[i]["terminated"] or history[i]["truncated"]]
    assert len(ends) > 50
    for i, index in enumerate(batch.index.tolist()):
        if index in ends:
            assert np.array_equal(batch.obs["desired_goal"][i], history[index]["next_obs"]["achieved_goal"])
            assert batch.terminated[i]


@pytest.mark.parametrize("sampler", [Uniform(), Prioritized()])
def test_stored_transitions_stay_as_they_are(sampler: Uniform | Prioritized) -> None:
    buffer, _ = filled(3, 20, 50, sampler=sampler, relabel=Hindsight(reward, terminated))
    before = buffer.state_dict()
    sample = buffer.sample(256, np.random.default_rng(0))
    for leaf in (sample.obs["desired_goal"], sample.next_obs["desired_goal"], sample.reward):
        leaf.zero_()
    for name, rows in buffer.state_dict()["rows"].items():
        assert torch.equal(rows, before["rows"][name]), name


def test_same_generator_same_sample_also_after_loading() -> None:
    relabel = Hindsight(reward, terminated)
    buffer, _ = filled(3, 20, 50, relabel=relabel)
    other = Buffer(SPEC, 60, 3, relabel=relabel)
    other.load_state_dict(buffer.state_dict())
    assert_same_batch(buffer.sample(64, np.random.default_rng(5)), other.sample(64, np.random.default_rng(5)))


def test_functions_of_one_pair_are_called_for_each() -> None:
    """As Gymnasium-Robotics' mazes: `bool(norm(achieved - desired) <= 0.45)` of a whole batch would be one flag."""

    def one_reward(achieved: Any, desired: Any, info: Any) -> float:
        return float(np.linalg.norm(achieved - desired))

    def one_end(achieved: Any, desired: Any, info: Any) -> bool:
        return bool(np.linalg.norm(achieved - desired) <= 0.2)

    buffer, _ = filled(2, 50, 50, 0.1, relabel=Hindsight(one_reward, one_end, ratio=1.0))
    batch = buffer.sample(200, np.random.default_rng(0)).numpy()
    distance = np.linalg.norm(batch.next_obs["achieved_goal"] - batch.next_obs["desired_goal"], axis=-1)
    assert batch.reward == pytest.approx(distance)
    assert np.array_equal(batch.terminated, distance <= 0.2)
    assert batch.terminated.dtype == BOOL


def test_reward_that_is_no_number_is_refused() -> None:
    buffer, _ = filled(1, 10, 10, relabel=Hindsight(lambda achieved, desired, info: achieved, ratio=1.0))
    with pytest.raises(UserError, match="expected one number"):
        buffer.sample(8, np.random.default_rng(0))


def test_what_does_not_fit_is_refused() -> None:
    relabel = Hindsight(reward)
    for parts in ({"view": NStep(3, 0.9)}, {"view": Sequence(3)}, {"sampler": Reservoir()}):
        with pytest.raises(UserError, match=r"single transitions \(replay.n_step=1"):
            Buffer(SPEC, 10, relabel=relabel, **parts)
    flat = {**SPEC, "obs": Field((2,), F32)}
    with pytest.raises(UserError, match="achieved_goal and desired_goal are missing, the task shows one array"):
        Buffer(flat, 10, relabel=relabel)
    half = {**SPEC, "obs": {"observation": Field((2,), F32), "achieved_goal": Field((2,), F32)}}
    with pytest.raises(UserError, match="desired_goal is missing, the task shows only observation, achieved_goal"):
        Buffer(half, 10, relabel=relabel)
    unequal = {**SPEC, "obs": {"desired_goal": Field((3,), F32), "achieved_goal": Field((2,), F32)}}
    with pytest.raises(UserError, match="must be equal"):
        Buffer(unequal, 10, relabel=relabel)
    with pytest.raises(UserError, match="ratio must be in"):
        Hindsight(reward, ratio=1.5)


def run_settings(**more: Any) -> Any:
    base = {"env_steps": 600, "learning_starts": 100, "eval_every_steps": 0, "eval_episodes": 2, "batch_size": 16}
    quick = {"updates_per_step": 0.25, "train_every": 2, "num_envs": 2, "tensorboard": False}
    named = {"algorithm": "dqn", "env": "toy/bit-flip-5", "replay__her": True, "net__hidden_sizes": [16]}
    return zx.config.load(**{**named, **base, **quick, **more})


def test_a_run_takes_rewards_from_its_task(tmp_path: Path) -> None:
    session = zx.Session(run_settings(replay__her_ratio=1.0), tmp_path / "run", quiet=True)
    session.run()
    assert session.loop.buffer is not None
    batch = session.loop.buffer.sample(200, np.random.default_rng(0)).numpy()
    reached = (batch.next_obs["achieved_goal"] == batch.next_obs["desired_goal"]).all(1)
    assert np.array_equal(batch.reward, np.where(reached, 0.0, -1.0))
    assert np.array_equal(batch.terminated, reached)
    assert 0.2 < reached.mean() < 0.9


def test_a_task_without_goals_is_refused_by_name(tmp_path: Path) -> None:
    for way, message in (
        ({"env": "CartPole-v1"}, r"replay.her needs a task with goals; CartPole-v1 has no method compute_reward"),
        ({"replay__n_step": 3}, r"replay.n_step=1"),
        ({"net__recurrent": "gru"}, r"no recurrent network"),
    ):
        with pytest.raises(UserError, match=message):
            zx.Session(run_settings(**way), tmp_path / "run", quiet=True)


def test_a_run_with_hindsight_resumes_exactly(tmp_path: Path) -> None:
    from conftest import differing_tensors

    class Stop(zx.Callback):
        def iteration_end(self, loop: zx.TrainingLoop, metrics: object) -> None:
            if loop.env_steps >= 350:
                loop.stop("interrupted")

    cfg = run_settings(replay__prioritized=True, replay__capacity=200)
    zx.Session(cfg, tmp_path / "whole", quiet=True).run()
    with pytest.raises(KeyboardInterrupt):
        zx.Session(cfg, tmp_path / "parts", [Stop()], quiet=True).run()
    zx.Session.resume(tmp_path / "parts", quiet=True).run()
    assert differing_tensors(tmp_path / "whole", tmp_path / "parts") == []

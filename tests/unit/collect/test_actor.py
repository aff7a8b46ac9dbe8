"""The actor in small tasks whose every number is known."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete
from torch import Tensor

from zhixing.collect.actor import Actor
from zhixing.collect.evaluation import Episode, Evaluation
from zhixing.core.policy import Decision, Phase, Policy
from zhixing.core.spaces import Spaces
from zhixing.core.tree import Field, Tree
from zhixing.envs import SerialVectorEnv

NUMBER = Field((), np.dtype(np.float32))


class Clock(gym.Env):
    """Shows its step; the reward is the action plus a tenth of the step. Copy k ends after `lengths[k]` steps."""

    observation_space = Box(0.0, 100.0, (1,), np.float32)
    action_space = Discrete(3)

    def __init__(self, length: int = 3, masked: bool = False) -> None:
        self.length, self.masked, self.t = length, masked, 0

    def _info(self) -> dict[str, Any]:
        return {"action_mask": np.array([1, self.t % 2, 0], np.int8)} if self.masked else {}

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.t = 0
        return np.float32([0.0]), self._info()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t += 1
        ended = self.t == self.length
        info = self._info() | ({"won": float(self.length)} if ended else {})
        return np.float32([self.t]), int(action) + self.t / 10, ended, False, info


class Dice(Clock):
    """Pays what its own generator throws."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        obs, _, terminated, truncated, info = super().step(action)
        return obs, float(self.np_random.integers(1, 7)), terminated, truncated, info


class Remembers(Policy):
    """Its memory counts the steps of the episode; the action is that count modulo 3, unless it explores."""

    seen_masks: list[Any]

    def __init__(self, spaces: Spaces) -> None:
        super().__init__(spaces)
        self.seen: list[tuple[Phase, int, Any]] = []

    def initial_hidden(self, num: int) -> Tree:
        return torch.zeros(num, 1)

    def act(
        self, obs: Tree, hidden: Tree, mask: Tensor | None, phase: Phase, rng: torch.Generator, env_steps: int
    ) -> Decision:
        self.seen.append((phase, env_steps, None if mask is None else mask.clone()))
        action = hidden[:, 0].long() % 3
        if phase is Phase.RANDOM:
            action = torch.randint(0, 3, action.shape, generator=rng)
        return Decision(action, value=obs[:, 0] * 2, hidden=hidden + 1, extras={"twice": obs[:, 0] * 2})


def vector(*lengths: int, task: type[Clock] = Clock, masked: bool = False) -> SerialVectorEnv:
    """Copies of different lengths."""
    left = [lengths[0], *lengths]  # the first is a copy that is only looked at
    return SerialVectorEnv(lambda: task(left.pop(0), masked), len(lengths))


def actor(*lengths: int, fields: dict[str, Any] | None = None, **how: Any) -> Actor:
    env = vector(*lengths, **how)
    return Actor(Remembers(env.spaces), env, fields, seed=0)


def test_collect_goes_on_in_the_middle_of_an_episode() -> None:
    a = actor(3, 5)
    first = a.collect(steps=2)
    assert first.batch.obs[..., 0].tolist() == [[0, 0], [1, 1]]
    assert first.episodes == []
    second = a.collect(steps=2)
    # environment 0 ends at its third step and begins anew
    assert second.batch.obs[..., 0].tolist() == [[2, 2], [0, 3]]
    assert second.batch.next_obs[..., 0].tolist() == [[3, 3], [1, 4]]  # 3 is the true last one
    assert second.batch.terminated.tolist() == [[True, False], [False, False]]
    assert a.env_steps == 8


def test_returns_and_lengths_by_hand() -> None:
    # actions 0, 1, 2 in an episode of three: 0.1 + 1.2 + 2.3 = 3.6. Two copies, seven steps: two episodes each
    episodes = actor(3, 3).collect(steps=7).episodes
    assert [e.episode_return for e in episodes] == pytest.approx([3.6] * 4)
    assert [e.length for e in episodes] == [3] * 4
    assert episodes[0].info == {"won": 3.0}


def test_memory_is_cleared_at_ends_only() -> None:
    a = actor(2, 4, fields={"hidden": Field((1,), np.dtype(np.float32)), "value": NUMBER, "twice": NUMBER})
    batch = a.collect(steps=5).batch
    assert batch.hidden[..., 0].tolist() == [[0, 0], [1, 1], [0, 2], [1, 3], [0, 0]]  # before each decision
    assert batch.action.tolist() == [[0, 0], [1, 1], [0, 2], [1, 0], [0, 0]]
    assert batch.value.tolist() == batch.twice.tolist() == [[0, 0], [2, 2], [0, 4], [2, 6], [0, 0]]


def test_collecting_episodes_stops_with_the_step_that_ends_the_last_of_them() -> None:
    a = actor(3, 5)
    experience = a.collect(episodes=3)  # they end at steps 3, 5 and 6
    assert len(experience.batch) == 6
    assert [e.length for e in experience.episodes] == [3, 5, 3]
    both = actor(2, 2).collect(episodes=1)
    assert len(both.episodes) == 2  # both end in the same step


def test_storage_grows_with_long_episodes() -> None:
    a = actor(600)
    batch = a.collect(episodes=2).batch
    assert len(batch) == 1200
    assert batch.obs[:, 0, 0].tolist() == [*range(600)] * 2
    assert batch.next_obs[598:601, 0, 0].tolist() == [599, 600, 1]
    assert np.flatnonzero(batch.terminated[:, 0]).tolist() == [599, 1199]


def test_arrays_are_overwritten_by_the_next_call() -> None:
    a = actor(9)
    first = a.collect(steps=2).batch
    kept = first.obs.copy()
    a.collect(steps=2)
    assert kept[:, 0, 0].tolist() == [0, 1]
    assert first.obs[:, 0, 0].tolist() == [2, 3]


def test_collect_takes_steps_or_episodes() -> None:
    for wrong in ({}, {"steps": 1, "episodes": 1}):
        with pytest.raises(ValueError, match="either steps"):
            actor(3).collect(**wrong)


def test_policy_is_told_phase_and_steps() -> None:
    a = actor(9, 9)
    a.collect(steps=1, phase=Phase.RANDOM)
    a.collect(steps=2)
    assert [(phase, steps) for phase, steps, _ in a.policy.seen] == [
        (Phase.RANDOM, 0),
        (Phase.COLLECT, 2),
        (Phase.COLLECT, 4),
    ]


def test_masks_reach_the_policy_and_the_batch() -> None:
    a = actor(3, masked=True)
    batch = a.collect(steps=4).batch
    even, odd = [True, False, False], [True, True, False]
    assert batch.mask[:, 0].tolist() == [even, odd, even, even]
    assert batch.next_mask[:, 0].tolist() == [odd, even, odd, odd]  # after the third step: that of the true end
    assert [mask[0].tolist() for _, _, mask in a.policy.seen] == [even, odd, even, even]


def test_evaluation_plays_each_environments_share() -> None:
    # five episodes over two environments: three in the first, two in the second, though the second is quicker
    evaluation = actor(7, 2).evaluate(5, seed=0)
    assert [e.length for e in evaluation.episodes] == [7, 7, 7, 2, 2]
    assert [e.length for e in actor(7, 2, 3).evaluate(2, seed=0).episodes] == [7, 2]


def test_evaluation_acts_as_well_as_it_can() -> None:
    a = actor(3)
    a.evaluate(1, seed=0)
    assert {phase for phase, _, _ in a.policy.seen} == {Phase.EVAL}


def test_evaluation_repeats_with_its_seed_and_not_with_another() -> None:
    a = actor(6, 6, task=Dice)
    first = a.evaluate(4, seed=3).returns
    a.collect(steps=3)
    assert a.evaluate(4, seed=3).returns.tolist() == first.tolist()
    assert a.evaluate(4, seed=4).returns.tolist() != first.tolist()
    assert len(set(first.tolist())) > 1  # the copies throw their own dice


def test_collecting_after_an_evaluation_begins_anew() -> None:
    a = actor(3)
    a.evaluate(1, seed=0)
    assert a.collect(steps=1).batch.obs.tolist() == [[[0.0]]]


def test_summary_by_hand() -> None:
    episodes = [Episode(1.0, 10, {"won": 1.0}), Episode(3.0, 20, {"won": 0.0, "lives": 2.0})]
    assert Evaluation(episodes).summary() == {
        "mean_return": 2.0,
        "std_return": 1.0,
        "min_return": 1.0,
        "max_return": 3.0,
        "mean_length": 15.0,
        "episodes": 2,
        "cut_episodes": 0,
        "lives": 2.0,  # over those that tell it
        "win_rate": 0.5,
    }


def test_numbers_that_a_task_tells_do_not_hide_the_evaluations_own() -> None:
    summary = Evaluation([Episode(1.0, 10, {"episodes": 77.0, "mean_return": -5.0})]).summary()
    assert summary["episodes"] == 1
    assert summary["mean_return"] == 1.0


def test_state_round_trip_goes_on_as_the_first() -> None:
    a, b = actor(5, 4, task=Dice), actor(5, 4, task=Dice)
    a.collect(steps=3)
    state = a.state_dict()
    assert b.load_state_dict(state) == []
    mine, theirs = a.collect(steps=9, phase=Phase.RANDOM), b.collect(steps=9, phase=Phase.RANDOM)
    assert mine.episodes == theirs.episodes
    assert np.array_equal(mine.batch.obs, theirs.batch.obs)
    assert np.array_equal(mine.batch.action, theirs.batch.action)
    assert np.array_equal(mine.batch.reward, theirs.batch.reward)
    assert b.env_steps == a.env_steps == 24


def test_state_before_the_first_step_is_a_fresh_start() -> None:
    a, b = actor(5, task=Dice), actor(5, task=Dice)
    assert b.load_state_dict(a.state_dict()) == []
    assert np.array_equal(a.collect(steps=4).batch.reward, b.collect(steps=4).batch.reward)


def test_seeds_decide_what_happens() -> None:
    env, other = vector(9, task=Dice), vector(9, task=Dice)
    rewards = [Actor(Remembers(e.spaces), e, seed=s).collect(steps=8).batch.reward for e, s in ((env, 1), (other, 2))]
    assert not np.array_equal(*rewards)


def test_load_takes_over_weights() -> None:
    class Constant(Remembers):
        def __init__(self, spaces: Spaces) -> None:
            super().__init__(spaces)
            self.weight = torch.nn.Parameter(torch.zeros(1))

    env = vector(3)
    a = Actor(Constant(env.spaces), env)
    a.load_weights({"weight": torch.tensor([5.0])})
    assert a.policy.weight.item() == 5.0

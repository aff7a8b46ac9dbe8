"""The actor in small environments with known rewards and observations."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete
from torch import Tensor

from zhixing.collectors.actor import Actor
from zhixing.collectors.evaluation import Episode, Evaluation
from zhixing.core.policy import Decision, Phase, Policy
from zhixing.core.spaces import Spaces
from zhixing.core.tree import Field, Tree
from zhixing.envs import SerialVectorEnv

NUMBER = Field((), np.dtype(np.float32))


class ClockEnv(gym.Env):
    """Observe the step t; the reward is action + t / 10. Episodes end after `length` steps."""

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


class DiceEnv(ClockEnv):
    """Return random rewards from 1 to 6."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        obs, _, terminated, truncated, info = super().step(action)
        return obs, float(self.np_random.integers(1, 7)), terminated, truncated, info


class CountingPolicy(Policy):
    """Count the steps of the episode in the hidden state; act by that count modulo 3, or at random. Record calls."""

    def __init__(self, spaces: Spaces) -> None:
        super().__init__(spaces)
        self.calls: list[tuple[Phase, int, Any]] = []

    def initial_hidden(self, num: int) -> Tree:
        return torch.zeros(num, 1)

    def act(
        self, obs: Tree, hidden: Tree, mask: Tensor | None, phase: Phase, rng: torch.Generator, env_steps: int
    ) -> Decision:
        self.calls.append((phase, env_steps, None if mask is None else mask.clone()))
        action = hidden[:, 0].long() % 3
        if phase is Phase.RANDOM:
            action = torch.randint(0, 3, action.shape, generator=rng)
        return Decision(action, value=obs[:, 0] * 2, hidden=hidden + 1, extras={"twice": obs[:, 0] * 2})


def make_env(*lengths: int, env_type: type[ClockEnv] = ClockEnv, masked: bool = False) -> SerialVectorEnv:
    """Make one environment for each episode length."""
    remaining = [lengths[0], *lengths]  # the first instance is only used to read the spaces
    return SerialVectorEnv(lambda: env_type(remaining.pop(0), masked), len(lengths))


def make_actor(*lengths: int, extra_fields: dict[str, Any] | None = None, **options: Any) -> Actor:
    env = make_env(*lengths, **options)
    return Actor(CountingPolicy(env.spaces), env, extra_fields, seed=0)


def test_collect_continues_in_the_middle_of_an_episode() -> None:
    a = make_actor(3, 5)
    first = a.collect(steps=2)
    assert first.batch.obs[..., 0].tolist() == [[0, 0], [1, 1]]
    assert first.episodes == []
    second = a.collect(steps=2)
    # environment 0 ends at its third step and resets
    assert second.batch.obs[..., 0].tolist() == [[2, 2], [0, 3]]
    assert second.batch.next_obs[..., 0].tolist() == [[3, 3], [1, 4]]  # 3 is the true final observation
    assert second.batch.terminated.tolist() == [[True, False], [False, False]]
    assert a.env_steps == 8


def test_returns_and_lengths_of_episodes() -> None:
    # actions 0, 1, 2 in an episode of three: 0.1 + 1.2 + 2.3 = 3.6. Two environments, seven steps: two episodes each
    episodes = make_actor(3, 3).collect(steps=7).episodes
    assert [e.episode_return for e in episodes] == pytest.approx([3.6] * 4)
    assert [e.length for e in episodes] == [3] * 4
    assert episodes[0].info == {"won": 3.0}


def test_hidden_state_is_cleared_only_at_episode_ends() -> None:
    a = make_actor(2, 4, extra_fields={"hidden": Field((1,), np.dtype(np.float32)), "value": NUMBER, "twice": NUMBER})
    batch = a.collect(steps=5).batch
    assert batch.hidden[..., 0].tolist() == [[0, 0], [1, 1], [0, 2], [1, 3], [0, 0]]  # before each decision
    assert batch.action.tolist() == [[0, 0], [1, 1], [0, 2], [1, 0], [0, 0]]
    assert batch.value.tolist() == batch.twice.tolist() == [[0, 0], [2, 2], [0, 4], [2, 6], [0, 0]]


def test_collecting_episodes_stops_at_the_end_of_the_last_one() -> None:
    a = make_actor(3, 5)
    experience = a.collect(episodes=3)  # they end at steps 3, 5 and 6
    assert len(experience.batch) == 6
    assert [e.length for e in experience.episodes] == [3, 5, 3]
    both = make_actor(2, 2).collect(episodes=1)
    assert len(both.episodes) == 2  # both end in the same step


def test_storage_grows_with_long_episodes() -> None:
    a = make_actor(600)
    batch = a.collect(episodes=2).batch
    assert len(batch) == 1200
    assert batch.obs[:, 0, 0].tolist() == [*range(600)] * 2
    assert batch.next_obs[598:601, 0, 0].tolist() == [599, 600, 1]
    assert np.flatnonzero(batch.terminated[:, 0]).tolist() == [599, 1199]


def test_next_call_overwrites_arrays() -> None:
    a = make_actor(9)
    first = a.collect(steps=2).batch
    copied = first.obs.copy()
    a.collect(steps=2)
    assert copied[:, 0, 0].tolist() == [0, 1]
    assert first.obs[:, 0, 0].tolist() == [2, 3]


def test_collect_takes_steps_or_episodes() -> None:
    for arguments in ({}, {"steps": 1, "episodes": 1}):
        with pytest.raises(ValueError, match="either steps"):
            make_actor(3).collect(**arguments)


def test_policy_gets_phase_and_env_steps() -> None:
    a = make_actor(9, 9)
    a.collect(steps=1, phase=Phase.RANDOM)
    a.collect(steps=2)
    assert [(phase, steps) for phase, steps, _ in a.policy.calls] == [
        (Phase.RANDOM, 0),
        (Phase.COLLECT, 2),
        (Phase.COLLECT, 4),
    ]


def test_masks_reach_the_policy_and_the_batch() -> None:
    a = make_actor(3, masked=True)
    batch = a.collect(steps=4).batch
    even, odd = [True, False, False], [True, True, False]
    assert batch.mask[:, 0].tolist() == [even, odd, even, even]
    assert batch.next_mask[:, 0].tolist() == [
        odd,
        even,
        odd,
        odd,
    ]  # after the third step: the mask of the final observation
    assert [mask[0].tolist() for _, _, mask in a.policy.calls] == [even, odd, even, even]


def test_evaluation_divides_episodes_equally() -> None:
    # five episodes over two environments: three in the first, two in the second, though the second is faster
    evaluation = make_actor(7, 2).evaluate(5, seed=0)
    assert [e.length for e in evaluation.episodes] == [7, 7, 7, 2, 2]
    assert [e.length for e in make_actor(7, 2, 3).evaluate(2, seed=0).episodes] == [7, 2]


def test_evaluation_acts_in_the_evaluation_phase() -> None:
    a = make_actor(3)
    a.evaluate(1, seed=0)
    assert {phase for phase, _, _ in a.policy.calls} == {Phase.EVAL}


def test_evaluation_depends_on_its_seed() -> None:
    a = make_actor(6, 6, env_type=DiceEnv)
    first = a.evaluate(4, seed=3).returns
    a.collect(steps=3)
    assert a.evaluate(4, seed=3).returns.tolist() == first.tolist()
    assert a.evaluate(4, seed=4).returns.tolist() != first.tolist()
    assert len(set(first.tolist())) > 1  # the environments have different random streams


def test_collect_after_an_evaluation_starts_a_new_episode() -> None:
    a = make_actor(3)
    a.evaluate(1, seed=0)
    assert a.collect(steps=1).batch.obs.tolist() == [[[0.0]]]


def test_evaluation_summary() -> None:
    episodes = [Episode(1.0, 10, {"won": 1.0}), Episode(3.0, 20, {"won": 0.0, "lives": 2.0})]
    assert Evaluation(episodes).summary() == {
        "mean_return": 2.0,
        "std_return": 1.0,
        "min_return": 1.0,
        "max_return": 3.0,
        "mean_length": 15.0,
        "episodes": 2,
        "cut_episodes": 0,
        "lives": 2.0,  # over the episodes that have it
        "win_rate": 0.5,
    }


def test_info_keys_do_not_override_summary_keys() -> None:
    summary = Evaluation([Episode(1.0, 10, {"episodes": 77.0, "mean_return": -5.0})]).summary()
    assert summary["episodes"] == 1
    assert summary["mean_return"] == 1.0


def test_restored_actor_continues_exactly() -> None:
    a, b = make_actor(5, 4, env_type=DiceEnv), make_actor(5, 4, env_type=DiceEnv)
    a.collect(steps=3)
    state = a.state_dict()
    assert b.load_state_dict(state) == []
    first, second = a.collect(steps=9, phase=Phase.RANDOM), b.collect(steps=9, phase=Phase.RANDOM)
    assert first.episodes == second.episodes
    assert np.array_equal(first.batch.obs, second.batch.obs)
    assert np.array_equal(first.batch.action, second.batch.action)
    assert np.array_equal(first.batch.reward, second.batch.reward)
    assert b.env_steps == a.env_steps == 24


def test_state_before_the_first_step_restores_a_fresh_start() -> None:
    a, b = make_actor(5, env_type=DiceEnv), make_actor(5, env_type=DiceEnv)
    assert b.load_state_dict(a.state_dict()) == []
    assert np.array_equal(a.collect(steps=4).batch.reward, b.collect(steps=4).batch.reward)


def test_other_seeds_give_other_rewards() -> None:
    rewards = []
    for seed in (1, 2):
        env = make_env(9, env_type=DiceEnv)
        rewards.append(Actor(CountingPolicy(env.spaces), env, seed=seed).collect(steps=8).batch.reward)
    assert not np.array_equal(*rewards)


def test_load_weights_sets_the_weights_of_the_policy() -> None:
    class Constant(CountingPolicy):
        def __init__(self, spaces: Spaces) -> None:
            super().__init__(spaces)
            self.weight = torch.nn.Parameter(torch.zeros(1))

    env = make_env(3)
    a = Actor(Constant(env.spaces), env)
    a.load_weights({"weight": torch.tensor([5.0])})
    assert a.policy.weight.item() == 5.0

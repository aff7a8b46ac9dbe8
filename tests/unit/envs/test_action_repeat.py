"""The option `action_repeat`: every environment accepts it; rewards are summed and episodes end in time."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete
from sample_envs import Counter

import zhixing as zx
from zhixing import envs
from zhixing.envs.torch_native import TORCH_ENVS
from zhixing.envs.wrappers.action_repeat import ActionRepeat


def play(vector: envs.VectorEnv, actions: list[Any]) -> list[Any]:
    """Return observation, reward, flags and final observation of each step of the first environment."""
    records = [(vector.reset(seed=3)[0][0].copy(), 0.0, False, False, None)]
    for action in actions:
        obs, reward, terminated, truncated, info = vector.step(np.array([action] * vector.num_envs))
        final = info["final_obs"][0].copy() if terminated[0] or truncated[0] else None
        records.append((obs[0].copy(), float(reward[0]), bool(terminated[0]), bool(truncated[0]), final))
    vector.close()
    return records


def repeated_by_hand(single: envs.VectorEnv, actions: list[Any], repeat: int) -> list[Any]:
    """Take each action several times in environments that don't repeat it."""
    records = [(single.reset(seed=3)[0][0].copy(), 0.0, False, False, None)]
    for action in actions:
        total = np.float32(0)
        for _ in range(repeat):
            obs, reward, terminated, truncated, info = single.step(np.array([action] * single.num_envs))
            total += reward[0]
            if terminated[0] or truncated[0]:
                break
        final = info["final_obs"][0].copy() if terminated[0] or truncated[0] else None
        records.append((obs[0].copy(), float(total), bool(terminated[0]), bool(truncated[0]), final))
    single.close()
    return records


@pytest.mark.parametrize("backend", ["serial", "process", "mixed", "torch"])
@pytest.mark.parametrize("name", ["CartPole-v1", "Pendulum-v1", "toy/reach"])
@pytest.mark.parametrize("limit", [None, 5])
def test_rewards_are_summed_until_the_episode_ends(name: str, backend: str, limit: int | None) -> None:
    if backend == "torch" and name not in TORCH_ENVS:
        pytest.skip(f"there is no {name} in torch")
    num_envs = 2 if backend == "mixed" else 1
    rng = np.random.default_rng(0)
    space = envs.make(name).action_space
    if isinstance(space, Discrete):
        actions = list(rng.integers(0, space.n, 60))
    else:
        actions = list(rng.uniform(space.low, space.high, (60, *space.shape)).astype(np.float32))
    limits = [{}, {}] if limit is None else [{"max_episode_steps": limit}, {"max_episode_steps": 3 * limit}]
    options = [{**limits[0], "action_repeat": 3}, limits[1]]  # the limit counts actions
    workers = 2 if backend == "mixed" else None
    repeated, single = (envs.make_vector(name, num_envs, backend, workers, options=option) for option in options)
    assert repeated.max_episode_steps == (limit or {"CartPole-v1": 167, "Pendulum-v1": 67, "toy/reach": None}[name])
    if num_envs > 1:
        single.close()
        single = envs.make_vector(name, 1, "serial", options=options[1])
    expected = repeated_by_hand(single, actions, 3)
    ends = [record[4] is not None for record in expected]
    assert any(ends) or (name == "Pendulum-v1" and limit is None)
    for one, other in zip(play(repeated, actions), expected, strict=True):
        if backend == "torch" and one[4] is not None:  # it draws an initial state in each step
            np.testing.assert_array_equal(one[4], other[4])
            assert one[1:4] == other[1:4]
            break
        np.testing.assert_array_equal(one[0], other[0])
        assert one[1] == pytest.approx(other[1], rel=1e-6)
        assert one[2:4] == other[2:4]
        assert (one[4] is None) == (other[4] is None)
        if one[4] is not None:
            np.testing.assert_array_equal(one[4], other[4])


def test_an_episode_that_ends_in_the_middle_of_an_action_has_fewer_rewards() -> None:
    # the reward is the action; the episode ends with step 4 of 3 + 1
    vector = envs.SerialVectorEnv(lambda: ActionRepeat(Counter(death=4), 3), 1)
    vector.reset(seed=0)
    obs, reward, terminated, _, _ = vector.step(np.array([2]))
    assert (obs.tolist(), reward.tolist(), terminated.tolist()) == ([[0, 3]], [6], [False])
    obs, reward, terminated, _, info = vector.step(np.array([5]))
    assert (obs.tolist(), reward.tolist(), terminated.tolist()) == ([[1, 0]], [5], [True])
    assert info["final_obs"].tolist() == [[0, 4]]
    assert info["final_info"][0]["length"] == 4  # info is that of the last step


def test_dict_observations_and_stacks_are_those_of_the_last_step() -> None:
    options = {"action_repeat": 2, "stack": 2}
    vector = envs.make_vector("dummy_envs:DictObsEnv", 1, "serial", options=options)
    obs, _ = vector.reset(seed=0)
    first = obs["noise"][0].copy()
    obs = vector.step(np.array([1]))[0]
    assert obs["noise"][0, :2].tolist() == first[:2].tolist()  # the stack has an observation per action
    assert vector.spaces.stack == 2


class Leaving(gym.Env):
    """Each of two agents gets a reward of 1 per step. The second one leaves with the second step."""

    observation_space, action_space = Box(0, 1, (1,)), Discrete(2)
    num_agents = 2

    def __init__(self, reward_kind: str = "individual") -> None:
        self.reward_kind = reward_kind

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict]:
        self.steps = 0
        return np.zeros((2, 1), np.float32), {"alive": np.array([True, True])}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict]:
        self.steps += 1
        alive = np.array([True, self.steps < 2])
        return np.zeros((2, 1), np.float32), [1.0, 1.0], False, False, {"alive": alive}


@pytest.mark.parametrize(("kind", "expected"), [("individual", [4, 2]), ("shared", [4, 4])])
def test_rewards_of_an_agent_count_until_it_leaves(kind: str, expected: list[float]) -> None:
    vector = envs.SerialVectorEnv(lambda: ActionRepeat(Leaving(kind), 4), 1)
    vector.reset(seed=0)
    assert vector.step(np.zeros((1, 2), int))[1].tolist() == [expected]


def test_masks_are_rejected() -> None:
    for name in ("dummy_envs:MaskedEnv", "skirmish/3m", "sample_envs:PettingZooStyle"):
        with pytest.raises(zx.UserError, match=r"has action masks, .* set env.action_repeat=1, not 2"):
            envs.make_vector(name, 1, "serial", options={"action_repeat": 2})


@pytest.mark.parametrize("repeat", [0, 1.5, True, "two"])
def test_invalid_numbers_are_rejected(repeat: Any) -> None:
    for name in ("CartPole-v1", "toy/reach", "sample_envs:Counter"):
        with pytest.raises(zx.UserError, match=r"env.action_repeat=.*: must be an integer of at least 1"):
            envs.make(name, action_repeat=repeat)


@pytest.mark.parametrize("name", ["CartPole-v1", "toy/reach", "sample_envs:Stateful"])
def test_actions_are_repeated_after_a_restore(name: str) -> None:
    options = {"action_repeat": 3, "max_episode_steps": 9}
    first, second = (envs.make_vector(name, 2, "serial", options=options) for _ in range(2))
    first.reset(seed=1)
    first.spaces.action.seed(0)
    actions = [np.array([first.spaces.action.sample() for _ in range(2)]) for _ in range(20)]
    for action in actions[:5]:
        first.step(action)
    second.load_state_dict(first.state_dict())
    assert second.inexact == []
    for action in actions[5:]:
        for one, other in zip(first.step(action)[:4], second.step(action)[:4], strict=True):
            assert one.tobytes() == other.tobytes()


def test_env_steps_count_actions(tmp_path: Any) -> None:
    settings = {"env_steps": 64, "rollout_steps": 16, "eval_every": 0, "tensorboard": False, "num_envs": 2}
    result = zx.train(
        "ppo", "toy/match", out=tmp_path / "run", quiet=True, env__action_repeat=2, vector__backend="serial", **settings
    )
    assert result["env_steps"] == 64
    assert zx.evaluate(tmp_path / "run", episodes=2).episodes[0].length == 5  # of 10 steps of toy/match

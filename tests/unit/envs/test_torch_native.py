"""Torch-native environments match Gymnasium's, can be seeded and restored exactly, and reject what they can't do."""

from __future__ import annotations

import math
from collections.abc import Callable

import gymnasium as gym
import numpy as np
import pytest
import torch

from zhixing.envs import FailurePolicy, make_vector
from zhixing.envs.torch_native import TORCH_ENVS, TorchVectorEnv
from zhixing.envs.torch_native.skirmish import SKIRMISH_ENVS
from zhixing.errors import UserError

PI = math.pi
# states are sampled from these ranges, which include terminal states
BOUNDS = {
    "Acrobot-v1": ([-PI, -PI, -12.5, -28.0], [PI, PI, 12.5, 28.0]),
    "CartPole-v1": ([-2.6, -3.0, -0.25, -3.0], [2.6, 3.0, 0.25, 3.0]),
    "MountainCar-v0": ([-1.25, -0.08], [0.6, 0.08]),
    "MountainCarContinuous-v0": ([-1.25, -0.08], [0.6, 0.08]),
    "Pendulum-v1": ([-12.0, -8.0], [12.0, 8.0]),
}
NUM_ENVS = 500


def make_torch_env(name: str, num_envs: int, **options: object) -> TorchVectorEnv:
    env = make_vector(name, num_envs, "torch", options=options)
    assert isinstance(env, TorchVectorEnv)
    return env


def sample_actions(env: TorchVectorEnv, rng: np.random.Generator) -> np.ndarray:
    if env.spaces.discrete:
        return rng.integers(0, env.spaces.num_actions, env.num_envs)
    return rng.uniform(-3.0, 3.0, (env.num_envs, 1)).astype(np.float32)  # also out of bounds


def test_every_env_has_bounds() -> None:
    assert BOUNDS.keys() == TORCH_ENVS.keys() - SKIRMISH_ENVS.keys()  # tested in test_torch_skirmish.py


OPTIONS = [(name, {}) for name in sorted(BOUNDS)]
OPTIONS += [
    ("CartPole-v1", {"sutton_barto_reward": True}),
    ("Pendulum-v1", {"g": 3.0}),
    ("MountainCar-v0", {"goal_velocity": 0.02}),
    ("MountainCarContinuous-v0", {"goal_velocity": 0.02}),
]


@pytest.mark.parametrize(("name", "options"), OPTIONS)
def test_transitions_match_gymnasium(name: str, options: dict[str, float]) -> None:
    """In double precision they agree up to the precision of observations. In single precision, the one that is used,
    rounding adds up: most in Acrobot, whose links turn up to five radians per step."""
    env, single = make_torch_env(name, NUM_ENVS, **options), gym.make(name, disable_env_checker=True, **options)
    rng = np.random.default_rng(0)
    env.reset(seed=0)
    states = rng.uniform(*BOUNDS[name], (NUM_ENVS, len(BOUNDS[name][0]))).astype(np.float32)
    actions = sample_actions(env, rng)
    exact = env.env.transition(torch.from_numpy(states.T.astype(np.float64)), torch.from_numpy(actions))
    exact_obs = env.env.observe(exact.state)["obs"].numpy()
    env._state = torch.from_numpy(states.T.copy())
    _, reward, terminated, truncated, info = env.step(actions)
    assert not truncated.any()
    for i in range(NUM_ENVS):
        single.reset(seed=0)
        single.unwrapped.state = states[i].astype(np.float64)  # type: ignore[attr-defined]
        obs, expected_reward, expected_terminated, _, _ = single.step(actions[i])
        np.testing.assert_allclose(exact_obs[i], obs, rtol=2e-7, atol=1e-7)
        np.testing.assert_allclose(exact.reward[i], expected_reward, rtol=2e-7, atol=1e-7)
        np.testing.assert_allclose(reward[i], expected_reward, rtol=1e-5, atol=1e-5)
        assert terminated[i] == exact.terminated[i] == expected_terminated
    next_state = env.env.transition(torch.from_numpy(states.T.copy()), torch.from_numpy(actions)).state
    next_obs = env.env.observe(next_state)["obs"]
    tolerance = 3e-4 if name == "Acrobot-v1" else 1e-5
    np.testing.assert_allclose(next_obs, exact_obs, rtol=tolerance, atol=tolerance)
    assert (terminated.sum() > 5) == (name != "Pendulum-v1")
    if terminated.any():
        np.testing.assert_array_equal(info["final_obs"][terminated], next_obs[terminated])


@pytest.mark.parametrize("name", sorted(BOUNDS))
def test_initial_states_match_gymnasium(name: str) -> None:
    """Both are uniform: extremes of 4,000 samples differ by at most 1 % of the range (false alarm: e^-40)."""
    actual = make_torch_env(name, 4_000).reset(seed=0)[0]
    single = gym.make(name, disable_env_checker=True)
    single.reset(seed=0)
    expected = np.array([single.reset()[0] for _ in range(4_000)])
    width = np.ptp(expected, 0) + 1e-9
    assert (np.abs(actual.min(0) - expected.min(0)) <= 0.01 * width).all()
    assert (np.abs(actual.max(0) - expected.max(0)) <= 0.01 * width).all()
    np.testing.assert_allclose(actual.mean(0), expected.mean(0), atol=0.05 * width.max())


@pytest.mark.parametrize("name", sorted(BOUNDS))
def test_time_limit_matches_gymnasium(name: str) -> None:
    assert make_torch_env(name, 1).max_episode_steps == gym.spec(name).max_episode_steps
    assert make_torch_env(name, 1, max_episode_steps=-1).max_episode_steps is None


def test_only_ended_envs_are_reset() -> None:
    env = make_torch_env("CartPole-v1", 3)
    env.reset(seed=0)
    env._state[0, 1] = 2.5  # off the track
    obs, reward, terminated, _, info = env.step(np.array([1, 1, 1]))
    assert terminated.tolist() == [False, True, False]
    assert reward.tolist() == [1.0, 1.0, 1.0]
    assert abs(obs[1, 0]) <= 0.05 < 2.4 < info["final_obs"][1, 0]
    np.testing.assert_array_equal(obs[[0, 2]], info["final_obs"][[0, 2]])
    assert list(info["final_info"]) == [1]
    assert env._elapsed.tolist() == [1, 0, 1]


@pytest.mark.parametrize("name", sorted(BOUNDS))
def test_seeding_and_restoring_are_exact(name: str) -> None:
    env, other = make_torch_env(name, 7, max_episode_steps=9), make_torch_env(name, 7, max_episode_steps=9)
    np.testing.assert_array_equal(env.reset(seed=3)[0], other.reset(seed=3)[0])
    rng = np.random.default_rng(1)
    for step in range(40):
        if step == 17:  # a third env continues from the second one's state
            saved = other.state_dict()
            other = make_torch_env(name, 7, max_episode_steps=9)
            np.testing.assert_array_equal(other.load_state_dict(saved)[0], obs)  # noqa: F821
        actions = sample_actions(env, rng)
        (obs, *rest, _), expected = env.step(actions), other.step(actions)[:-1]
        for actual_part, expected_part in zip((obs, *rest), expected, strict=True):
            np.testing.assert_array_equal(actual_part, expected_part)
    first = env.reset(seed=3)[0]
    assert not np.array_equal(first, env.reset()[0])
    np.testing.assert_array_equal(first, env.reset(seed=3)[0])


def test_saved_state_does_not_change_with_later_steps() -> None:
    env = make_torch_env("Pendulum-v1", 2)
    env.reset(seed=0)
    saved = env.state_dict()
    before = {name: value.copy() for name, value in saved["env_state"].items()}
    for _ in range(3):
        env.step(np.ones((2, 1), np.float32))
    for name, value in before.items():
        np.testing.assert_array_equal(saved["env_state"][name], value)


def test_actions_are_rescaled_as_in_spaces() -> None:
    env = make_torch_env("Pendulum-v1", 5)
    action = np.array([[-2.0], [-1.0], [0.25], [1.0], [7.0]], np.float32)
    np.testing.assert_allclose(env.to_env_action(torch.from_numpy(action)).numpy(), env.spaces.to_env(action))
    discrete = torch.tensor([0, 1, 1])
    assert make_torch_env("CartPole-v1", 3).to_env_action(discrete) is discrete


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: make_vector("toy/match", 2, "torch"),
            "no torch version .available: Acrobot-v1, CartPole-v1, Mou",
        ),
        (lambda: make_vector("CartPole-v1", 2, "torch", render_mode="rgb_array"), "no option render_mode"),
        (lambda: make_vector("CartPole-v1", 2, "torch", options={"g": 3.0}), "'g'"),
        (
            lambda: make_vector("CartPole-v1", 2, "torch", failure_policy=FailurePolicy("replace")),
            "torch environments step together",
        ),
        (lambda: make_torch_env("CartPole-v1", 2).reset(options={"low": 0.0}), "accepts no reset options"),
        (lambda: make_torch_env("CartPole-v1", 2).render(), "can't render"),
    ],
)
def test_unsupported_use_is_rejected(call: Callable[[], object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        call()

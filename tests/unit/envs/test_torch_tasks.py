from __future__ import annotations

import math
from collections.abc import Callable

import gymnasium as gym
import numpy as np
import pytest
import torch

from zhixing.envs import FailurePolicy, make_vector
from zhixing.envs.torch_native import TORCH, TorchVectorEnv
from zhixing.envs.torch_native.skirmish import SKIRMISHES
from zhixing.errors import UserError

PI = math.pi
# where states are drawn from: all that can be reached, beyond the ends of episodes too
BOUNDS = {
    "Acrobot-v1": ([-PI, -PI, -12.5, -28.0], [PI, PI, 12.5, 28.0]),
    "CartPole-v1": ([-2.6, -3.0, -0.25, -3.0], [2.6, 3.0, 0.25, 3.0]),
    "MountainCar-v0": ([-1.25, -0.08], [0.6, 0.08]),
    "MountainCarContinuous-v0": ([-1.25, -0.08], [0.6, 0.08]),
    "Pendulum-v1": ([-12.0, -8.0], [12.0, 8.0]),
}
NUM = 500


def in_torch(name: str, num: int, **options: object) -> TorchVectorEnv:
    env = make_vector(name, num, "torch", options=options)
    assert isinstance(env, TorchVectorEnv)
    return env


def actions_of(env: TorchVectorEnv, rng: np.random.Generator) -> np.ndarray:
    if env.spaces.discrete:
        return rng.integers(0, env.spaces.num_actions, env.num_envs)
    return rng.uniform(-3.0, 3.0, (env.num_envs, 1)).astype(np.float32)  # beyond the bounds, too


def test_every_task_has_bounds_here() -> None:
    assert BOUNDS.keys() == TORCH.keys() - SKIRMISHES.keys()  # which have tests of their own


OPTIONS = [(name, {}) for name in sorted(BOUNDS)]
OPTIONS += [
    ("CartPole-v1", {"sutton_barto_reward": True}),
    ("Pendulum-v1", {"g": 3.0}),
    ("MountainCar-v0", {"goal_velocity": 0.02}),
    ("MountainCarContinuous-v0", {"goal_velocity": 0.02}),
]


@pytest.mark.parametrize(("name", "options"), OPTIONS)
def test_moves_as_gymnasiums_own_from_the_same_states(name: str, options: dict[str, float]) -> None:
    """In double precision as exactly as observations can tell; as it runs, in single, within what that costs: most in
    Acrobot, whose fastest links turn by five radians in a step."""
    env, single = in_torch(name, NUM, **options), gym.make(name, disable_env_checker=True, **options)
    rng = np.random.default_rng(0)
    env.reset(seed=0)
    states = rng.uniform(*BOUNDS[name], (NUM, len(BOUNDS[name][0]))).astype(np.float32)
    actions = actions_of(env, rng)
    exact = env.task.move(torch.from_numpy(states.T.astype(np.float64)), torch.from_numpy(actions))
    exact_obs = env.task.observe(exact.state)["obs"].numpy()
    env._state = torch.from_numpy(states.T.copy())
    _, reward, terminated, truncated, info = env.step(actions)
    assert not truncated.any()
    for i in range(NUM):
        single.reset(seed=0)
        single.unwrapped.state = states[i].astype(np.float64)  # type: ignore[attr-defined]
        obs, paid, over, _, _ = single.step(actions[i])
        np.testing.assert_allclose(exact_obs[i], obs, rtol=2e-7, atol=1e-7)
        np.testing.assert_allclose(exact.reward[i], paid, rtol=2e-7, atol=1e-7)
        np.testing.assert_allclose(reward[i], paid, rtol=1e-5, atol=1e-5)
        assert terminated[i] == exact.terminated[i] == over
    moved = env.task.observe(env.task.move(torch.from_numpy(states.T.copy()), torch.from_numpy(actions)).state)["obs"]
    rough = 3e-4 if name == "Acrobot-v1" else 1e-5
    np.testing.assert_allclose(moved, exact_obs, rtol=rough, atol=rough)
    assert (terminated.sum() > 5) == (name != "Pendulum-v1")
    if terminated.any():
        np.testing.assert_array_equal(info["final_obs"][terminated], moved[terminated])


@pytest.mark.parametrize("name", sorted(BOUNDS))
def test_episodes_begin_where_gymnasiums_do(name: str) -> None:
    """Both are uniform: extremes of 4000 draws lie within 1 % of the width from each other, but for chance of e^-40."""
    mine = in_torch(name, 4_000).reset(seed=0)[0]
    single = gym.make(name, disable_env_checker=True)
    single.reset(seed=0)
    theirs = np.array([single.reset()[0] for _ in range(4_000)])
    width = np.ptp(theirs, 0) + 1e-9
    assert (np.abs(mine.min(0) - theirs.min(0)) <= 0.01 * width).all()
    assert (np.abs(mine.max(0) - theirs.max(0)) <= 0.01 * width).all()
    np.testing.assert_allclose(mine.mean(0), theirs.mean(0), atol=0.05 * width.max())


@pytest.mark.parametrize("name", sorted(BOUNDS))
def test_time_limit_is_gymnasiums(name: str) -> None:
    assert in_torch(name, 1).limit == gym.spec(name).max_episode_steps
    assert in_torch(name, 1, max_episode_steps=-1).limit > 10**9


def test_only_copies_that_ended_begin_anew() -> None:
    env = in_torch("CartPole-v1", 3)
    env.reset(seed=0)
    env._state[0, 1] = 2.5  # out of the track
    obs, reward, terminated, _, info = env.step(np.array([1, 1, 1]))
    assert terminated.tolist() == [False, True, False]
    assert reward.tolist() == [1.0, 1.0, 1.0]
    assert abs(obs[1, 0]) <= 0.05 < 2.4 < info["final_obs"][1, 0]
    np.testing.assert_array_equal(obs[[0, 2]], info["final_obs"][[0, 2]])
    assert list(info["final_info"]) == [1]
    assert env._elapsed.tolist() == [1, 0, 1]


@pytest.mark.parametrize("name", sorted(BOUNDS))
def test_same_seed_same_steps_and_exact_restoring(name: str) -> None:
    env, other = in_torch(name, 7, max_episode_steps=9), in_torch(name, 7, max_episode_steps=9)
    np.testing.assert_array_equal(env.reset(seed=3)[0], other.reset(seed=3)[0])
    rng = np.random.default_rng(1)
    for step in range(40):
        if step == 17:  # a third one goes on where the second was
            saved = other.state_dict()
            other = in_torch(name, 7, max_episode_steps=9)
            np.testing.assert_array_equal(other.load_state_dict(saved)[0], obs)  # noqa: F821
        actions = actions_of(env, rng)
        (obs, *rest, _), (theirs, *others, _) = env.step(actions), other.step(actions)
        for mine, its in zip((obs, *rest), (theirs, *others), strict=True):
            np.testing.assert_array_equal(mine, its)
    first = env.reset(seed=3)[0]
    assert not np.array_equal(first, env.reset()[0])
    np.testing.assert_array_equal(first, env.reset(seed=3)[0])


def test_saved_state_is_no_view_of_what_goes_on() -> None:
    env = in_torch("Pendulum-v1", 2)
    env.reset(seed=0)
    saved = env.state_dict()
    before = {name: value.copy() for name, value in saved["env_state"].items()}
    for _ in range(3):
        env.step(np.ones((2, 1), np.float32))
    for name, value in before.items():
        np.testing.assert_array_equal(saved["env_state"][name], value)


def test_actions_of_policies_are_scaled_as_for_others() -> None:
    env = in_torch("Pendulum-v1", 5)
    given = np.array([[-2.0], [-1.0], [0.25], [1.0], [7.0]], np.float32)
    np.testing.assert_allclose(env.to_task(torch.from_numpy(given)).numpy(), env.spaces.to_env(given))
    discrete = torch.tensor([0, 1, 1])
    assert in_torch("CartPole-v1", 3).to_task(discrete) is discrete


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (
            lambda: make_vector("toy/match", 2, "torch"),
            "no version in torch .Acrobot-v1, CartPole-v1, Mou",
        ),
        (lambda: make_vector("CartPole-v1", 2, "torch", render_mode="rgb_array"), "no option render_mode"),
        (lambda: make_vector("CartPole-v1", 2, "torch", options={"g": 3.0}), "'g'"),
        (
            lambda: make_vector("CartPole-v1", 2, "torch", failure_policy=FailurePolicy("replace")),
            "torch environments step together",
        ),
        (lambda: in_torch("CartPole-v1", 2).reset(options={"low": 0.0}), "no options at a reset"),
        (lambda: in_torch("CartPole-v1", 2).render(), "gives no picture"),
    ],
)
def test_what_it_cannot_do_is_told(make: Callable[[], object], told: str) -> None:
    with pytest.raises(UserError, match=told):
        make()

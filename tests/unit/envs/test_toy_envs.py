"""The toy environments: rules, documented returns, and exact restoring."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from zhixing.envs import make, make_vector, names
from zhixing.errors import UserError

NEW = ["toy/bit-flip-15", "toy/recall", "toy/cartpole-no-velocity"]


def play(env: gym.Env, policy: Callable[[Any], Any], episodes: int) -> np.ndarray:
    """Return the returns of episodes."""
    returns: list[float] = []
    obs, _ = env.reset(seed=0)
    while len(returns) < episodes:
        total, over = 0.0, False
        while not over:
            obs, reward, terminated, truncated, _ = env.step(policy(obs))
            total, over = total + reward, terminated or truncated
        returns.append(total)
        obs, _ = env.reset()
    return np.array(returns)


def assert_mean(values: np.ndarray, expected: float) -> None:
    """Assert that the mean is within four standard errors."""
    assert values.mean() == pytest.approx(expected, abs=4 * values.std() / len(values) ** 0.5 + 1e-9)


@pytest.mark.parametrize("name", [*NEW, "toy/bit-flip-3"])
def test_env_passes_gymnasiums_checker(name: str) -> None:
    check_env(make(name, render_mode="rgb_array"), skip_render_check=False)


@pytest.mark.parametrize("name", NEW)
def test_env_is_listed(name: str) -> None:
    assert name in names()


# --- bit-flip


def first_wrong_bit(obs: dict[str, Any]) -> int:
    return int((obs["observation"] != obs["desired_goal"]).argmax())


def test_bit_flip_returns() -> None:
    """If k bits differ, k - 1 steps have reward -1 and one has 0. k is 15/2 on average; k = 0 is sampled again."""
    env = make("toy/bit-flip-15")
    assert_mean(play(env, first_wrong_bit, 2000), 1 - 15 / 2)
    env.action_space.seed(0)
    assert play(env, lambda _: env.action_space.sample(), 200).mean() == pytest.approx(-15.0, abs=0.1)


def test_bit_flip_with_two_bits_by_hand() -> None:
    """Two of the three possible differences need one flip (return 0), one needs two (return -1): -1/3 at best.

    With random actions, one flip succeeds with probability 1/2, else the return is -2. Two flips succeed in two steps
    with probability 1/2: 2/3 (0.5 · 0 + 0.5 · -2) + 1/3 (0.5 · -1 + 0.5 · -2) = -2/3 - 1/2.
    """
    env = make("toy/bit-flip-2")
    assert_mean(play(env, first_wrong_bit, 3000), -1 / 3)
    env.action_space.seed(1)
    assert_mean(play(env, lambda _: env.action_space.sample(), 3000), -2 / 3 - 1 / 2)


def test_bit_flip_terminates_on_success_and_is_truncated_after_n_steps() -> None:
    env = make("toy/bit-flip-6")
    obs, info = env.reset(seed=3)
    wrong = np.flatnonzero(obs["observation"] != obs["desired_goal"])
    assert info == {"is_success": False}
    for bit in wrong[:-1]:
        obs, reward, terminated, _, info = env.step(bit)
        assert (reward, terminated, info["is_success"]) == (-1.0, False, False)
    obs, reward, terminated, _, info = env.step(wrong[-1])
    assert (reward, terminated, info["is_success"]) == (0.0, True, True)
    assert np.array_equal(obs["achieved_goal"], obs["desired_goal"])
    env.reset(seed=3)
    correct = next(bit for bit in range(6) if bit not in wrong)
    ends = [env.step(correct)[2:4] for _ in range(6)]
    assert ends == [(False, False)] * 5 + [(False, True)]


def test_bit_flip_computes_rewards_of_any_goals() -> None:
    env = make("toy/bit-flip-3").unwrapped
    achieved, desired = np.array([[0, 1, 1], [0, 1, 1]]), np.array([[0, 1, 1], [1, 1, 1]])
    assert env.compute_reward(achieved, desired, {}).tolist() == [0.0, -1.0]
    assert env.compute_terminated(achieved, desired, {}).tolist() == [True, False]
    assert env.compute_reward(achieved[0], desired[0], {}) == 0.0


@pytest.mark.parametrize("name", ["toy/bit-flip-0", "toy/bit-flip-", "toy/bit-flip-x", "toy/bit-flip-3-4"])
def test_bit_flip_needs_a_number_of_bits(name: str) -> None:
    with pytest.raises(UserError, match="did you mean 'toy/bit-flip-15'"):
        make(name)
    with pytest.raises(UserError, match="has no option 'bits'"):
        make("toy/bit-flip-4", bits=3)


# --- recall


def test_recall_observes_the_cue_once_and_rewards_it_at_the_end() -> None:
    env = make("toy/recall", delay=3)
    obs, _ = env.reset(seed=0)
    cue = int(obs.argmax())
    assert obs.tolist() == np.eye(5)[cue].tolist()
    for _ in range(3):
        obs, reward, terminated, truncated, _ = env.step(cue)
        assert not obs.any()
        assert (reward, terminated, truncated) == (0.0, False, False)
    obs, reward, terminated, _, _ = env.step(cue)
    assert obs.tolist() == [0, 0, 0, 0, 1]
    assert (reward, terminated) == (0.0, False)
    _, reward, terminated, truncated, _ = env.step(cue)
    assert (reward, terminated, truncated) == (1.0, True, False)


def test_recall_returns() -> None:
    env = make("toy/recall")
    cue = 0

    def remember(obs: np.ndarray) -> int:
        nonlocal cue
        cue = int(obs[:4].argmax()) if obs[:4].any() else cue
        return cue

    assert play(env, remember, 100).tolist() == [1.0] * 100
    assert_mean(play(env, lambda obs: 0, 2000), 0.25)
    env.action_space.seed(0)
    assert_mean(play(env, lambda obs: env.action_space.sample(), 2000), 0.25)


def test_recall_rejects_a_negative_delay() -> None:
    with pytest.raises(UserError, match="delay=-1"):
        make("toy/recall", delay=-1)


# --- cart-pole


@pytest.mark.parametrize("seed", range(3))
def test_cartpole_equals_gymnasium(seed: int) -> None:
    """Also across unseeded resets. Only the observations differ, by the missing velocities."""
    env, cartpole = make("toy/cartpole-no-velocity"), gym.make("CartPole-v1")
    rng = np.random.default_rng(seed)
    obs, full_obs = env.reset(seed=seed)[0], cartpole.reset(seed=seed)[0]
    for _ in range(300):
        assert np.array_equal(obs, full_obs[[0, 2]])
        action = int(rng.integers(2))
        obs, *results, _ = env.step(action)
        full_obs, *expected, _ = cartpole.step(action)
        assert results == expected
        assert np.array_equal(obs, full_obs[[0, 2]])
        if results[1] or results[2]:
            obs, full_obs = env.reset()[0], cartpole.reset()[0]


def test_cartpole_returns() -> None:
    """A controller that estimates velocities from differences gets the best return of 500."""
    env = make("toy/cartpole-no-velocity")
    previous: np.ndarray | None = None

    def balance(obs: np.ndarray) -> int:
        nonlocal previous
        last = obs if previous is None or env.unwrapped.steps == 0 else previous
        previous = obs
        position, angle = obs
        velocity, angular_velocity = (obs - last) / 0.02
        return int(angle + 0.3 * angular_velocity + 0.05 * position + 0.1 * velocity > 0)

    assert play(env, balance, 10).tolist() == [500.0] * 10
    env.action_space.seed(0)
    assert play(env, lambda _: env.action_space.sample(), 500).mean() == pytest.approx(22.3, abs=2.5)


# --- state


@pytest.mark.parametrize("name", NEW)
@pytest.mark.parametrize("backend", ["serial", "process"])
def test_state_restored_mid_episode_continues_identically(name: str, backend: str) -> None:
    """Also over several later episodes, in the same environments and in new ones."""

    def record(env: Any, steps: int, seed: int) -> list[Any]:
        rng, results = np.random.default_rng(seed), []
        for _ in range(steps):
            obs, reward, terminated, truncated, _ = env.step(rng.integers(env.single_action_space.n, size=3))
            leaves = obs.values() if isinstance(obs, dict) else [obs]
            results.append([np.copy(leaf).tolist() for leaf in (*leaves, reward, terminated, truncated)])
        return results

    env, new_env = (make_vector(name, 3, backend, workers=1 if backend == "process" else None) for _ in range(2))
    env.reset(seed=1)
    record(env, 17, 2)
    state = env.state_dict()
    expected = record(env, 60, 3)
    new_env.reset(seed=9)
    record(new_env, 5, 4)
    for other in (env, new_env):
        other.load_state_dict(state)
        assert other.inexact == []
        assert record(other, 60, 3) == expected
    env.close()
    new_env.close()


def test_single_env_saves_and_restores_its_state() -> None:
    for name in NEW:
        env, other = make(name), make(name)
        env.reset(seed=0)
        env.step(1)
        state = env.unwrapped.state_dict()
        saved = str(state)
        other.reset(seed=5)
        other.unwrapped.load_state_dict(state)
        for _ in range(3):
            assert str(env.step(0)) == str(other.step(0))
        assert str(env.reset()) == str(other.reset())
        assert str(state) == saved  # later steps don't change a saved state


@pytest.mark.parametrize("name", NEW)
def test_rendered_images_change_with_the_state(name: str) -> None:
    env = make(name, render_mode="rgb_array")
    env.reset(seed=0)
    frames = [env.render()]
    for _ in range(5):
        env.step(0)
        frames.append(env.render())
    assert all(frame.dtype == np.uint8 and frame.shape == frames[0].shape and frame.ndim == 3 for frame in frames)
    assert any(not np.array_equal(frames[0], frame) for frame in frames)

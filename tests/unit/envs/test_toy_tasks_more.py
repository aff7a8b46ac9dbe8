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


def returns_of(env: gym.Env, choose: Callable[[Any], Any], episodes: int) -> np.ndarray:
    found = []
    obs, _ = env.reset(seed=0)
    while len(found) < episodes:
        total, over = 0.0, False
        while not over:
            obs, reward, terminated, truncated, _ = env.step(choose(obs))
            total, over = total + reward, terminated or truncated
        found.append(total)
        obs, _ = env.reset()
    return np.array(found)


def assert_mean(values: np.ndarray, wanted: float) -> None:
    assert values.mean() == pytest.approx(wanted, abs=4 * values.std() / len(values) ** 0.5 + 1e-9)


@pytest.mark.parametrize("name", [*NEW, "toy/bit-flip-3"])
def test_is_what_gymnasium_calls_an_environment(name: str) -> None:
    check_env(make(name, render_mode="rgb_array"), skip_render_check=False)


@pytest.mark.parametrize("name", NEW)
def test_is_listed(name: str) -> None:
    assert name in names()


# --- bit-flip


def first_wrong_bit(obs: dict[str, Any]) -> int:
    return int((obs["observation"] != obs["desired_goal"]).argmax())


def test_bit_flip_returns() -> None:
    """k bits differ: k - 1 steps of -1, then 0. k is 15/2 on average; none differing, 1 in 32768, is drawn anew."""
    env = make("toy/bit-flip-15")
    assert_mean(returns_of(env, first_wrong_bit, 2000), 1 - 15 / 2)
    env.action_space.seed(0)
    assert returns_of(env, lambda _: env.action_space.sample(), 200).mean() == pytest.approx(-15.0, abs=0.1)


def test_bit_flip_with_two_bits_by_hand() -> None:
    """Of the 3 differences 2 need one flip (return 0) and one needs two (-1): -1/3 at best. Random play: one flip to go
    is done at once with 1/2, else 2 are to go and none is left; two to go are done in two steps with 1/2:
    2/3 (0.5 · 0 + 0.5 · -2) + 1/3 (0.5 · -1 + 0.5 · -2) = -2/3 - 1/2."""
    env = make("toy/bit-flip-2")
    assert_mean(returns_of(env, first_wrong_bit, 3000), -1 / 3)
    env.action_space.seed(1)
    assert_mean(returns_of(env, lambda _: env.action_space.sample(), 3000), -2 / 3 - 1 / 2)


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
    right = next(bit for bit in range(6) if bit not in wrong)
    ends = [env.step(right)[2:4] for _ in range(6)]
    assert ends == [(False, False)] * 5 + [(False, True)]


def test_bit_flip_tells_the_reward_of_any_goals() -> None:
    task = make("toy/bit-flip-3").unwrapped
    achieved, desired = np.array([[0, 1, 1], [0, 1, 1]]), np.array([[0, 1, 1], [1, 1, 1]])
    assert task.compute_reward(achieved, desired, {}).tolist() == [0.0, -1.0]
    assert task.compute_terminated(achieved, desired, {}).tolist() == [True, False]
    assert task.compute_reward(achieved[0], desired[0], {}) == 0.0


@pytest.mark.parametrize("wrong", ["toy/bit-flip-0", "toy/bit-flip-", "toy/bit-flip-x", "toy/bit-flip-3-4"])
def test_bit_flip_needs_a_number_of_bits(wrong: str) -> None:
    with pytest.raises(UserError, match="did you mean 'toy/bit-flip-15'"):
        make(wrong)
    with pytest.raises(UserError, match="has no option 'bits'"):
        make("toy/bit-flip-4", bits=3)


# --- recall


def test_recall_shows_the_cue_once_and_pays_for_it_at_the_end() -> None:
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

    assert returns_of(env, remember, 100).tolist() == [1.0] * 100
    assert_mean(returns_of(env, lambda obs: 0, 2000), 0.25)
    env.action_space.seed(0)
    assert_mean(returns_of(env, lambda obs: env.action_space.sample(), 2000), 0.25)


def test_recall_refuses_a_negative_delay() -> None:
    with pytest.raises(UserError, match="delay=-1"):
        make("toy/recall", delay=-1)


# --- cart-pole


@pytest.mark.parametrize("seed", range(3))
def test_cartpole_moves_as_gymnasiums(seed: int) -> None:
    """Also over resets without a seed; only what is seen differs."""
    ours, theirs = make("toy/cartpole-no-velocity"), gym.make("CartPole-v1")
    rng = np.random.default_rng(seed)
    seen, whole = ours.reset(seed=seed)[0], theirs.reset(seed=seed)[0]
    for _ in range(300):
        assert np.array_equal(seen, whole[[0, 2]])
        action = int(rng.integers(2))
        seen, *mine, _ = ours.step(action)
        whole, *their, _ = theirs.step(action)
        assert mine == their
        assert np.array_equal(seen, whole[[0, 2]])
        if mine[1] or mine[2]:
            seen, whole = ours.reset()[0], theirs.reset()[0]


def test_cartpole_returns() -> None:
    """Its best return is the limit of 500; a controller that estimates velocities by differences gets there."""
    env = make("toy/cartpole-no-velocity")
    before: np.ndarray | None = None

    def balance(obs: np.ndarray) -> int:
        nonlocal before
        last = obs if before is None or env.unwrapped.steps == 0 else before
        before = obs
        position, angle = obs
        speed, turning = (obs - last) / 0.02
        return int(angle + 0.3 * turning + 0.05 * position + 0.1 * speed > 0)

    assert returns_of(env, balance, 10).tolist() == [500.0] * 10
    env.action_space.seed(0)
    assert returns_of(env, lambda _: env.action_space.sample(), 500).mean() == pytest.approx(22.3, abs=2.5)


# --- state


@pytest.mark.parametrize("name", NEW)
@pytest.mark.parametrize("backend", ["serial", "process"])
def test_snapshot_in_mid_episode_goes_on_exactly(name: str, backend: str) -> None:
    """Over many ends of episodes after it, in the same environments and in fresh ones."""

    def play(env: Any, steps: int, seed: int) -> list[Any]:
        rng, shown = np.random.default_rng(seed), []
        for _ in range(steps):
            obs, reward, terminated, truncated, _ = env.step(rng.integers(env.single_action_space.n, size=3))
            leaves = obs.values() if isinstance(obs, dict) else [obs]
            shown.append([np.copy(leaf).tolist() for leaf in (*leaves, reward, terminated, truncated)])
        return shown

    env, fresh = (make_vector(name, 3, backend, workers=1 if backend == "process" else None) for _ in range(2))
    env.reset(seed=1)
    play(env, 17, 2)
    state = env.state_dict()
    expected = play(env, 60, 3)
    fresh.reset(seed=9)
    play(fresh, 5, 4)
    for other in (env, fresh):
        other.load_state_dict(state)
        assert other.inexact == []
        assert play(other, 60, 3) == expected
    env.close()
    fresh.close()


def test_one_environment_saves_and_restores_itself() -> None:
    for name in NEW:
        env, other = make(name), make(name)
        env.reset(seed=0)
        env.step(1)
        state = env.unwrapped.state_dict()
        saved = str(state)
        other.reset(seed=5)
        other.unwrapped.load_state_dict(state)
        for _ in range(3):
            mine, theirs = env.step(0), other.step(0)
            assert str(mine) == str(theirs)
        assert str(env.reset()) == str(other.reset())
        assert str(state) == saved  # a copy, which later steps don't change


@pytest.mark.parametrize("name", NEW)
def test_pictures_change_with_the_state(name: str) -> None:
    env = make(name, render_mode="rgb_array")
    env.reset(seed=0)
    frames = [env.render()]
    for _ in range(5):
        env.step(0)
        frames.append(env.render())
    assert all(frame.dtype == np.uint8 and frame.shape == frames[0].shape and frame.ndim == 3 for frame in frames)
    assert any(not np.array_equal(frames[0], frame) for frame in frames)

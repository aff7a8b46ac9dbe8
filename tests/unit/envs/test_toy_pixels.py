"""The toy environment with image observations: rules, documented returns, and exact restoring."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from zhixing.envs import make, make_vector, names

NAME = "toy/pixel-catch"


def read_image(image: np.ndarray) -> tuple[int, int, int]:
    """Return row and column of the ball, and the column of the paddle."""
    ball, paddle = np.argwhere(image[..., 0] == 255), np.argwhere(image[..., 0] == 128)
    assert len(ball) == len(paddle) == 16  # both are completely visible
    return int(ball[0, 0]) // 4, int(ball[0, 1]) // 4, int(paddle[0, 1]) // 4


def test_env_passes_gymnasiums_checker_and_is_listed() -> None:
    check_env(make(NAME, render_mode="rgb_array"), skip_render_check=False)
    assert NAME in names()


def test_ball_falls_and_paddle_moves() -> None:
    env = make(NAME)
    image, _ = env.reset(seed=1)
    assert image.shape == (32, 32, 1)
    assert image.dtype == np.uint8
    row, column, paddle = read_image(image)
    assert row == 0
    for action, move in ((0, -1), (1, 0), (2, 1), (2, 1), (0, -1), (1, 0)):
        image, reward, terminated, truncated, _ = env.step(action)
        row, paddle = row + 1, min(max(paddle + move, 0), 7)
        assert read_image(image) == (row, column, paddle)
        assert (reward, terminated, truncated) == (0.0, False, False)
    image, reward, _, _, _ = env.step(1)  # in the seventh step the ball reaches the bottom
    assert reward == float(column == paddle)
    assert read_image(image)[0] == 0  # a new ball


def play(env: Any, policy: Any, episodes: int) -> np.ndarray:
    returns = []
    image, _ = env.reset(seed=0)
    for _ in range(episodes):
        total, steps, over = 0.0, 0, False
        while not over:
            image, reward, terminated, over, _ = env.step(policy(image))
            assert not terminated
            total, steps = total + reward, steps + 1
        assert steps == 28
        returns.append(total)
        image, _ = env.reset()
    return np.array(returns)


def move_toward_ball(image: np.ndarray) -> int:
    _, column, paddle = read_image(image)
    return 1 + int(np.sign(column - paddle))


def test_returns_of_perfect_random_and_blind_play() -> None:
    """Seven steps reach any of eight columns, so all four balls can be caught.

    A policy that ignores the image catches each with probability 1/8, so the mean return is 4/8, with a standard error
    of sqrt(4 · 7/64 / 1000) = 0.021.
    """
    env = make(NAME)
    assert play(env, move_toward_ball, 100).tolist() == [4.0] * 100
    env.action_space.seed(0)
    assert play(env, lambda _: env.action_space.sample(), 1000).mean() == pytest.approx(0.5, abs=0.085)
    assert play(env, lambda _: 0, 1000).mean() == pytest.approx(0.5, abs=0.085)


def test_restored_state_continues_identically() -> None:
    env = make_vector(NAME, 2, backend="serial")
    env.reset(seed=3)
    for _ in range(10):
        env.step(np.array([0, 2]))
    state = env.state_dict()
    expected_steps = [[part.copy() for part in env.step(np.array([1, 2]))[:4]] for _ in range(30)]
    other = make_vector(NAME, 2, backend="serial")
    other.reset(seed=9)
    other.load_state_dict(state)
    for expected in expected_steps:
        actual = other.step(np.array([1, 2]))
        for a, b in zip(expected, actual[:4], strict=True):
            assert np.array_equal(a, b)
    env.close()
    other.close()

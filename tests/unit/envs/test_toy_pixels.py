"""The picture task: its rules, its returns, and that it resumes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from zhixing.envs import make, make_vector, names

NAME = "toy/pixel-catch"


def places(picture: np.ndarray) -> tuple[int, int, int]:
    """Row and column of the ball and column of the paddle, as an eye would find them."""
    ball, paddle = np.argwhere(picture[..., 0] == 255), np.argwhere(picture[..., 0] == 128)
    assert len(ball) == len(paddle) == 16  # both are wholly seen
    return int(ball[0, 0]) // 4, int(ball[0, 1]) // 4, int(paddle[0, 1]) // 4


def test_is_what_gymnasium_calls_an_environment_and_listed() -> None:
    check_env(make(NAME, render_mode="rgb_array"), skip_render_check=False)
    assert NAME in names()


def test_a_ball_falls_and_the_paddle_moves() -> None:
    env = make(NAME)
    picture, _ = env.reset(seed=1)
    assert picture.shape == (32, 32, 1)
    assert picture.dtype == np.uint8
    row, column, paddle = places(picture)
    assert row == 0
    for action, move in ((0, -1), (1, 0), (2, 1), (2, 1), (0, -1), (1, 0)):
        picture, reward, terminated, truncated, _ = env.step(action)
        row, paddle = row + 1, min(max(paddle + move, 0), 7)
        assert places(picture) == (row, column, paddle)
        assert (reward, terminated, truncated) == (0.0, False, False)
    picture, reward, _, _, _ = env.step(1)  # the seventh step takes it down
    assert reward == float(column == paddle)
    assert places(picture)[0] == 0  # and shows the next one


def play(env: Any, choose: Any, episodes: int) -> np.ndarray:
    returns = []
    picture, _ = env.reset(seed=0)
    for _ in range(episodes):
        total, steps, over = 0.0, 0, False
        while not over:
            picture, reward, terminated, over, _ = env.step(choose(picture))
            assert not terminated
            total, steps = total + reward, steps + 1
        assert steps == 28
        returns.append(total)
        picture, _ = env.reset()
    return np.array(returns)


def towards(picture: np.ndarray) -> int:
    _, column, paddle = places(picture)
    return 1 + int(np.sign(column - paddle))


def test_returns_of_perfect_random_and_blind_play() -> None:
    """Seven steps reach any of eight columns, so that four balls are caught. Without looking each is caught with a
    chance of 1/8, whatever the paddle does: 4/8, with a standard error of sqrt(4 · 7/64 / 1000) = 0.021."""
    env = make(NAME)
    assert play(env, towards, 100).tolist() == [4.0] * 100
    env.action_space.seed(0)
    assert play(env, lambda _: env.action_space.sample(), 1000).mean() == pytest.approx(0.5, abs=0.085)
    assert play(env, lambda _: 0, 1000).mean() == pytest.approx(0.5, abs=0.085)


def test_resumes_where_it_was() -> None:
    env = make_vector(NAME, 2, backend="serial")
    env.reset(seed=3)
    for _ in range(10):
        env.step(np.array([0, 2]))
    state = env.state_dict()
    went_on = [[part.copy() for part in env.step(np.array([1, 2]))[:4]] for _ in range(30)]
    other = make_vector(NAME, 2, backend="serial")
    other.reset(seed=9)
    other.load_state_dict(state)
    for expected in went_on:
        found = other.step(np.array([1, 2]))
        for a, b in zip(expected, found[:4], strict=True):
            assert np.array_equal(a, b)
    env.close()
    other.close()

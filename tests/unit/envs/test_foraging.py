from __future__ import annotations

import sys
from functools import partial
from typing import Any

import numpy as np
import pytest

pytest.importorskip("lbforaging")

from zhixing.envs.adapters import foraging
from zhixing.envs.vector.serial import SerialVectorEnv
from zhixing.errors import UserError
from zhixing.utils.extras import install_hint

LOAD = 5


def make(name: str, **options: Any) -> Any:
    return foraging.make(name, options)


def arrange(env: Any, players: list[tuple[int, int, int]], food: list[tuple[int, int, int]]) -> None:
    """Place players and food, given as (row, column, level)."""
    inner = env.env
    inner.field[:] = 0
    for row, col, level in food:
        inner.field[row, col] = level
    for player, (row, col, level) in zip(inner.players, players, strict=True):
        player.position, player.level = (row, col), level
    inner._food_spawned = env.total_level = int(inner.field.sum())
    inner._gen_valid_moves()


def test_name_sets_grid_players_and_food() -> None:
    env = make("lbf/8x8-2p-3f")
    obs, info = env.reset(seed=0)
    assert env.num_agents == 2
    assert (obs.shape, obs.dtype, info) == ((2, 15), np.float32, {})  # 3 numbers per food and player
    assert env.action_space.n == 6
    assert env.env.field.shape == (8, 8)
    assert (env.env.field > 0).sum() == 3
    inner = make("lbf/2s-10x6-3p-2f-coop").env
    assert (inner.sight, inner.field.shape, inner.n_agents) == (2, (10, 6), 3)
    assert (inner.max_num_food, inner.force_coop) == (2, True)


def test_individual_and_shared_rewards() -> None:
    # food of level 3 among 4 spawned: players of levels 1 and 2 load it together and get 1/3 and 2/3 of 3/4
    shares = {False: [0.25, 0.5], True: [0.75, 0.75]}
    for team, share in shares.items():
        env = make("lbf/8x8-2p-2f", team=team)
        assert env.reward_kind == ("shared" if team else "individual")
        env.reset(seed=0)
        arrange(env, [(3, 2, 1), (3, 4, 2)], [(3, 3, 3), (6, 6, 1)])
        _, reward, terminated, truncated, info = env.step(np.array([LOAD, LOAD]))
        np.testing.assert_allclose(reward, share)
        assert reward.dtype == np.float32
        assert (terminated, truncated) == (False, False)
        assert info["food"] == 0.75
        arrange(env, [(6, 5, 1), (0, 0, 2)], [(6, 6, 1)])
        _, reward, terminated, truncated, info = env.step(np.array([LOAD, 0]))
        np.testing.assert_allclose(reward, [1.0, 1.0 if team else 0.0])
        assert (terminated, truncated) == (True, False)  # all food is loaded
        assert info["food"] == 1.0


def test_failed_loading_is_penalized() -> None:
    env = make("lbf/8x8-2p-1f", penalty=0.1, team=False)
    env.reset(seed=0)
    arrange(env, [(3, 2, 1), (0, 0, 2)], [(3, 3, 3)])
    _, reward, terminated, _, info = env.step(np.array([LOAD, 0]))
    np.testing.assert_allclose(reward, [-0.1, 0.0])
    assert (terminated, info["food"]) == (False, 0.0)


def test_time_limit_truncates() -> None:
    env = make("lbf/8x8-2p-3f", max_episode_steps=3)
    env.reset(seed=0)
    ends = [env.step(np.zeros(2, int))[2:4] for _ in range(3)]
    assert ends == [(False, False), (False, False), (False, True)]


def test_loading_all_food_returns_one() -> None:
    env = make("lbf/5x5-2p-2f", max_episode_steps=2000)
    rng = np.random.default_rng(0)
    env.reset(seed=2)
    total, over = 0.0, False
    while not over:
        _, reward, terminated, truncated, info = env.step(rng.integers(0, 6, 2))
        total += reward[0]
        over = terminated or truncated
    assert terminated
    assert total == pytest.approx(1.0)
    assert info["food"] == 1.0
    assert env.metadata["logged_info_keys"] == ("food",)


def test_one_player_has_no_agent_dimension() -> None:
    env = make("lbf/5x5-1p-1f")
    obs, _ = env.reset(seed=0)
    assert obs.shape == (6,)
    assert isinstance(env.step(0)[1], float)


def test_vector_is_restored_by_replay() -> None:
    first, second = (SerialVectorEnv(partial(make, "lbf/8x8-2p-3f", max_episode_steps=15), 2) for _ in range(2))
    assert first.logged_info_keys == ("food",)
    rng = np.random.default_rng(0)
    first.reset(seed=1)
    for _ in range(40):
        first.step(rng.integers(0, 6, (2, 2)))
    obs, _ = second.load_state_dict(first.state_dict())
    assert second.inexact == []
    np.testing.assert_array_equal(obs, first.buffers.obs)
    for _ in range(40):
        actions = rng.integers(0, 6, (2, 2))
        for expected, actual in zip(first.step(actions)[:4], second.step(actions)[:4], strict=True):
            np.testing.assert_array_equal(actual, expected)


def test_render_draws_food_and_players() -> None:
    env = make("lbf/8x8-2p-1f", render_mode="rgb_array")
    env.reset(seed=0)
    arrange(env, [(0, 1, 1), (7, 0, 2)], [(3, 3, 3)])
    image = env.render()[:: foraging.PIXELS, :: foraging.PIXELS]
    assert (image.shape, image.dtype) == ((8, 8, 3), np.uint8)
    assert tuple(image[3, 3]) == foraging.FOOD
    assert tuple(image[7, 0]) == foraging.PLAYER
    assert tuple(image[0, 1]) == tuple(value // 2 for value in foraging.PLAYER)
    assert tuple(image[0, 0]) == foraging.GROUND


def test_names() -> None:
    assert all(foraging.supports(name) for name in foraging.names())
    assert foraging.supports("lbf/12x12-5p-4f-coop")
    for invalid in (
        "lbf/8x8",
        "lbf/8x8-2p",
        "lbf/0x8-2p-3f",
        "lbf/8x8-2p-3f-coup",
        "lbf/8x8-0p-3f",
        "lbf/8x8-2p-3f-v3",
    ):
        assert not foraging.supports(invalid)
    with pytest.raises(UserError, match="lbf/4x4-2p-1f: the grid must be at least 5x5"):
        make("lbf/4x4-2p-1f")
    with pytest.raises(UserError, match="4 cells for each"):
        make("lbf/5x5-6p-1f")


def test_invalid_options_are_rejected() -> None:
    with pytest.raises(UserError, match=r"has no option 'teams', allowed: team, max_episode_steps.*mean 'team'"):
        make("lbf/8x8-2p-3f", teams=False)
    with pytest.raises(UserError, match=r"can't be made with \(min_player_level=3\): AssertionError"):
        make("lbf/8x8-2p-3f", min_player_level=3)


def test_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lbforaging.foraging.environment", None)
    with pytest.raises(UserError) as caught:
        make("lbf/8x8-2p-3f")
    assert str(caught.value) == f"lbf/8x8-2p-3f needs the extra 'marl': {install_hint('marl')}"

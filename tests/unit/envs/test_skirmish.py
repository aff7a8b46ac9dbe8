from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from zhixing.envs.adapters.skirmish import (
    MAPS,
    NATIVE,
    Battles,
    SkirmishEnv,
    attack_nearest,
    focus_fire,
    make,
    names,
    random_play,
    supports,
)
from zhixing.envs.adapters.skirmish.battles import EAST, NOOP, NORTH, SOUTH, STOP, WEST
from zhixing.envs.adapters.skirmish.views import Views
from zhixing.envs.vector.serial import SerialVectorEnv
from zhixing.errors import UserError


def arena(map_name: str, allies: list[Any], enemies: list[Any], **changed: Any) -> Battles:
    """One battle with units at these places; `changed` are other parts of its state."""
    battles = Battles(1, map_name)
    battles.begin(np.array([0]))
    place = np.array([[*allies, *enemies]], float)
    battles.load_state_dict(battles.state_dict() | {"place": place} | {k: np.array([v]) for k, v in changed.items()})
    return battles


def act(battles: Battles, *actions: int) -> tuple[float, bool, bool]:
    reward, terminated, truncated = battles.step(np.array([actions]))
    return float(reward[0]), bool(terminated[0]), bool(truncated[0])


def played(map_name: str, team: Callable[[Battles], np.ndarray], num: int, seed: int = 0) -> tuple[Any, Any]:
    """Whether each battle was won, and its return."""
    battles = Battles(num, map_name)
    battles.rng = np.random.default_rng(seed)
    battles.begin(np.arange(num))
    won, over, returns = np.zeros(num, bool), np.zeros(num, bool), np.zeros(num)
    while not over.all():
        reward, terminated, truncated = battles.step(team(battles))
        returns += np.where(over, 0.0, reward)
        won |= ~over & battles.won
        over |= terminated | truncated
    return won, returns


# --- rules

LINE = [(10, 16), (10, 14), (10, 12)]
FAR = [(25, 16), (25, 14), (25, 12)]
NEAR = [(13, 16), (13, 14), (13, 12)]  # 3, 3.6 or 5 from each ally: all in range


def test_moves_are_two_map_units_in_the_four_directions() -> None:
    battles = arena("3m", LINE, FAR)
    act(battles, NORTH, SOUTH, EAST)
    assert battles.place[0, :3].tolist() == [[10, 18], [10, 12], [12, 12]]
    act(battles, WEST, STOP, STOP)
    assert battles.place[0, :3].tolist() == [[8, 18], [10, 12], [12, 12]]


def test_enemies_go_straight_to_the_nearest_and_shoot_once_in_range() -> None:
    """From (25, 20) to (19, 12): direction (-0.6, -0.8), 10 apart; after three strides of 2 it is 4."""
    battles = arena("3m", [(19, 12), (1, 1), (1, 3)], [(25, 20), (31, 31), (31, 31)])
    act(battles, 1, 1, 1)
    np.testing.assert_allclose(battles.place[0, 3], (23.8, 18.4))
    act(battles, 1, 1, 1)
    act(battles, 1, 1, 1)
    assert battles.health[0, 0] == 45
    np.testing.assert_allclose(battles.distance[0, 0, 3], 4)
    act(battles, 1, 1, 1)
    assert battles.health[0, :3].tolist() == [39, 45, 45]
    np.testing.assert_allclose(battles.distance[0, 0, 3], 4)  # who shoots stays


def test_a_shot_hurts_by_damage_and_then_the_weapon_cools() -> None:
    """Marines: 6 of 45 every second step. All of them shoot in the first step, none in the second."""
    battles = arena("3m", LINE, NEAR)
    act(battles, 6, 6, 6)
    assert battles.health[0].tolist() == [39, 39, 39, 27, 45, 45]
    act(battles, 6, 6, 6)
    assert battles.health[0].tolist() == [39, 39, 39, 27, 45, 45]
    act(battles, 7, 7, 7)
    assert battles.health[0].tolist() == [33, 33, 33, 27, 27, 45]


def test_shields_go_first() -> None:
    """Two marines shoot at a zealot with 8 of its shield left: 8 from the shield, 4 from the health."""
    battles = arena("2m_vs_1z", [(10, 10), (10, 11)], [(14, 10)], shield=[0.0, 0.0, 8.0])
    act(battles, 6, 6)
    assert (battles.shield[0, 2], battles.health[0, 2]) == (0, 96)


def test_melee_reaches_two() -> None:
    battles = arena("2m_vs_1z", [(10, 10), (20, 10)], [(12.5, 10)])
    act(battles, STOP, STOP)  # walks: 2.5 is too far
    assert battles.health[0, 0] == 45
    act(battles, STOP, STOP)
    assert battles.health[0, 0] == 45 - 16


def test_reward_is_damage_kills_and_the_win_scaled_to_twenty() -> None:
    """3m: 3 · (45 + 10) + 200 = 365 at most. Damage of 18 pays 20 · 18 / 365; the last 3 of an enemy's health and its
    death 20 · 13 / 365, though the shots would have done 18; with the win 20 · 213 / 365."""
    battles = arena("3m", LINE, NEAR)
    assert act(battles, 6, 6, 6)[0] == pytest.approx(20 * 18 / 365)
    weak = [45.0, 45.0, 45.0, 3.0, 45.0, 45.0]
    assert act(arena("3m", LINE, NEAR, health=weak), 6, 6, 6)[0] == pytest.approx(20 * 13 / 365)
    last = [45.0, 45.0, 45.0, 3.0, 0.0, 0.0]
    battles = arena("3m", LINE, NEAR, health=last)
    reward, *ends = act(battles, 6, 6, 6)
    assert reward == pytest.approx(20 * 213 / 365)
    assert ends == [True, False]
    assert battles.numbers(0) == {"won": True, "dead_allies": 0, "dead_enemies": 3}


def test_who_falls_together_has_not_won() -> None:
    battles = arena("3m", LINE, NEAR, health=[6.0, 0.0, 0.0, 6.0, 0.0, 0.0])
    reward, *ends = act(battles, 6, NOOP, NOOP)
    assert (ends, battles.numbers(0)["won"]) == ([True, False], False)
    assert reward == pytest.approx(20 * 16 / 365)


def test_a_win_returns_twenty_whatever_the_map() -> None:
    for map_name in ("3m", "8m", "2s3z"):
        won, returns = played(map_name, focus_fire, 30)
        np.testing.assert_allclose(returns[won], 20.0)
        assert (returns[~won] <= 20 - 200 * Battles(1, map_name).reward_scale + 1e-9).all()
        assert won.any()


def test_time_limit_truncates_unless_the_battle_is_decided_then() -> None:
    env = SkirmishEnv("3m", episode_limit=3)
    env.reset(seed=0)
    ends = [env.step(np.array([STOP] * 3))[2:4] for _ in range(3)]
    assert ends == [(False, False), (False, False), (False, True)]
    battles = arena("3m", LINE, NEAR, health=[45.0, 45.0, 45.0, 3.0, 0.0, 0.0], steps=59)
    assert act(battles, 6, 6, 6)[1:] == (True, False)
    battles = arena("3m", LINE, NEAR, steps=59)
    assert act(battles, 6, 6, 6)[1:] == (False, True)


def test_available_actions() -> None:
    """The first stands in the north-west corner, the second is dead, the third has one enemy in range, 5 away."""
    battles = arena(
        "3m", [(1, 31), (10, 14), (10, 12)], [(14, 15), *FAR[1:]], health=[45.0, 0.0, 45.0, 45.0, 45.0, 45.0]
    )
    assert battles.available[0].astype(int).tolist() == [
        [0, 1, 0, 1, 1, 0, 0, 0, 0],
        [1, 0, 0, 0, 0, 0, 0, 0, 0],
        [0, 1, 1, 1, 1, 1, 1, 0, 0],
    ]
    for wrong in (NOOP, 7, 9, -1):
        with pytest.raises(ValueError, match=rf"battle 0, agent 2: action {wrong} isn't one of 1, 2, 3, 4, 5, 6"):
            act(battles, STOP, NOOP, wrong)
    with pytest.raises(ValueError, match=r"shape \(1, 2\), not \(1, 3\)"):
        act(battles, STOP, STOP)


# --- what is seen


@pytest.mark.parametrize(
    ("map_name", "obs", "state", "actions", "limit"),
    [("3m", 30, 48, 9, 60), ("8m", 80, 168, 14, 120), ("2s3z", 80, 120, 11, 120), ("5m_vs_6m", 55, 98, 12, 70)],
)
def test_sizes_are_those_of_smac(map_name: str, obs: int, state: int, actions: int, limit: int) -> None:
    battles = Battles(1, map_name)
    views = Views(battles)
    sizes = views.obs_size, views.state_size, battles.num_actions, battles.episode_limit
    assert sizes == (obs, state, actions, limit)


def test_observation_by_hand() -> None:
    """Of the second ally at (10, 14): the enemy at (14, 11) is 5 away; the others are too far or dead. Moves, three
    enemies, two allies, own health."""
    health = [45.0, 36.0, 9.0, 27.0, 0.0, 45.0]
    battles = arena("3m", LINE, [(14, 11), (14, 14), (25, 12)], health=health)
    wanted = [1, 1, 1, 1]
    wanted += [1, 5 / 9, 4 / 9, -3 / 9, 0.6, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]
    wanted += [1, 2 / 9, 0, 2 / 9, 1.0, 1, 2 / 9, 0, -2 / 9, 0.2]
    wanted += [0.8]
    np.testing.assert_allclose(Views(battles).observations()[0, 1], wanted, rtol=1e-6)


def test_seen_but_out_of_range_can_not_be_attacked() -> None:
    battles = arena("3m", LINE, [(18, 16), *FAR[1:]])  # 8 away
    np.testing.assert_allclose(Views(battles).observations()[0, 0, 4:9], [0, 8 / 9, 8 / 9, 0, 1], rtol=1e-6)


def test_the_dead_see_nothing() -> None:
    battles = arena("3m", LINE, NEAR, health=[0.0, 45.0, 45.0, 45.0, 45.0, 45.0])
    obs = Views(battles).observations()[0]
    assert not obs[0].any()
    assert obs[1].any()
    assert not obs[1, 19:24].any()  # the dead one, as another sees it


def test_units_of_mixed_teams_have_shields_and_types() -> None:
    """2s3z, the first stalker of the north at the end: own health, own shield, stalker, zealot."""
    place = [(10, 20 - i) for i in range(5)]
    shield = [40.0, 80.0, 50.0, 50.0, 50.0, 80.0, 20.0, 50.0, 50.0, 50.0]
    battles = arena("2s3z", place, [(14, 20), (14, 19), (14, 18), (30, 1), (30, 2)], shield=shield)
    obs = Views(battles).observations()[0, 0]
    np.testing.assert_allclose(obs[-4:], [1, 0.5, 1, 0])
    np.testing.assert_allclose(obs[4:12], [1, 4 / 9, 4 / 9, 0, 1, 1, 1, 0], rtol=1e-6)
    np.testing.assert_allclose(obs[12:20], [1, 17**0.5 / 9, 4 / 9, -1 / 9, 1, 0.25, 1, 0], rtol=1e-6)
    assert obs[20:28][-2:].tolist() == [0, 1]
    assert not obs[28:44].any()


def test_state_by_hand() -> None:
    """2m_vs_1z: health, cooldown, x, y of each ally; health, x, y, shield of the enemy; the last actions."""
    battles = arena("2m_vs_1z", [(16, 8), (10, 16)], [(20, 8)])
    views = Views(battles)
    np.testing.assert_allclose(views.states()[0, 12:], 0)  # no action yet
    act(battles, 6, EAST)  # the second walks to 12; the zealot walks to 18, its shield down by 6
    wanted = [1, 0.5, 0, -0.25, 1, 0, -0.125, 0, 1, 0.0625, -0.25, 44 / 50]
    wanted += [0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 0, 0]
    np.testing.assert_allclose(views.states()[0], wanted, rtol=1e-6)


# --- tasks


def test_names_and_options() -> None:
    assert names() == [f"skirmish/{name}" for name in MAPS]
    assert supports("skirmish/3m")
    assert not supports("skirmish/4m")
    assert make("skirmish/3m", {"episode_limit": 5}).battles.episode_limit == 5
    with pytest.raises(UserError, match="skirmish/3m has no option 'limit', allowed: episode_limit, render_mode"):
        make("skirmish/3m", {"limit": 5})
    with pytest.raises(UserError, match=r"env.episode_limit=0: a battle needs at least 1 step"):
        make("skirmish/3m", {"episode_limit": 0})
    with pytest.raises(UserError, match="unknown map '3n': did you mean '3m'"):
        SkirmishEnv("3n")


@pytest.mark.parametrize("map_name", MAPS)
def test_one_battle_goes_as_one_of_many(map_name: str) -> None:
    """From the same starts with the same actions, through many ends, everything is equal to the bit."""
    task, rng = NATIVE[f"skirmish/{map_name}"](5), np.random.default_rng(0)
    singles = [SkirmishEnv(map_name) for _ in range(5)]
    obs, info = task.reset(3)

    def begin(index: int) -> tuple[Any, Any]:
        """The single battle starts where that of the many does."""
        single = singles[index]
        single.reset()
        here = {k: v[index : index + 1] for k, v in task.state_dict().items() if k != "rng"}
        single.load_state_dict(single.state_dict() | here)
        return single._show()

    def same(index: int, shown: tuple[Any, Any]) -> None:
        np.testing.assert_array_equal(shown[0], obs[index])
        for key in ("action_mask", "state", "alive"):
            np.testing.assert_array_equal(shown[1][key], info[key][index])

    ends = 0
    for index in range(5):
        same(index, begin(index))
    for _ in range(150):
        nearest, any_action = attack_nearest(task.battles), random_play(task.battles, rng)
        actions = np.where(rng.random(any_action.shape) < 0.7, nearest, any_action)
        obs, reward, terminated, truncated, info = task.step(actions)
        for index, single in enumerate(singles):
            last, paid, *over, told = single.step(actions[index])
            np.testing.assert_array_equal(paid, reward[index])
            assert over == [terminated[index], truncated[index]]
            if not any(over):
                same(index, (last, told))
                continue
            ends += 1
            np.testing.assert_array_equal(last, info["final_obs"][index])
            np.testing.assert_array_equal(told["action_mask"], info["final_mask"][index])
            np.testing.assert_array_equal(told["state"], info["final_state"][index])
            np.testing.assert_array_equal(told["alive"], info["final_alive"][index])
            assert {k: told[k] for k in ("won", "dead_allies", "dead_enemies")} == info["final_info"][index]
            same(index, begin(index))
    assert ends > 3


def test_forms_of_the_native_task() -> None:
    task = NATIVE["skirmish/3m"](4)
    assert task.spaces.num_agents == 3
    obs, info = task.reset(0)
    for _ in range(80):
        assert (obs.shape, obs.dtype) == ((4, 3, 30), np.float32)
        assert task.spaces.obs.contains(obs[0, 0])
        assert (info["action_mask"].shape, info["action_mask"].dtype) == ((4, 3, 9), bool)
        assert (info["state"].shape, info["state"].dtype) == ((4, 48), np.float32)
        assert (info["alive"].shape, info["alive"].dtype) == ((4, 3), bool)
        obs, reward, terminated, truncated, info = task.step(attack_nearest(task.battles))
        assert (reward.shape, reward.dtype) == ((4, 3), np.float32)
        assert (reward == reward[:, :1]).all()
        ended = terminated | truncated
        assert ("final_obs" in info) == ended.any()
        if ended.any():
            assert info["alive"][ended].all()
            assert sorted(info["final_info"]) == ended.nonzero()[0].tolist()
            np.testing.assert_array_equal(info["final_obs"][~ended], obs[~ended])


def test_seeds_repeat() -> None:
    task = NATIVE["skirmish/8m"](3)
    first, _ = task.reset(4)
    assert not np.array_equal(first, task.reset(None)[0])
    np.testing.assert_array_equal(first, task.reset(4)[0])
    assert not np.array_equal(first[0], first[1])


def test_snapshot_in_mid_battle_goes_on_exactly() -> None:
    def play(env: Any, seed: int) -> list[Any]:
        rng, shown = np.random.default_rng(seed), []
        for _ in range(70):
            obs, reward, terminated, truncated, info = env.step(random_play(env.battles, rng))
            shown.append([np.copy(x).tolist() for x in (obs, reward, terminated, truncated, info["state"])])
        return shown

    task, other = NATIVE["skirmish/2s3z"](3), NATIVE["skirmish/2s3z"](3)
    task.reset(0)
    play(task, 1)
    state = task.state_dict()
    saved = str(state)
    shown = task._show()
    expected = play(task, 2)
    for one in (task, other):
        restored = one.load_state_dict(state)
        np.testing.assert_array_equal(restored[0], shown[0])
        np.testing.assert_array_equal(restored[1]["state"], shown[1]["state"])
        assert play(one, 2) == expected
    assert str(state) == saved


def test_serial_back_end_runs_and_restores_it() -> None:
    env = SerialVectorEnv(partial(SkirmishEnv, "3m"), 2)
    assert (env.spaces.num_agents, env.spaces.mask, env.spaces.state, env.spaces.alive) == (3, 9, 48, True)

    def play(info: Any, seed: int, steps: int) -> tuple[Any, list[Any]]:
        rng, shown = np.random.default_rng(seed), []
        for _ in range(steps):
            mask = info["action_mask"]
            obs, reward, terminated, truncated, info = env.step(np.where(mask, rng.random(mask.shape), -1).argmax(-1))
            shown.append([np.copy(x).tolist() for x in (obs, reward, terminated, truncated, info["state"])])
        return info, shown

    info, _ = play(env.reset(seed=0)[1], 1, 30)
    state = env.state_dict()
    _, expected = play(info, 2, 60)
    _, info = env.load_state_dict(state)
    assert env.inexact == []
    assert play(info, 2, 60)[1] == expected


def test_picture_shows_the_living() -> None:
    battles = arena("2m_vs_1z", [(8, 8), (8, 24)], [(24, 8)], health=[45.0, 0.0, 50.0])
    env = SkirmishEnv("2m_vs_1z", render_mode="rgb_array")
    env.reset(seed=0)
    env.load_state_dict(battles.state_dict())
    picture = env.render()
    assert (picture.shape, picture.dtype) == ((256, 256, 3), np.uint8)
    assert picture[191, 64].tolist() == [80, 140, 240]  # blue in the south-west: row 255 - 8 / 32 · 255
    assert picture[191, 191].tolist() == [230, 80, 70]  # red in the south-east
    assert (picture[64, 64] == picture[0, 0]).all()  # the dead one


# --- how hard it is


def test_random_play_never_wins() -> None:
    rng = np.random.default_rng(0)
    assert not played("3m", lambda battles: random_play(battles, rng), 200)[0].any()


@pytest.mark.parametrize(
    ("map_name", "nearest", "focus"), [("3m", 0.31, 0.93), ("8m", 0.4, 0.99), ("2s3z", 0.36, 0.84)]
)
def test_focused_fire_wins_where_the_nearest_target_loses(map_name: str, nearest: float, focus: float) -> None:
    assert played(map_name, attack_nearest, 300)[0].mean() == pytest.approx(nearest, abs=0.1)
    assert played(map_name, focus_fire, 300)[0].mean() == pytest.approx(focus, abs=0.06)

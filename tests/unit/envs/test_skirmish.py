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
from zhixing.envs.adapters.skirmish.observations import ObsBuilder
from zhixing.envs.vector.serial import SerialVectorEnv
from zhixing.errors import UserError


def make_battle(map_name: str, allies: list[Any], enemies: list[Any], **state: Any) -> Battles:
    """Return one battle with units at these positions. `state` replaces other parts of its state."""
    battles = Battles(1, map_name)
    battles.reset(np.array([0]))
    position = np.array([[*allies, *enemies]], float)
    replaced = {"position": position} | {key: np.array([value]) for key, value in state.items()}
    battles.load_state_dict(battles.state_dict() | replaced)
    return battles


def act(battles: Battles, *actions: int) -> tuple[float, bool, bool]:
    reward, terminated, truncated = battles.step(np.array([actions]))
    return float(reward[0]), bool(terminated[0]), bool(truncated[0])


def play_battles(map_name: str, team: Callable[[Battles], np.ndarray], num: int, seed: int = 0) -> tuple[Any, Any]:
    """Return whether each battle was won, and its return."""
    battles = Battles(num, map_name)
    battles.rng = np.random.default_rng(seed)
    battles.reset(np.arange(num))
    won, over, returns = np.zeros(num, bool), np.zeros(num, bool), np.zeros(num)
    while not over.all():
        reward, terminated, truncated = battles.step(team(battles))
        returns += np.where(over, 0.0, reward)
        won |= ~over & battles.won
        over |= terminated | truncated
    return won, returns


# --- rules ---

LINE = [(10, 16), (10, 14), (10, 12)]
FAR = [(25, 16), (25, 14), (25, 12)]
NEAR = [(13, 16), (13, 14), (13, 12)]  # 3, 3.6 or 5 from every ally: all in range


def test_moves_are_two_map_units_in_four_directions() -> None:
    battles = make_battle("3m", LINE, FAR)
    act(battles, NORTH, SOUTH, EAST)
    assert battles.position[0, :3].tolist() == [[10, 18], [10, 12], [12, 12]]
    act(battles, WEST, STOP, STOP)
    assert battles.position[0, :3].tolist() == [[8, 18], [10, 12], [12, 12]]


def test_enemies_walk_straight_to_the_nearest_ally_and_shoot_in_range() -> None:
    """From (25, 20) to (19, 12): direction (-0.6, -0.8), distance 10; after three strides of 2 the distance is 4."""
    battles = make_battle("3m", [(19, 12), (1, 1), (1, 3)], [(25, 20), (31, 31), (31, 31)])
    act(battles, 1, 1, 1)
    np.testing.assert_allclose(battles.position[0, 3], (23.8, 18.4))
    act(battles, 1, 1, 1)
    act(battles, 1, 1, 1)
    assert battles.health[0, 0] == 45
    np.testing.assert_allclose(battles.distance[0, 0, 3], 4)
    act(battles, 1, 1, 1)
    assert battles.health[0, :3].tolist() == [39, 45, 45]
    np.testing.assert_allclose(battles.distance[0, 0, 3], 4)  # shooting units stay in place


def test_shots_subtract_damage_and_start_the_cooldown() -> None:
    """Marines deal 6 damage every second step. All shoot in the first step, none in the second."""
    battles = make_battle("3m", LINE, NEAR)
    act(battles, 6, 6, 6)
    assert battles.health[0].tolist() == [39, 39, 39, 27, 45, 45]
    act(battles, 6, 6, 6)
    assert battles.health[0].tolist() == [39, 39, 39, 27, 45, 45]
    act(battles, 7, 7, 7)
    assert battles.health[0].tolist() == [33, 33, 33, 27, 27, 45]


def test_shields_absorb_damage_first() -> None:
    """Two marines deal 12 damage to a zealot with a shield of 8: the shield loses 8, the health 4."""
    battles = make_battle("2m_vs_1z", [(10, 10), (10, 11)], [(14, 10)], shield=[0.0, 0.0, 8.0])
    act(battles, 6, 6)
    assert (battles.shield[0, 2], battles.health[0, 2]) == (0, 96)


def test_melee_range_is_two() -> None:
    battles = make_battle("2m_vs_1z", [(10, 10), (20, 10)], [(12.5, 10)])
    act(battles, STOP, STOP)  # the zealot walks: 2.5 is out of range
    assert battles.health[0, 0] == 45
    act(battles, STOP, STOP)
    assert battles.health[0, 0] == 45 - 16


def test_reward_is_damage_kills_and_the_win_scaled_to_twenty() -> None:
    """On 3m the unscaled total is 3 · (45 + 10) + 200 = 365. Damage of 18 earns 20 · 18 / 365. Killing an enemy with
    health 3 earns 20 · 13 / 365, although the shots could deal 18, and 20 · 213 / 365 with the win."""
    battles = make_battle("3m", LINE, NEAR)
    assert act(battles, 6, 6, 6)[0] == pytest.approx(20 * 18 / 365)
    weak = [45.0, 45.0, 45.0, 3.0, 45.0, 45.0]
    assert act(make_battle("3m", LINE, NEAR, health=weak), 6, 6, 6)[0] == pytest.approx(20 * 13 / 365)
    last = [45.0, 45.0, 45.0, 3.0, 0.0, 0.0]
    battles = make_battle("3m", LINE, NEAR, health=last)
    reward, *ends = act(battles, 6, 6, 6)
    assert reward == pytest.approx(20 * 213 / 365)
    assert ends == [True, False]
    assert battles.final_info(0) == {"won": True, "dead_allies": 0, "dead_enemies": 3}


def test_mutual_destruction_is_not_a_win() -> None:
    battles = make_battle("3m", LINE, NEAR, health=[6.0, 0.0, 0.0, 6.0, 0.0, 0.0])
    reward, *ends = act(battles, 6, NOOP, NOOP)
    assert (ends, battles.final_info(0)["won"]) == ([True, False], False)
    assert reward == pytest.approx(20 * 16 / 365)


def test_a_win_returns_twenty_on_every_map() -> None:
    for map_name in ("3m", "8m", "2s3z"):
        won, returns = play_battles(map_name, focus_fire, 30)
        np.testing.assert_allclose(returns[won], 20.0)
        assert (returns[~won] <= 20 - 200 * Battles(1, map_name).reward_scale + 1e-9).all()
        assert won.any()


def test_time_limit_truncates_unless_the_last_step_decides_the_battle() -> None:
    env = SkirmishEnv("3m", episode_limit=3)
    env.reset(seed=0)
    ends = [env.step(np.array([STOP] * 3))[2:4] for _ in range(3)]
    assert ends == [(False, False), (False, False), (False, True)]
    battles = make_battle("3m", LINE, NEAR, health=[45.0, 45.0, 45.0, 3.0, 0.0, 0.0], steps=59)
    assert act(battles, 6, 6, 6)[1:] == (True, False)
    battles = make_battle("3m", LINE, NEAR, steps=59)
    assert act(battles, 6, 6, 6)[1:] == (False, True)


def test_available_actions() -> None:
    """The first ally is in the north-west corner, the second is dead, the third has one enemy in range, 5 away."""
    battles = make_battle(
        "3m", [(1, 31), (10, 14), (10, 12)], [(14, 15), *FAR[1:]], health=[45.0, 0.0, 45.0, 45.0, 45.0, 45.0]
    )
    assert battles.action_mask[0].astype(int).tolist() == [
        [0, 1, 0, 1, 1, 0, 0, 0, 0],
        [1, 0, 0, 0, 0, 0, 0, 0, 0],
        [0, 1, 1, 1, 1, 1, 1, 0, 0],
    ]
    for invalid in (NOOP, 7, 9, -1):
        with pytest.raises(
            ValueError, match=rf"battle 0, agent 2: action {invalid} is not available; allowed are 1, 2, 3, 4, 5, 6"
        ):
            act(battles, STOP, NOOP, invalid)
    with pytest.raises(ValueError, match=r"shape \(1, 2\); expected \(1, 3\)"):
        act(battles, STOP, STOP)


# --- observations and states ---


@pytest.mark.parametrize(
    ("map_name", "obs", "state", "actions", "limit"),
    [("3m", 30, 48, 9, 60), ("8m", 80, 168, 14, 120), ("2s3z", 80, 120, 11, 120), ("5m_vs_6m", 55, 98, 12, 70)],
)
def test_sizes_are_those_of_smac(map_name: str, obs: int, state: int, actions: int, limit: int) -> None:
    battles = Battles(1, map_name)
    obs_builder = ObsBuilder(battles)
    sizes = obs_builder.obs_size, obs_builder.state_size, battles.num_actions, battles.episode_limit
    assert sizes == (obs, state, actions, limit)


def test_observation_matches_hand_computed_values() -> None:
    """The observation of the second ally at (10, 14): moves, three enemies, two allies, own health.

    The enemy at (14, 11) is 5 away; the other enemies are too far or dead.
    """
    health = [45.0, 36.0, 9.0, 27.0, 0.0, 45.0]
    battles = make_battle("3m", LINE, [(14, 11), (14, 14), (25, 12)], health=health)
    expected = [1, 1, 1, 1]
    expected += [1, 5 / 9, 4 / 9, -3 / 9, 0.6, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]
    expected += [1, 2 / 9, 0, 2 / 9, 1.0, 1, 2 / 9, 0, -2 / 9, 0.2]
    expected += [0.8]
    np.testing.assert_allclose(ObsBuilder(battles).observations()[0, 1], expected, rtol=1e-6)


def test_visible_enemy_out_of_range_cannot_be_attacked() -> None:
    battles = make_battle("3m", LINE, [(18, 16), *FAR[1:]])  # 8 away
    np.testing.assert_allclose(ObsBuilder(battles).observations()[0, 0, 4:9], [0, 8 / 9, 8 / 9, 0, 1], rtol=1e-6)


def test_dead_agents_observe_zeros() -> None:
    battles = make_battle("3m", LINE, NEAR, health=[0.0, 45.0, 45.0, 45.0, 45.0, 45.0])
    obs = ObsBuilder(battles).observations()[0]
    assert not obs[0].any()
    assert obs[1].any()
    assert not obs[1, 19:24].any()  # the dead agent in another agent's observation


def test_observations_of_mixed_teams_include_shields_and_types() -> None:
    """The observation of the first stalker of 2s3z ends with own health, own shield, is stalker, is zealot."""
    allies = [(10, 20 - i) for i in range(5)]
    shield = [40.0, 80.0, 50.0, 50.0, 50.0, 80.0, 20.0, 50.0, 50.0, 50.0]
    battles = make_battle("2s3z", allies, [(14, 20), (14, 19), (14, 18), (30, 1), (30, 2)], shield=shield)
    obs = ObsBuilder(battles).observations()[0, 0]
    np.testing.assert_allclose(obs[-4:], [1, 0.5, 1, 0])
    np.testing.assert_allclose(obs[4:12], [1, 4 / 9, 4 / 9, 0, 1, 1, 1, 0], rtol=1e-6)
    np.testing.assert_allclose(obs[12:20], [1, 17**0.5 / 9, 4 / 9, -1 / 9, 1, 0.25, 1, 0], rtol=1e-6)
    assert obs[20:28][-2:].tolist() == [0, 1]
    assert not obs[28:44].any()


def test_state_matches_hand_computed_values() -> None:
    """On 2m_vs_1z: health, cooldown, x, y of each ally; health, x, y, shield of the enemy; the last actions."""
    battles = make_battle("2m_vs_1z", [(16, 8), (10, 16)], [(20, 8)])
    obs_builder = ObsBuilder(battles)
    np.testing.assert_allclose(obs_builder.states()[0, 12:], 0)  # no action yet
    act(battles, 6, EAST)  # the second walks to 12; the zealot walks to 18, its shield down by 6
    expected = [1, 0.5, 0, -0.25, 1, 0, -0.125, 0, 1, 0.0625, -0.25, 44 / 50]
    expected += [0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 0, 0]
    np.testing.assert_allclose(obs_builder.states()[0], expected, rtol=1e-6)


# --- environments ---


def test_names_and_invalid_options() -> None:
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
def test_native_env_equals_single_envs(map_name: str) -> None:
    """From the same starts and with the same actions, everything is bitwise equal over many episodes."""
    native, rng = NATIVE[f"skirmish/{map_name}"](5), np.random.default_rng(0)
    envs = [SkirmishEnv(map_name) for _ in range(5)]
    obs, info = native.reset(3)

    def copy_start(index: int) -> tuple[Any, Any]:
        """Start the single environment from the native one's battle."""
        env = envs[index]
        env.reset()
        battle = {key: array[index : index + 1] for key, array in native.state_dict().items() if key != "rng"}
        env.load_state_dict(env.state_dict() | battle)
        return env._observe()

    def assert_equal(index: int, env_obs: Any, env_info: Any) -> None:
        np.testing.assert_array_equal(env_obs, obs[index])
        for key in ("action_mask", "state", "alive"):
            np.testing.assert_array_equal(env_info[key], info[key][index])

    num_ends = 0
    for index in range(5):
        assert_equal(index, *copy_start(index))
    for _ in range(150):
        nearest, random = attack_nearest(native.battles), random_play(native.battles, rng)
        actions = np.where(rng.random(random.shape) < 0.7, nearest, random)
        obs, reward, terminated, truncated, info = native.step(actions)
        for index, env in enumerate(envs):
            env_obs, env_reward, *ends, env_info = env.step(actions[index])
            np.testing.assert_array_equal(env_reward, reward[index])
            assert ends == [terminated[index], truncated[index]]
            if not any(ends):
                assert_equal(index, env_obs, env_info)
                continue
            num_ends += 1
            np.testing.assert_array_equal(env_obs, info["final_obs"][index])
            np.testing.assert_array_equal(env_info["action_mask"], info["final_mask"][index])
            np.testing.assert_array_equal(env_info["state"], info["final_state"][index])
            np.testing.assert_array_equal(env_info["alive"], info["final_alive"][index])
            assert {k: env_info[k] for k in ("won", "dead_allies", "dead_enemies")} == info["final_info"][index]
            assert_equal(index, *copy_start(index))
    assert num_ends > 3


def test_shapes_and_dtypes_of_the_native_env() -> None:
    native = NATIVE["skirmish/3m"](4)
    assert native.spaces.num_agents == 3
    obs, info = native.reset(0)
    for _ in range(80):
        assert (obs.shape, obs.dtype) == ((4, 3, 30), np.float32)
        assert native.spaces.obs.contains(obs[0, 0])
        assert (info["action_mask"].shape, info["action_mask"].dtype) == ((4, 3, 9), bool)
        assert (info["state"].shape, info["state"].dtype) == ((4, 48), np.float32)
        assert (info["alive"].shape, info["alive"].dtype) == ((4, 3), bool)
        obs, reward, terminated, truncated, info = native.step(attack_nearest(native.battles))
        assert (reward.shape, reward.dtype) == ((4, 3), np.float32)
        assert (reward == reward[:, :1]).all()
        ended = terminated | truncated
        assert ("final_obs" in info) == ended.any()
        if ended.any():
            assert info["alive"][ended].all()
            assert sorted(info["final_info"]) == ended.nonzero()[0].tolist()
            np.testing.assert_array_equal(info["final_obs"][~ended], obs[~ended])


def test_same_seed_same_start() -> None:
    native = NATIVE["skirmish/8m"](3)
    first, _ = native.reset(4)
    assert not np.array_equal(first, native.reset(None)[0])
    np.testing.assert_array_equal(first, native.reset(4)[0])
    assert not np.array_equal(first[0], first[1])


def test_state_is_restored_exactly_in_the_middle_of_a_battle() -> None:
    def play(env: Any, seed: int) -> list[Any]:
        rng, steps_taken = np.random.default_rng(seed), []
        for _ in range(70):
            obs, reward, terminated, truncated, info = env.step(random_play(env.battles, rng))
            steps_taken.append([np.copy(x).tolist() for x in (obs, reward, terminated, truncated, info["state"])])
        return steps_taken

    first, second = NATIVE["skirmish/2s3z"](3), NATIVE["skirmish/2s3z"](3)
    first.reset(0)
    play(first, 1)
    state = first.state_dict()
    state_text = str(state)
    obs, info = first._observe()
    expected = play(first, 2)
    for env in (first, second):
        restored_obs, restored_info = env.load_state_dict(state)
        np.testing.assert_array_equal(restored_obs, obs)
        np.testing.assert_array_equal(restored_info["state"], info["state"])
        assert play(env, 2) == expected
    assert str(state) == state_text  # unchanged by the environments


def test_serial_back_end_restores_battles() -> None:
    env = SerialVectorEnv(partial(SkirmishEnv, "3m"), 2)
    assert (env.spaces.num_agents, env.spaces.mask, env.spaces.state, env.spaces.alive) == (3, 9, 48, True)

    def play(info: Any, seed: int, steps: int) -> tuple[Any, list[Any]]:
        rng, steps_taken = np.random.default_rng(seed), []
        for _ in range(steps):
            mask = info["action_mask"]
            obs, reward, terminated, truncated, info = env.step(np.where(mask, rng.random(mask.shape), -1).argmax(-1))
            steps_taken.append([np.copy(x).tolist() for x in (obs, reward, terminated, truncated, info["state"])])
        return info, steps_taken

    info, _ = play(env.reset(seed=0)[1], 1, 30)
    state = env.state_dict()
    _, expected = play(info, 2, 60)
    _, info = env.load_state_dict(state)
    assert env.inexact == []
    assert play(info, 2, 60)[1] == expected


def test_render_draws_living_units() -> None:
    battles = make_battle("2m_vs_1z", [(8, 8), (8, 24)], [(24, 8)], health=[45.0, 0.0, 50.0])
    env = SkirmishEnv("2m_vs_1z", render_mode="rgb_array")
    env.reset(seed=0)
    env.load_state_dict(battles.state_dict())
    image = env.render()
    assert (image.shape, image.dtype) == ((256, 256, 3), np.uint8)
    assert image[191, 64].tolist() == [80, 140, 240]  # blue in the south-west: row 255 - 8 / 32 · 255
    assert image[191, 191].tolist() == [230, 80, 70]  # red in the south-east
    assert (image[64, 64] == image[0, 0]).all()  # the dead marine isn't drawn


# --- difficulty ---


def test_random_play_never_wins() -> None:
    rng = np.random.default_rng(0)
    assert not play_battles("3m", lambda battles: random_play(battles, rng), 200)[0].any()


@pytest.mark.parametrize(
    ("map_name", "nearest", "focus"), [("3m", 0.31, 0.93), ("8m", 0.4, 0.99), ("2s3z", 0.36, 0.84)]
)
def test_focus_fire_wins_more_than_attacking_the_nearest(map_name: str, nearest: float, focus: float) -> None:
    assert play_battles(map_name, attack_nearest, 300)[0].mean() == pytest.approx(nearest, abs=0.1)
    assert play_battles(map_name, focus_fire, 300)[0].mean() == pytest.approx(focus, abs=0.06)

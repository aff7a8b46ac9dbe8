from __future__ import annotations

import sys
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from zhixing.envs.adapters.skirmish import NATIVE, SkirmishSMAC, random_play
from zhixing.envs.adapters.smac import SmacEnv, make, names, supports
from zhixing.envs.env_spec import inspect_env
from zhixing.errors import UserError


def test_skirmish_has_the_interface_of_smac() -> None:
    battle = SkirmishSMAC("3m", seed=0)
    env_info = {"state_shape": 48, "obs_shape": 30, "n_actions": 9, "n_agents": 3, "episode_limit": 60}
    assert battle.get_env_info() == env_info
    obs, state = battle.reset()
    assert [agent_obs.shape for agent_obs in obs] == [(30,)] * 3
    assert state.shape == (48,)
    np.testing.assert_array_equal(obs, battle.get_obs())
    np.testing.assert_array_equal(state, battle.get_state())
    assert battle.get_avail_actions() == [[0, 1, 1, 1, 1, 1, 0, 0, 0]] * 3
    assert battle.step([1, 1, 1]) == (0.0, False, {"battle_won": False, "dead_allies": 0, "dead_enemies": 0})
    battle.close()


def test_time_limit_is_reported_as_in_smac() -> None:
    battle = SkirmishSMAC("3m", episode_limit=2)
    battle.reset()
    assert "episode_limit" not in battle.step([1, 1, 1])[2]
    _, over, info = battle.step([1, 1, 1])
    assert (over, info["episode_limit"], info["battle_won"]) == (True, True, False)
    with pytest.raises(RuntimeError, match="call reset before step"):
        battle.step([1, 1, 1])


@pytest.mark.parametrize("map_name", ["3m", "2s3z"])
def test_wrapped_battle_equals_the_native_env(map_name: str) -> None:
    """With the same seed and actions, over several battles."""
    native, env = NATIVE[f"skirmish/{map_name}"](1), SmacEnv(partial(SkirmishSMAC, map_name))
    rng, num_ends = np.random.default_rng(0), 0
    expected_obs, expected_info = native.reset(7)
    obs, info = env.reset(seed=7)
    for _ in range(200):
        np.testing.assert_array_equal(obs, expected_obs[0])
        for key in ("action_mask", "state", "alive"):
            np.testing.assert_array_equal(info[key], expected_info[key][0])
        actions = random_play(native.battles, rng)
        expected_obs, expected_reward, terminated, truncated, expected_info = native.step(actions)
        obs, reward, *ends, info = env.step(actions[0])
        np.testing.assert_array_equal(reward, expected_reward[0])
        assert ends == [terminated[0], truncated[0]]
        if any(ends):
            num_ends += 1
            np.testing.assert_array_equal(obs, expected_info["final_obs"][0])
            np.testing.assert_array_equal(info["alive"], expected_info["final_alive"][0])
            assert {k: info[k] for k in ("won", "dead_allies", "dead_enemies")} == expected_info["final_info"][0]
            obs, info = env.reset()
    assert num_ends >= 3


def test_reset_without_a_seed_continues_the_random_stream() -> None:
    env = SmacEnv(partial(SkirmishSMAC, "3m"))
    first = env.reset(seed=1)[1]["state"]
    assert not np.array_equal(first, env.reset()[1]["state"])
    np.testing.assert_array_equal(first, env.reset(seed=1)[1]["state"])


def test_env_spec_includes_agents_mask_and_state() -> None:
    spaces = inspect_env(SmacEnv(partial(SkirmishSMAC, "3m")), "smac/3m").spaces
    assert (spaces.num_agents, spaces.mask, spaces.state, spaces.alive) == (3, 9, 48, True)


class SilentLimit(SkirmishSMAC):
    """Ends at the time limit without reporting it, as StarCraft2Env does by default."""

    def step(self, actions: Any) -> tuple[float, bool, dict[str, Any]]:
        reward, over, info = super().step(actions)
        info.pop("episode_limit", None)
        return reward, over, info


class Crashing(SkirmishSMAC):
    def step(self, actions: Any) -> tuple[float, bool, dict[str, Any]]:
        self.reset()
        return 0.0, True, {}


@pytest.mark.parametrize("kind", [SkirmishSMAC, SilentLimit, Crashing])
def test_undecided_battle_is_truncated(kind: type[SkirmishSMAC]) -> None:
    env = SmacEnv(partial(kind, "3m", episode_limit=1))
    env.reset()
    _, _, terminated, truncated, info = env.step(np.array([1, 1, 1]))
    assert (terminated, truncated, info["won"]) == (False, True, False)


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("smac", "smac.env", "smacv2", "smacv2.env"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError, match=r"^smac/3m needs the game StarCraft II and the package smac \(pip install"):
        make("smac/3m", {})


def test_installed_package_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("smac.env")
    module.StarCraft2Env = SkirmishSMAC  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "smac", ModuleType("smac"))
    monkeypatch.setitem(sys.modules, "smac.env", module)
    env = make("smac/2s3z", {"episode_limit": 4})
    assert (env.num_agents, env.battle.get_env_info()["episode_limit"]) == (5, 4)
    with pytest.raises(UserError, match="smac/3m has no option 'dificulty'"):
        make("smac/3m", {"dificulty": 7})
    with pytest.raises(UserError, match="has no option 'map_name': the map is part of the name"):
        make("smac/3m", {"map_name": "8m"})


def test_names() -> None:
    assert "smac/3m" in names()
    assert supports("smac/corridor")
    assert not supports("smac/4m")

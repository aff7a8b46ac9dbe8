from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import zhixing as zx
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


class CountingSMAC(SkirmishSMAC):
    """Starts its game as StarCraft2Env does: in `reset`, as long as no battle has ended. Counts games."""

    num_started = num_closed = num_leaked = 0

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.num_episodes, self.runs = 0, False

    def reset(self) -> Any:
        if self.num_episodes == 0:
            CountingSMAC.num_started += 1
            CountingSMAC.num_leaked += self.runs  # the previous one is still running
            self.runs = True
        return super().reset()

    def step(self, actions: Any) -> Any:
        reward, over, info = super().step(actions)
        self.num_episodes += over
        return reward, over, info

    def close(self) -> None:
        CountingSMAC.num_closed += self.runs
        self.runs = False


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> type[CountingSMAC]:
    """Install the stand-in as the package smac."""
    module = ModuleType("smac.env")
    module.StarCraft2Env = CountingSMAC  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "smac", ModuleType("smac"))
    monkeypatch.setitem(sys.modules, "smac.env", module)
    for name in ("num_started", "num_closed", "num_leaked"):
        monkeypatch.setattr(CountingSMAC, name, 0)
    return CountingSMAC


def test_one_game_runs_for_the_life_of_an_environment(counting: type[CountingSMAC]) -> None:
    env = make("smac/3m", {"episode_limit": 8})
    assert counting.num_started == 0
    for seed in (3, 4, None, 5):
        env.reset(seed=seed)  # a battle without steps continues
    assert counting.num_started == 1
    for steps in (3, 20, 1, 8):
        for _ in range(steps):  # resets in the middle of the first and of later battles, and after their end
            *_, terminated, truncated, _ = env.step(np.array(env.battle.get_avail_actions()).argmax(-1))
            if terminated or truncated:
                break
        env.reset(seed=steps)
        assert env.battle.get_obs()[0].any()
    assert (counting.num_started, counting.num_leaked, counting.num_closed) == (1, 0, 0)
    env.close()
    assert counting.num_closed == 1


def test_first_seed_determines_the_game(counting: type[CountingSMAC]) -> None:
    states = []
    for seed in (1, 1, 2):
        env = make("smac/3m", {})
        states.append(env.reset(seed=seed)[1]["state"])
        env.close()
    np.testing.assert_array_equal(states[0], states[1])
    assert not np.array_equal(states[0], states[2])


@pytest.mark.parametrize("name", ["qmix", "mappo"])
def test_run_starts_a_game_per_environment(name: str, counting: type[CountingSMAC], tmp_path: Path) -> None:
    settings: dict[str, Any] = {"num_envs": 3, "eval_num_envs": 2, "env_steps": 240, "eval_every": 60}
    settings |= {"rollout_steps": 20, "minibatch_size": 60, "epochs": 1} if name == "mappo" else {}
    zx.train(
        name, env="smac/3m", env__episode_limit=10, out=tmp_path / "run", quiet=True, eval_episodes=4,
        vector__backend="serial", tensorboard=False, **settings,
    )  # fmt: skip
    # three for training, two for five evaluations, and one each to read their spaces
    assert counting.num_started == 3 + 2 + 2
    assert (counting.num_leaked, counting.num_closed) == (0, counting.num_started)


@pytest.mark.parametrize("name", ["qmix", "vdn", "idqn", "coma", "mappo", "ippo"])
def test_presets_limit_the_games_of_evaluations(name: str) -> None:
    cfg = zx.config.load(algorithm=name, env="smac/3m")
    assert (cfg.num_envs, cfg.eval_num_envs) == (8, 4)
    assert cfg.env_steps == (10_000_000 if name in ("mappo", "ippo") else 2_000_000)


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

"""SMAC (Samvelyan et al., 2019): `smac/3m` in StarCraft II. `SmacEnv` wraps anything with SMAC's interface."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Discrete

from zhixing.envs.options import check_options
from zhixing.envs.vector.step_buffers import Array
from zhixing.errors import UserError

MAPS = (
    "3m", "8m", "25m", "5m_vs_6m", "8m_vs_9m", "10m_vs_11m", "27m_vs_30m", "MMM", "MMM2", "2s3z", "3s5z",
    "3s5z_vs_3s6z", "3s_vs_3z", "3s_vs_4z", "3s_vs_5z", "1c3s5z", "2m_vs_1z", "corridor", "6h_vs_8z", "2s_vs_1sc",
    "so_many_baneling", "bane_vs_bane", "2c_vs_64zg",
)  # fmt: skip
PACKAGES = ("smac.env", "smacv2.env")  # the first installed one is used


def names() -> list[str]:
    return [f"smac/{name}" for name in MAPS]


def supports(name: str) -> bool:
    return name.removeprefix("smac/") in MAPS


def make(name: str, options: dict[str, Any]) -> SmacEnv:
    if reserved := {"map_name", "seed"} & set(options):
        raise UserError(
            f"{name} has no option {sorted(reserved)[0]!r}: the map is part of the name, the seed a setting of the run"
        )
    constructor = partial(_import_constructor(name), map_name=name.removeprefix("smac/"))
    check_options(name, constructor, options)
    return SmacEnv(partial(constructor, **options))


def _import_constructor(name: str) -> Callable[..., Any]:
    for package in PACKAGES:
        try:
            constructor: Callable[..., Any] = importlib.import_module(package).StarCraft2Env
        except ModuleNotFoundError as error:
            if error.name not in (package, package.partition(".")[0]):
                raise UserError(f"{name} can't be made: {package} needs the package {error.name}") from error
            continue
        return constructor
    raise UserError(
        f"{name} needs the game StarCraft II and the package smac (pip install git+https://github.com/oxwhirl/smac); "
        f"see that page for both. skirmish/3m is a similar environment that needs neither"
    )


class SmacEnv(gym.Env[Any, Any]):
    """Wrap an object with SMAC's interface, made by `constructor(seed=...)`. A unit is alive if action 0 (no-op) is not
    available to it.

    One game runs for the whole life of an environment, because starting StarCraft II takes long. SMAC starts it at the
    first reset, with the seed of the object. So the seed of the first reset counts, and later seeds have no effect.
    """

    metadata = {"render_modes": ["rgb_array"], "logged_info_keys": ("won",)}  # noqa: RUF012  (as in gym.Env)
    reward_kind = "shared"

    def __init__(self, constructor: Callable[..., Any]) -> None:
        self.constructor = constructor
        self.battle = constructor()  # doesn't start the game
        self.started = False
        self.num_battles = 0  # that ended
        self.over, self.num_steps = True, 0  # of the current battle
        env_info = self.battle.get_env_info()
        self.num_agents = int(env_info["n_agents"])
        self.observation_space = Box(-np.inf, np.inf, (int(env_info["obs_shape"]),), np.float32)
        self.action_space = Discrete(int(env_info["n_actions"]))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        super().reset(seed=seed)
        if not self.started:
            if seed is not None:
                self.battle.close()
                self.battle = self.constructor(seed=seed)
            self.battle.reset()
            self.started = True
        elif self.over or self.num_steps:  # otherwise the battle has just begun
            while not self.over and self.num_battles == 0:  # until a battle has ended, SMAC's reset starts another game
                self._step_battle(np.argmax(self.battle.get_avail_actions(), axis=-1))
            self.battle.reset()
        self.over, self.num_steps = False, 0
        return self._observe()

    def _step_battle(self, action: Any) -> tuple[Any, bool, dict[str, Any]]:
        reward, self.over, battle_info = self.battle.step([int(agent_action) for agent_action in action])
        self.num_steps += 1
        self.num_battles += self.over
        return reward, self.over, battle_info

    def step(self, action: Any) -> tuple[Array, Any, bool, bool, dict[str, Any]]:
        reward, over, battle_info = self._step_battle(action)
        obs, info = self._observe()
        won = bool(battle_info.get("battle_won", False))
        # SMAC doesn't always report the time limit, and never reports that the game crashed and was restarted. If the
        # battle isn't won and units are alive, it was truncated.
        truncated = over and not won and ("episode_limit" in battle_info or bool(info["alive"].any()))
        if over:
            info |= {key: battle_info[key] for key in ("dead_allies", "dead_enemies") if key in battle_info}
            info["won"] = won
        return obs, np.full(self.num_agents, reward, np.float32), over and not truncated, truncated, info

    def _observe(self) -> tuple[Array, dict[str, Any]]:
        mask = np.array(self.battle.get_avail_actions(), bool)
        info = {
            "action_mask": mask,
            "state": np.array(self.battle.get_state(), np.float32),
            "alive": ~mask[:, 0],
        }
        return np.stack(self.battle.get_obs()).astype(np.float32, copy=False), info

    def render(self) -> Any:
        return self.battle.render(mode="rgb_array")

    def close(self) -> None:
        self.battle.close()

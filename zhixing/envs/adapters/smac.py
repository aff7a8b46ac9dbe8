"""SMAC (Samvelyan et al., 2019): `smac/3m` in StarCraft II, and whatever else has its interface."""

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
PACKAGES = ("smac.env", "smacv2.env")  # the first that is installed


def names() -> list[str]:
    return [f"smac/{name}" for name in MAPS]


def supports(name: str) -> bool:
    return name.removeprefix("smac/") in MAPS


def make(name: str, options: dict[str, Any]) -> SmacEnv:
    if taken := {"map_name", "seed"} & set(options):
        raise UserError(
            f"{name} has no option {sorted(taken)[0]!r}: the map is in the name, the seed a setting of the run"
        )
    constructor = partial(_constructor(name), map_name=name.removeprefix("smac/"))
    check_options(name, constructor, options)
    return SmacEnv(partial(constructor, **options))


def _constructor(name: str) -> Callable[..., Any]:
    for package in PACKAGES:
        try:
            found: Callable[..., Any] = importlib.import_module(package).StarCraft2Env
        except ModuleNotFoundError as error:
            if error.name not in (package, package.partition(".")[0]):
                raise UserError(f"{name} can't be made: {package} needs the package {error.name}") from error
            continue
        return found
    raise UserError(
        f"{name} needs the game StarCraft II and the package smac (pip install git+https://github.com/oxwhirl/smac), "
        f"whose page says how to install both; skirmish/3m is a similar task that needs neither"
    )


class SmacEnv(gym.Env[Any, Any]):
    """Any object with SMAC's interface; `construct(seed=...)` makes it.

    Such objects take a seed only when they are made, so that a reset with a seed makes a new one. A unit is alive as
    long as action 0 (do nothing) is forbidden to it.
    """

    metadata = {"render_modes": ["rgb_array"], "logged_info_keys": ("won",)}  # noqa: RUF012  (declared so by gym.Env)
    reward_kind = "shared"

    def __init__(self, construct: Callable[..., Any]) -> None:
        self.construct = construct
        self.battle = construct()
        about = self.battle.get_env_info()
        self.num_agents = int(about["n_agents"])
        self.observation_space = Box(-np.inf, np.inf, (int(about["obs_shape"]),), np.float32)
        self.action_space = Discrete(int(about["n_actions"]))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self.battle.close()
            self.battle = self.construct(seed=seed)
        self.battle.reset()
        return self._show()

    def step(self, action: Any) -> tuple[Array, Any, bool, bool, dict[str, Any]]:
        paid, over, told = self.battle.step([int(one) for one in action])
        obs, info = self._show()
        won = bool(told.get("battle_won", False))
        # SMAC doesn't always name the time limit, and says nothing when the game crashed and was started again; but
        # where nobody won and units are left, the battle was cut
        cut = over and not won and ("episode_limit" in told or bool(info["alive"].any()))
        if over:
            info |= {key: told[key] for key in ("dead_allies", "dead_enemies") if key in told}
            info["won"] = won
        return obs, np.full(self.num_agents, paid, np.float32), over and not cut, cut, info

    def _show(self) -> tuple[Array, dict[str, Any]]:
        available = np.array(self.battle.get_avail_actions(), bool)
        info = {
            "action_mask": available,
            "state": np.array(self.battle.get_state(), np.float32),
            "alive": ~available[:, 0],
        }
        return np.stack(self.battle.get_obs()).astype(np.float32, copy=False), info

    def render(self) -> Any:
        return self.battle.render(mode="rgb_array")

    def close(self) -> None:
        self.battle.close()

"""One battle with SMAC's own interface, for code that is written to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from zhixing.envs.adapters.skirmish.battles import Battles
from zhixing.envs.adapters.skirmish.views import Views
from zhixing.envs.vector.step_buffers import Array


class SkirmishSMAC:
    """As there, a step after the end is an error until `reset`, and `terminated` tells of the time limit, too."""

    def __init__(self, map_name: str = "8m", seed: int | None = None, episode_limit: int | None = None) -> None:
        self.battles = Battles(1, map_name, episode_limit)
        self.battles.rng = np.random.default_rng(seed)
        self.views = Views(self.battles)
        self.over = True

    def get_env_info(self) -> dict[str, int]:
        return {
            "state_shape": self.views.state_size,
            "obs_shape": self.views.obs_size,
            "n_actions": self.battles.num_actions,
            "n_agents": self.battles.num_allies,
            "episode_limit": self.battles.episode_limit,
        }

    def reset(self) -> tuple[list[Array], Array]:
        self.battles.begin(np.array([0]))
        self.over = False
        return self.get_obs(), self.get_state()

    def step(self, actions: Sequence[int] | Array) -> tuple[float, bool, dict[str, Any]]:
        if self.over:
            raise RuntimeError("the battle is over: reset it")
        reward, terminated, truncated = self.battles.step(np.asarray(actions, np.int64)[None])
        self.over = bool(terminated[0] or truncated[0])
        numbers = self.battles.numbers(0)
        info: dict[str, Any] = {"battle_won": numbers.pop("won"), **numbers}
        if truncated[0]:
            info["episode_limit"] = True
        return float(reward[0]), self.over, info

    def get_obs(self) -> list[Array]:
        return list(self.views.observations()[0])

    def get_state(self) -> Array:
        state: Array = self.views.states()[0]
        return state

    def get_avail_actions(self) -> list[list[int]]:
        available: list[list[int]] = self.battles.available[0].astype(int).tolist()
        return available

    def close(self) -> None:
        pass

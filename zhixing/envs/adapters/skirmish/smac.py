"""One battle with SMAC's interface, for code written against SMAC."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from zhixing.envs.adapters.skirmish.battles import Battles
from zhixing.envs.adapters.skirmish.observations import ObsBuilder
from zhixing.envs.vector.step_buffers import Array


class SkirmishSMAC:
    """One battle with SMAC's interface.

    As in SMAC, `terminated` is also true at the time limit, and a step after the end raises an error until `reset`.
    """

    def __init__(self, map_name: str = "8m", seed: int | None = None, episode_limit: int | None = None) -> None:
        self.battles = Battles(1, map_name, episode_limit)
        self.battles.rng = np.random.default_rng(seed)
        self.obs_builder = ObsBuilder(self.battles)
        self.over = True

    def get_env_info(self) -> dict[str, int]:
        return {
            "state_shape": self.obs_builder.state_size,
            "obs_shape": self.obs_builder.obs_size,
            "n_actions": self.battles.num_actions,
            "n_agents": self.battles.num_allies,
            "episode_limit": self.battles.episode_limit,
        }

    def reset(self) -> tuple[list[Array], Array]:
        self.battles.reset(np.array([0]))
        self.over = False
        return self.get_obs(), self.get_state()

    def step(self, actions: Sequence[int] | Array) -> tuple[float, bool, dict[str, Any]]:
        if self.over:
            raise RuntimeError("the battle is over; call reset before step")
        reward, terminated, truncated = self.battles.step(np.asarray(actions, np.int64)[None])
        self.over = bool(terminated[0] or truncated[0])
        final_info = self.battles.final_info(0)
        info: dict[str, Any] = {"battle_won": final_info.pop("won"), **final_info}
        if truncated[0]:
            info["episode_limit"] = True
        return float(reward[0]), self.over, info

    def get_obs(self) -> list[Array]:
        return list(self.obs_builder.observations()[0])

    def get_state(self) -> Array:
        state: Array = self.obs_builder.states()[0]
        return state

    def get_avail_actions(self) -> list[list[int]]:
        available: list[list[int]] = self.battles.action_mask[0].astype(int).tolist()
        return available

    def close(self) -> None:
        pass

"""Many battles as one task: `skirmish/MAP` for the native back end."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from gymnasium.spaces import Box, Discrete

from zhixing.core.spaces import Spaces
from zhixing.envs.adapters.skirmish.battles import Battles
from zhixing.envs.adapters.skirmish.drawing import picture
from zhixing.envs.adapters.skirmish.units import MAPS
from zhixing.envs.adapters.skirmish.views import Views
from zhixing.envs.vector.base import Info, Result
from zhixing.envs.vector.step_buffers import Array
from zhixing.envs.vector.sub_env import State


class NativeSkirmish:
    """One map of it; `NATIVE` has a class for each."""

    options: ClassVar[frozenset[str]] = frozenset({"episode_limit", "render_mode"})
    logged_info_keys: ClassVar[tuple[str, ...]] = ("won",)
    map_name: ClassVar[str]

    def __init__(self, num: int, episode_limit: int | None = None, render_mode: str | None = None) -> None:
        self.battles = Battles(num, self.map_name, episode_limit)
        self.views = Views(self.battles)
        self.spaces = spaces_of(self.views)

    def reset(self, seed: int | None) -> tuple[Array, Info]:
        if seed is not None:
            self.battles.rng = np.random.default_rng(seed)
        self.battles.begin(np.arange(self.battles.num))
        return self._show()

    def step(self, actions: Array) -> Result:
        battles = self.battles
        reward, terminated, truncated = battles.step(actions)
        obs, info = self._show()
        ended = (terminated | truncated).nonzero()[0]
        if len(ended):
            info |= {
                "final_obs": obs.copy(),
                "final_mask": info["action_mask"].copy(),
                "final_state": info["state"].copy(),
                "final_alive": info["alive"].copy(),
                "final_info": {row: battles.numbers(row) for row in ended.tolist()},
            }
            battles.begin(ended)
            obs[ended], info["state"][ended] = self.views.observations(ended), self.views.states(ended)
            info["action_mask"][ended] = battles.available[ended]
            info["alive"][ended] = True
        team_reward = np.repeat(reward.astype(np.float32)[:, None], battles.num_allies, 1)
        return obs, team_reward, terminated, truncated, info

    def _show(self) -> tuple[Array, Info]:
        alive = self.battles.alive[:, : self.battles.num_allies].copy()
        info = {"action_mask": self.battles.available.copy(), "state": self.views.states(), "alive": alive}
        return self.views.observations(), info

    def state_dict(self) -> State:
        return self.battles.state_dict()

    def load_state_dict(self, state: State) -> tuple[Array, Info]:
        self.battles.load_state_dict(state)
        return self._show()

    def render(self, index: int) -> Array | None:
        return picture(self.battles, index)

    def close(self) -> None:
        pass


def spaces_of(views: Views) -> Spaces:
    battles = views.battles
    return Spaces(
        obs=Box(-1.0, 1.0, (views.obs_size,), np.float32),
        action=Discrete(battles.num_actions),
        num_agents=battles.num_allies,
        mask=battles.num_actions,
        state=views.state_size,
        alive=True,
        reward_kind="shared",
    )


NATIVE: dict[str, Any] = {
    f"skirmish/{name}": type(f"NativeSkirmish_{name}", (NativeSkirmish,), {"map_name": name}) for name in MAPS
}

"""N battles as one native vector environment: `skirmish/MAP` with vector.backend=native."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from gymnasium.spaces import Box, Discrete

from zhixing.core.spaces import Spaces
from zhixing.envs.adapters.skirmish.battles import Battles
from zhixing.envs.adapters.skirmish.observations import ObsBuilder
from zhixing.envs.adapters.skirmish.render import render
from zhixing.envs.adapters.skirmish.units import MAPS
from zhixing.envs.vector.base import Info, Result
from zhixing.envs.vector.step_buffers import Array
from zhixing.envs.vector.sub_env import State


class NativeSkirmish:
    """N battles on the map `map_name`; `NATIVE` has a subclass for each map."""

    options: ClassVar[frozenset[str]] = frozenset({"episode_limit", "render_mode"})
    logged_info_keys: ClassVar[tuple[str, ...]] = ("won",)
    map_name: ClassVar[str]

    def __init__(self, num: int, episode_limit: int | None = None, render_mode: str | None = None) -> None:
        self.battles = Battles(num, self.map_name, episode_limit)
        self.obs_builder = ObsBuilder(self.battles)
        self.spaces = make_spaces(self.obs_builder)

    def reset(self, seed: int | None) -> tuple[Array, Info]:
        if seed is not None:
            self.battles.rng = np.random.default_rng(seed)
        self.battles.reset(np.arange(self.battles.num))
        return self._observe()

    def step(self, actions: Array) -> Result:
        battles = self.battles
        reward, terminated, truncated = battles.step(actions)
        obs, info = self._observe()
        ended = (terminated | truncated).nonzero()[0]
        if len(ended):
            info |= {
                "final_obs": obs.copy(),
                "final_mask": info["action_mask"].copy(),
                "final_state": info["state"].copy(),
                "final_alive": info["alive"].copy(),
                "final_info": {row: battles.final_info(row) for row in ended.tolist()},
            }
            battles.reset(ended)
            obs[ended], info["state"][ended] = self.obs_builder.observations(ended), self.obs_builder.states(ended)
            info["action_mask"][ended] = battles.action_mask[ended]
            info["alive"][ended] = True
        team_reward = np.repeat(reward.astype(np.float32)[:, None], battles.num_allies, 1)
        return obs, team_reward, terminated, truncated, info

    def _observe(self) -> tuple[Array, Info]:
        alive = self.battles.alive[:, : self.battles.num_allies].copy()
        info = {"action_mask": self.battles.action_mask.copy(), "state": self.obs_builder.states(), "alive": alive}
        return self.obs_builder.observations(), info

    def state_dict(self) -> State:
        return self.battles.state_dict()

    def load_state_dict(self, state: State) -> tuple[Array, Info]:
        self.battles.load_state_dict(state)
        return self._observe()

    def render(self, index: int) -> Array | None:
        return render(self.battles, index)

    def close(self) -> None:
        pass


def make_spaces(obs_builder: ObsBuilder) -> Spaces:
    battles = obs_builder.battles
    return Spaces(
        obs=Box(-1.0, 1.0, (obs_builder.obs_size,), np.float32),
        action=Discrete(battles.num_actions),
        num_agents=battles.num_allies,
        mask=battles.num_actions,
        state=obs_builder.state_size,
        alive=True,
        reward_kind="shared",
    )


NATIVE: dict[str, Any] = {
    f"skirmish/{name}": type(f"NativeSkirmish_{name}", (NativeSkirmish,), {"map_name": name}) for name in MAPS
}

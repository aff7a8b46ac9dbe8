"""One battle as a `gymnasium.Env`."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np

from zhixing.envs.adapters.skirmish.battles import Battles
from zhixing.envs.adapters.skirmish.native import make_spaces
from zhixing.envs.adapters.skirmish.observations import ObsBuilder
from zhixing.envs.adapters.skirmish.render import render
from zhixing.envs.vector.step_buffers import Array


class SkirmishEnv(gym.Env[Any, Any]):
    """The team wins if all enemies are dead before the time limit. The time limit truncates the battle."""

    metadata = {  # noqa: RUF012  (as in gym.Env)
        "render_modes": ["rgb_array"],
        "render_fps": 6,
        "logged_info_keys": ("won",),
    }
    reward_kind = "shared"

    def __init__(self, map_name: str, episode_limit: int | None = None, render_mode: str | None = None) -> None:
        self.battles = Battles(1, map_name, episode_limit)
        self.obs_builder = ObsBuilder(self.battles)
        spaces = make_spaces(self.obs_builder)
        self.observation_space, self.action_space, self.num_agents = spaces.obs, spaces.action, spaces.num_agents
        self.render_mode = render_mode

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        super().reset(seed=seed)
        self.battles.rng = self.np_random
        self.battles.reset(np.array([0]))
        return self._observe()

    def step(self, action: Any) -> tuple[Array, Any, bool, bool, dict[str, Any]]:
        reward, terminated, truncated = self.battles.step(np.asarray(action)[None])
        obs, info = self._observe()
        if terminated[0] or truncated[0]:
            info |= self.battles.final_info(0)
        team_reward = np.full(self.num_agents, reward[0], np.float32)
        return obs, team_reward, bool(terminated[0]), bool(truncated[0]), info

    def _observe(self) -> tuple[Array, dict[str, Any]]:
        info = {
            "action_mask": self.battles.action_mask[0].copy(),
            "state": self.obs_builder.states()[0],
            "alive": self.battles.alive[0, : self.num_agents].copy(),
        }
        return self.obs_builder.observations()[0], info

    def state_dict(self) -> dict[str, Any]:
        return self.battles.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.battles.rng = self.np_random  # before the first reset they are different generators
        self.battles.load_state_dict(state)

    def render(self) -> Any:
        return render(self.battles, 0)

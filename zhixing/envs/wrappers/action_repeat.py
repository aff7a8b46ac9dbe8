"""Repeat actions: the option `action_repeat`, which every environment accepts.

To save time, an environment may have `step_without_obs(action)`, which steps without making an observation, and
`get_obs()`, which returns the current one as a new array. Then observations between actions are never made.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Discrete

from zhixing.envs.api import parse_reward
from zhixing.envs.wrappers.stateful import Info, StatefulWrapper
from zhixing.errors import UserError

OPTION = "action_repeat"
POOLS = ("max", "last")


class ActionRepeat(StatefulWrapper):
    """Repeats each action for several steps of the environment, but not beyond the end of an episode.

    Rewards are summed; those of an agent that leaves count up to then, unless the reward is shared. The observation and
    `info` are those of the last step, or with `pool="max"` the maximum of the last two observations. With `sticky`
    actions, a step may repeat the previous action instead.
    """

    saved_attributes = ("last_action",)

    def __init__(self, env: gym.Env[Any, Any], action_repeat: int, pool: str = "last", sticky: float = 0.0) -> None:
        super().__init__(env)
        self.action_repeat, self.sticky = action_repeat, sticky
        self.num_pooled = min(action_repeat, 2 if pool == "max" else 1)
        self.last_action = noop(self.action_space) if sticky else None
        num_agents = int(getattr(env.unwrapped, "num_agents", 1))
        self.agents = () if num_agents == 1 else (num_agents,)
        self.individual = getattr(env.unwrapped, "reward_kind", "individual") != "shared"
        inner: Any = env
        while isinstance(inner, gym.Wrapper) and type(inner).step is gym.Wrapper.step:
            inner = inner.env
        draws_on_demand = hasattr(inner, "step_without_obs") and hasattr(inner, "get_obs")
        self.step_without_obs = inner.step_without_obs if draws_on_demand else None
        self.get_obs = inner.get_obs if draws_on_demand else None
        # videos have one image per action
        self.metadata = {**env.metadata, "render_fps": (env.metadata.get("render_fps") or 60) / action_repeat}

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[Any, Info]:
        self.last_action = noop(self.action_space) if self.sticky else None
        return self.env.reset(seed=seed, options=options)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, Info]:
        total: Any = 0.0
        alive: Any = 1.0  # agents whose rewards count
        frames = []
        pools = self.num_pooled == 2
        for remaining in reversed(range(self.action_repeat)):
            current = action
            if self.sticky:
                if self.np_random.random() >= self.sticky:
                    self.last_action = action
                current = self.last_action
            if self.step_without_obs is None:
                obs, reward, terminated, truncated, info = self.env.step(current)
            else:
                reward, terminated, truncated, info = self.step_without_obs(current)
            total = total + alive * parse_reward(reward, self.agents)
            if self.individual and "alive" in info:
                alive = alive * np.asarray(info["alive"])
            ended = terminated or truncated
            if remaining < self.num_pooled or ended:
                frames.append(self._copy(obs, pools and remaining > 0) if self.get_obs is None else self.get_obs())
            if ended:
                break
        return (np.maximum(*frames) if len(frames) == 2 else frames[0]), total, terminated, truncated, info

    def _copy(self, obs: Any, first_of_two: bool) -> Any:
        """Copy the first of two observations, because the environment may reuse its array for the second."""
        return np.array(obs) if first_of_two else obs


def noop(space: gym.Space[Any]) -> Any:
    """Return the no-op action: by convention the first discrete action, or zeros."""
    return int(space.start) if isinstance(space, Discrete) else np.zeros(space.shape or (), space.dtype)


def check_action_repeat(name: str, options: Mapping[str, Any]) -> None:
    """Raise `UserError` if the option is given and isn't a number of steps."""
    repeat = options.get(OPTION, 1)
    if not isinstance(repeat, int) or isinstance(repeat, bool) or repeat < 1:
        raise UserError(f"{name}: env.{OPTION}={repeat!r}: must be an integer of at least 1; 1 takes each action once")


def repeat_actions(env: gym.Env[Any, Any], action_repeat: int) -> gym.Env[Any, Any]:
    return ActionRepeat(env, action_repeat) if action_repeat > 1 else env


def action_repeat_of(env: gym.Env[Any, Any]) -> int:
    """Return how many steps of the innermost environment an action takes."""
    repeat = 1
    while isinstance(env, gym.Wrapper):
        repeat *= env.action_repeat if isinstance(env, ActionRepeat) else 1
        env = env.env
    return repeat

"""Time limits: the option `max_episode_steps`, which every environment accepts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium as gym
from gymnasium.wrappers import TimeLimit

from zhixing.envs.wrappers.action_repeat import ActionRepeat
from zhixing.envs.wrappers.stateful import Info, StatefulWrapper
from zhixing.errors import UserError

OPTION = "max_episode_steps"


class StatefulTimeLimit(StatefulWrapper):
    """Like Gymnasium's `TimeLimit`, but its step count can be saved."""

    saved_attributes = ("steps",)

    def __init__(self, env: gym.Env[Any, Any], max_episode_steps: int) -> None:
        super().__init__(env)
        self.max_episode_steps, self.steps = max_episode_steps, 0

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[Any, Info]:
        self.steps = 0
        return self.env.reset(seed=seed, options=options)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, Info]:
        obs, reward, terminated, truncated, info = self.env.step(action)
        self.steps += 1
        return obs, reward, terminated, truncated or self.steps >= self.max_episode_steps, info


def check_time_limit(name: str, options: Mapping[str, Any]) -> None:
    """Raise `UserError` if the option is given and is neither a number of steps nor -1 or None (no limit)."""
    limit = options.get(OPTION)
    is_int = isinstance(limit, int) and not isinstance(limit, bool)
    if limit is not None and not (is_int and (limit >= 1 or limit == -1)):
        raise UserError(
            f"{name}: env.{OPTION}={limit!r} is invalid; allowed are integers of at least 1, or -1 or null for none"
        )


def limit_steps(env: gym.Env[Any, Any], limit: int | None) -> gym.Env[Any, Any]:
    """Truncate episodes after `limit` steps. Return the environment unchanged if `limit` is None or -1."""
    return env if limit in (None, -1) else StatefulTimeLimit(env, limit)


def time_limit_of(env: gym.Env[Any, Any]) -> int | None:
    """Return the number of actions after which a wrapper truncates episodes, or None if no wrapper does."""
    limits = []
    repeat = 1  # steps of the wrapped environment per action
    while isinstance(env, gym.Wrapper):
        if isinstance(env, ActionRepeat):
            repeat *= env.action_repeat
        elif isinstance(env, TimeLimit):
            limits.append(-(-int(env._max_episode_steps) // repeat))
        elif isinstance(env, StatefulTimeLimit):
            limits.append(-(-env.max_episode_steps // repeat))
        env = env.env
    return min(limits, default=None)

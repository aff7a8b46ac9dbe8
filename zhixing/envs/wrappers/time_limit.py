"""Time limits of environments: the option `max_episode_steps`, which every environment takes, and the limit it has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium as gym
from gymnasium.wrappers import TimeLimit

from zhixing.envs.wrappers.pixels import Limit
from zhixing.errors import UserError

OPTION = "max_episode_steps"


def check_time_limit(name: str, options: Mapping[str, Any]) -> None:
    """Raise `UserError` unless the option, where it is given, is a number of steps or says that there is no limit."""
    limit = options.get(OPTION)
    whole = isinstance(limit, int) and not isinstance(limit, bool)
    if limit is not None and not (whole and (limit >= 1 or limit == -1)):
        raise UserError(
            f"{name}: env.{OPTION}={limit!r} is no number of steps; allowed are whole numbers from 1, and -1 or null "
            f"for no limit"
        )


def limit_steps(env: gym.Env[Any, Any], limit: int | None) -> gym.Env[Any, Any]:
    """Truncate episodes after `limit` steps; return the environment as it is without a limit."""
    return env if limit in (None, -1) else Limit(env, limit)


def time_limit_of(env: gym.Env[Any, Any]) -> int | None:
    """Return the number of steps after which a wrapper truncates an episode, or None where no wrapper does."""
    limits = []
    while isinstance(env, gym.Wrapper):
        if isinstance(env, TimeLimit):
            limits.append(int(env._max_episode_steps))
        elif isinstance(env, Limit):
            limits.append(env.most)
        env = env.env
    return min(limits, default=None)

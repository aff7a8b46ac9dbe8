"""Gymnasium's interface as an environment must follow it. Training and `zhixing check` share these rules.

Each rule gives one message instead of the traceback that a broken one would end in.
"""

from __future__ import annotations

import re
import traceback
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Discrete, MultiDiscrete

from zhixing.errors import EnvCrashError, UserError

RESET = "reset(self, *, seed=None, options=None) must return (obs, info), where info is a dict"
STEP = "step(action) must return (obs, reward, terminated, truncated, info)"
PORT = "environments of the old Gym must be changed to that, or wrapped (see shimmy.GymV21CompatibilityV0)"


class MisbehaviorError(Exception):
    """An environment gave what it must not. The words follow its name and step."""


def check_type(env: Any, name: str) -> None:
    """Raise `UserError` unless it is a `gymnasium.Env`."""
    if isinstance(env, gym.Env):
        return
    old = any(base.__module__.partition(".")[0] == "gym" for base in type(env).__mro__)
    what = "an environment of the old package gym" if old else "not a gymnasium.Env"
    advice = f"; derive it from gymnasium.Env: {RESET}; {STEP}" if old or hasattr(env, "step") else ""
    raise UserError(f"{name} gives a {type(env).__name__}, {what}{advice}")


def check_spaces(env: gym.Env[Any, Any], name: str) -> None:
    """Raise `UserError` if a space is missing, or if actions are of a kind that no policy takes."""
    for which in ("observation_space", "action_space"):
        if not isinstance(getattr(env, which, None), gym.Space):
            raise UserError(f"{name} has no {which}; set it in __init__, to a gymnasium.spaces.Space")
    action = env.action_space
    if not (isinstance(action, (Discrete, MultiDiscrete)) or (isinstance(action, Box) and len(action.shape) == 1)):
        raise UserError(
            f"{name} has the action space {action}; allowed are Discrete, MultiDiscrete and a Box of one dimension; "
            f"wrap the environment, for example in gymnasium.wrappers.TransformAction"
        )


def first_reset(env: gym.Env[Any, Any], name: str) -> tuple[Any, dict[str, Any]]:
    """Reset an environment that nobody has looked at yet."""
    try:
        result: Any = env.reset(seed=0, options=None)
    except Exception as error:
        problem = problem_of(error)
        if problem is not None:
            raise UserError(f"{name}: {problem}") from error
        raise EnvCrashError(f"environment {name} crashed at its first reset:\n{traceback.format_exc()}") from error
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)):
        kinds = ", ".join(type(part).__name__ for part in result) if isinstance(result, tuple) else ""
        what = f"({kinds})" if kinds else type(result).__name__
        raise UserError(f"{name}: its reset() returned {what}; {RESET}; {PORT}")
    return result


def problem_of(error: Exception) -> str | None:
    """Return what is wrong with the interface of an environment that led to this error; None if it is another error."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    where = "" if frame is None else str(frame.tb_frame.f_globals.get("__name__", ""))
    if not where.startswith(("zhixing.", "gymnasium.")):  # raised inside the environment: its own fault
        return None
    words = str(error)
    keyword = re.search(r"reset\(\) got an unexpected keyword argument '(seed|options)'", words)
    if isinstance(error, TypeError) and keyword:
        return f"its reset() takes no argument {keyword[1]!r}; {RESET}; {PORT}"
    unpacked = re.search(r"values to unpack \(expected (2|5)(?:, got (\d+))?", words)
    if isinstance(error, ValueError) and unpacked:
        method, rule = ("reset()", RESET) if unpacked[1] == "2" else ("step()", STEP)
        count = f"{unpacked[2]} values" if unpacked[2] else "another number of values"
        return f"its {method} returned {count}; {rule}; {PORT}"
    return None


def checked_step(result: Any) -> tuple[Any, Any, Any, Any, Any]:
    """Return what a step gave. Raise `MisbehaviorError` unless it is five things."""
    if not isinstance(result, (tuple, list)) or len(result) != 5:
        count = f"{len(result)} values" if isinstance(result, (tuple, list)) else type(result).__name__
        raise MisbehaviorError(f"its step() returned {count}; {STEP}; {PORT}")
    return tuple(result)


def reward_of(given: Any, agents: tuple[int, ...]) -> Any:
    """Return a reward as it is stored: one number, or one for each agent. An array of one number counts as that number.
    Raise `MisbehaviorError` for anything else."""
    try:
        reward = np.asarray(given if given is not None else "None", np.float64)
    except (TypeError, ValueError):
        raise MisbehaviorError(f"its reward is {given!r}; rewards must be finite numbers") from None
    if not np.isfinite(reward).all():
        raise MisbehaviorError(f"its reward is {given}; rewards must be finite numbers")
    if reward.size == 1:
        return reward.item()
    if reward.shape != agents:
        meant = f"one number, or {agents[0]} of them: one for each agent" if agents else "one number"
        raise MisbehaviorError(f"its reward has shape {reward.shape}; it must be {meant}")
    return reward


def flag_of(given: Any, name: str) -> bool:
    """Return `terminated` or `truncated` as a bool. Raise `MisbehaviorError` if it isn't True or False, or 1 or 0."""
    value = np.asarray(given)
    if value.size != 1 or value.dtype.kind not in "biu" or value.item() not in (0, 1):
        raise MisbehaviorError(f"its {name} is {given!r}; it must be True or False")
    return bool(value.item())

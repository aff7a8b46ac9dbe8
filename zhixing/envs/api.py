"""The rules of the Gymnasium API, which training and `zhixing check` share.

A violation gets one clear message instead of the traceback that it would cause later.
"""

from __future__ import annotations

import re
import traceback
from typing import Any

import gymnasium as gym
import numpy as np

from zhixing.core.action_layout import ActionLayout
from zhixing.errors import EnvCrashError, UserError

RESET = "reset(self, *, seed=None, options=None) must return (obs, info), where info is a dict"
STEP = "step(action) must return (obs, reward, terminated, truncated, info)"
PORT = "port an environment of the old Gym to this API, or wrap it in shimmy.GymV21CompatibilityV0"


class MisbehaviorError(Exception):
    """An environment returned an invalid value. Messages refer to the environment as "its"."""


def check_type(env: Any, name: str) -> None:
    """Raise `UserError` if `env` isn't a `gymnasium.Env`."""
    if isinstance(env, gym.Env):
        return
    old = any(base.__module__.partition(".")[0] == "gym" for base in type(env).__mro__)
    problem = "an environment of the old package gym" if old else "not a gymnasium.Env"
    advice = f"; derive it from gymnasium.Env: {RESET}; {STEP}" if old or hasattr(env, "step") else ""
    raise UserError(f"{name} returned an instance of {type(env).__name__}, {problem}{advice}")


def check_spaces(env: gym.Env[Any, Any], name: str) -> None:
    """Raise `UserError` if a space is missing, or if no policy supports the action space."""
    for attribute in ("observation_space", "action_space"):
        if not isinstance(getattr(env, attribute, None), gym.Space):
            raise UserError(f"{name} has no {attribute}; set it to a gymnasium.spaces.Space in __init__")
    try:
        ActionLayout(env.action_space)
    except UserError as error:
        raise UserError(f"{name}: {error}") from None


def reset_and_check(env: gym.Env[Any, Any], name: str) -> tuple[Any, dict[str, Any]]:
    """Reset an environment for the first time and return its result. Raise `UserError` if the result is invalid."""
    try:
        result: Any = env.reset(seed=0, options=None)
    except Exception as error:
        problem = describe_api_error(error)
        if problem is not None:
            raise UserError(f"{name}: {problem}") from error
        raise EnvCrashError(f"environment {name} crashed at its first reset:\n{traceback.format_exc()}") from error
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)):
        types = ", ".join(type(part).__name__ for part in result) if isinstance(result, tuple) else ""
        returned = f"({types})" if types else type(result).__name__
        raise UserError(f"{name}: its reset() returned {returned}; {RESET}; {PORT}")
    return result


def describe_api_error(error: Exception) -> str | None:
    """Return which rule of the API an environment violated to cause this error, or None if it was another problem."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    module = "" if frame is None else str(frame.tb_frame.f_globals.get("__name__", ""))
    if not module.startswith(("zhixing.", "gymnasium.")):  # raised by the environment itself
        return None
    message = str(error)
    keyword = re.search(r"reset\(\) got an unexpected keyword argument '(seed|options)'", message)
    if isinstance(error, TypeError) and keyword:
        return f"its reset() takes no argument {keyword[1]!r}; {RESET}; {PORT}"
    unpacked = re.search(r"values to unpack \(expected (2|5)(?:, got (\d+))?", message)
    if isinstance(error, ValueError) and unpacked:
        method, rule = ("reset()", RESET) if unpacked[1] == "2" else ("step()", STEP)
        count = f"{unpacked[2]} values" if unpacked[2] else f"a number of values other than {unpacked[1]}"
        return f"its {method} returned {count}; {rule}; {PORT}"
    return None


def check_step_result(result: Any) -> tuple[Any, Any, Any, Any, Any]:
    """Return the result of a step. Raise `MisbehaviorError` if it doesn't have five elements."""
    if not isinstance(result, (tuple, list)) or len(result) != 5:
        returned = f"{len(result)} values" if isinstance(result, (tuple, list)) else type(result).__name__
        raise MisbehaviorError(f"its step() returned {returned}; {STEP}; {PORT}")
    return tuple(result)


def parse_reward(value: Any, agents: tuple[int, ...]) -> Any:
    """Return a reward as it is stored: a number, or an array `[A]` of one per agent.

    An array with a single element counts as a number. Anything else raises `MisbehaviorError`.
    """
    try:
        reward = np.asarray(value if value is not None else "None", np.float64)
    except (TypeError, ValueError):
        raise MisbehaviorError(f"its reward is {value!r}; rewards must be finite numbers") from None
    if not np.isfinite(reward).all():
        raise MisbehaviorError(f"its reward is {value}; rewards must be finite numbers")
    if reward.size == 1:
        return reward.item()
    if reward.shape != agents:
        expected = f"one number, or {agents[0]} numbers, one for each agent" if agents else "one number"
        raise MisbehaviorError(f"its reward has shape {reward.shape}; it must be {expected}")
    return reward


def parse_flag(value: Any, name: str) -> bool:
    """Return `terminated` or `truncated` as a bool. Raise `MisbehaviorError` if it is neither a bool nor 0 or 1."""
    array = np.asarray(value)
    if array.size != 1 or array.dtype.kind not in "biu" or array.item() not in (0, 1):
        raise MisbehaviorError(f"its {name} is {value!r}; it must be True or False")
    return bool(array.item())

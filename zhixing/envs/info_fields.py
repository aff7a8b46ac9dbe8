"""Values of `info` as fields of batches: the option `info_fields`, which every environment accepts."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Mapping
from typing import Any

import gymnasium as gym
import numpy as np

from zhixing.core.spaces import Spaces
from zhixing.core.tree import Field
from zhixing.envs.api import MisbehaviorError, check_step_result
from zhixing.errors import EnvCrashError, UserError

OPTION = "info_fields"  # also the key of their arrays in the `info` of a vector environment, and in `metadata`
Array = np.ndarray[Any, Any]


def check_info_fields(name: str, options: Mapping[str, Any]) -> None:
    """Raise `UserError` if the option is given and isn't a list of keys."""
    keys = options.get(OPTION, [])
    is_list = isinstance(keys, (list, tuple)) and all(isinstance(key, str) and key for key in keys)
    if not is_list or len(set(keys)) < len(keys):
        raise UserError(
            f"{name}: env.{OPTION}={keys!r}: must be a list of different keys of info, such as [success]; leave it out "
            f"if no learner needs them"
        )


def declare(env: gym.Env[Any, Any], keys: Iterable[str]) -> gym.Env[Any, Any]:
    """Declare keys of `info` as fields. An environment can do the same itself, in its `metadata`."""
    env.metadata = {**env.metadata, OPTION: tuple(keys)}
    return env


def infer_fields(env: gym.Env[Any, Any], name: str, spaces: Spaces, mask: Any) -> dict[str, Field]:
    """Return the fields of the declared keys, from a first step. The environment must have been reset."""
    keys = env.metadata.get(OPTION, ())
    check_info_fields(name, {OPTION: keys})
    if not keys:
        return {}
    info = _step(env, name, spaces, mask)
    fields: dict[str, Field] = {}
    for key in keys:
        if key not in info:
            raise UserError(
                f"env.{OPTION}: the first step of {name} returned no {key!r} in info, only "
                f"{', '.join(map(str, info)) or 'nothing'}; name one of these, or return {key!r} in every step"
            )
        value = np.asarray(info[key])
        if value.dtype.kind not in "biuf":
            raise UserError(
                f"env.{OPTION}: info[{key!r}] of {name} is {str(info[key])[:80]!r}; allowed are numbers and arrays of "
                f"numbers; convert it in a wrapper, or leave it out"
            )
        fields[key] = Field(value.shape, np.dtype(np.float32) if value.dtype.kind == "f" else value.dtype)
    return fields


def _step(env: gym.Env[Any, Any], name: str, spaces: Spaces, mask: Any) -> Mapping[str, Any]:
    """Take a random valid action and return its `info`."""
    from zhixing.envs.vector.backend_choice import random_action  # which imports this module

    spaces.action.seed(0)
    action = random_action(spaces, None if mask is None else np.asarray(mask))
    try:
        info: Mapping[str, Any] = check_step_result(env.step(action))[4]
    except MisbehaviorError as error:
        raise UserError(f"{name}: {error}") from None
    except Exception as error:
        raise EnvCrashError(f"environment {name} crashed at its first step:\n{traceback.format_exc()}") from error
    return info


def write_fields(arrays: Mapping[str, Array], row: int, info: Mapping[str, Any]) -> None:
    """Write the declared values of `info` to a row. Raise `MisbehaviorError` for what the arrays can't store."""
    for key, array in arrays.items():
        if key not in info:
            raise MisbehaviorError(f"its info has no {key!r}, which env.{OPTION} declares; return it in every step")
        value = np.asarray(info[key])
        if value.shape != array.shape[1:] or not np.can_cast(value.dtype, array.dtype, "same_kind"):
            raise MisbehaviorError(
                f"its info[{key!r}] is {value.dtype} of shape {value.shape}; in the first step it was {array.dtype} of "
                f"shape {array.shape[1:]}; return the same type in every step"
            )
        array[row] = value

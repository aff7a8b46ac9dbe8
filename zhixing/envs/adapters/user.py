"""User environments: `my.module:MyEnv`, a class or function that returns a gymnasium.Env.

Those that return a gymnasium.vector.VectorEnv are made by `zhixing.envs.vector.constructors`, torch tasks by
`zhixing.envs.torch_native`.
"""

from __future__ import annotations

import sys
import traceback
import typing
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import gymnasium as gym

from zhixing.envs.api import check_type
from zhixing.envs.options import COMMON_OPTIONS, check_options, parameter_names
from zhixing.envs.portable import CopyFactory
from zhixing.errors import UserError
from zhixing.utils import named_objects
from zhixing.utils.importing import import_object

NUM_ENVS = "num_envs"


def names() -> list[str]:
    return []  # user environments can't be listed


def supports(name: str) -> bool:
    return ":" in name or named_objects.is_registered(name)


def own_options(name: str, options: Mapping[str, Any]) -> set[str]:
    return set(COMMON_OPTIONS).intersection(parameter_names(import_object(name)))


def make(name: str, options: dict[str, Any]) -> gym.Env[Any, Any]:
    constructor = import_object(name)
    if not callable(constructor):
        raise UserError(
            f"{name} is a {type(constructor).__name__}, not a class or function that returns a gymnasium.Env"
        )
    if makes_vectors(constructor) or is_torch_task(constructor):
        raise UserError(
            f"{name} makes environments that step together, but this needs a gymnasium.Env; train with "
            f"vector.backend=auto, and use a gymnasium.Env for checks and searches"
        )
    options = dict(options)
    is_game = hasattr(constructor, "as_env")  # zhixing.search.BoardGame
    render_mode = {"render_mode": options.pop("render_mode", None)} if is_game else {}
    check_options(name, constructor, options)
    try:
        made: Any = constructor(**options)
        env: gym.Env[Any, Any] = made.as_env(**render_mode) if is_game else made
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{name} can't be made with options {options}:\n{traceback.format_exc()}") from error
    check_type(env, name)
    return env


def makes_vectors(constructor: Any) -> bool:
    """Return whether an object of a user makes vector environments. It isn't called to find out.

    A function does if its return annotation is a vector environment, or if it has a parameter `num_envs` and no such
    annotation.
    """
    if isinstance(constructor, CopyFactory):
        return isinstance(constructor.env, gym.vector.VectorEnv)
    if isinstance(constructor, type):
        return issubclass(constructor, gym.vector.VectorEnv)
    result = None
    with suppress(Exception):  # annotations may name what can't be imported
        result = typing.get_type_hints(constructor).get("return")
    result = typing.get_origin(result) or result
    if isinstance(result, type) and issubclass(result, (gym.Env, gym.vector.VectorEnv)):
        return issubclass(result, gym.vector.VectorEnv)
    return callable(constructor) and NUM_ENVS in parameter_names(constructor)


def is_torch_task(constructor: Any) -> bool:
    """Return whether an object of a user is a task for the back end torch. Doesn't import torch."""
    module = sys.modules.get("zhixing.envs.torch_native.env")
    return module is not None and isinstance(constructor, type) and issubclass(constructor, module.TorchEnv)

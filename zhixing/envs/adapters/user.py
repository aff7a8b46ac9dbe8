"""User environments: `my.module:MyEnv`, a class or function that returns a gymnasium.Env."""

from __future__ import annotations

import traceback
from typing import Any

import gymnasium as gym

from zhixing.envs.api import check_type
from zhixing.envs.options import check_options, parameter_names
from zhixing.envs.wrappers.time_limit import OPTION, limit_steps
from zhixing.errors import UserError
from zhixing.utils import named_objects
from zhixing.utils.importing import import_object


def names() -> list[str]:
    return []  # user environments can't be listed


def supports(name: str) -> bool:
    return ":" in name or named_objects.is_registered(name)


def make(name: str, options: dict[str, Any]) -> gym.Env[Any, Any]:
    constructor = import_object(name)
    if not callable(constructor):
        raise UserError(
            f"{name} is a {type(constructor).__name__}, not a class or function that returns a gymnasium.Env"
        )
    options = dict(options)
    has_own_limit = OPTION in parameter_names(constructor)
    limit = None if has_own_limit else options.pop(OPTION, None)
    check_options(name, constructor, options, extra=(OPTION,))
    try:
        env = constructor(**options)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{name} can't be made with options {options}:\n{traceback.format_exc()}") from error
    check_type(env, name)
    return limit_steps(env, limit)

"""A user's own task: `my.module:MyEnv`, a class or function that gives a gymnasium.Env."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from types import ModuleType
from typing import Any

import gymnasium as gym

from zhixing.envs.options import check_options
from zhixing.errors import UserError, unknown


def names() -> list[str]:
    return []  # they are found by importing, not listed


def knows(name: str) -> bool:
    return ":" in name


def make(name: str, options: dict[str, Any]) -> gym.Env[Any, Any]:
    module_name, _, attribute = name.partition(":")
    module = _import(name, module_name)
    if not hasattr(module, attribute):
        public = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise unknown(f"environment in module {module_name}:", attribute, public)
    constructor = getattr(module, attribute)
    if not callable(constructor):
        raise UserError(f"{name} is a {type(constructor).__name__}, not a class or function that gives a gymnasium.Env")
    check_options(name, constructor, options)
    try:
        env = constructor(**options)
    except Exception as error:
        raise UserError(f"{name} can't be made with options {options}:\n{traceback.format_exc()}") from error
    if not isinstance(env, gym.Env):
        raise UserError(f"{name} gives a {type(env).__name__}, not a gymnasium.Env")
    return env


def _import(name: str, module_name: str) -> ModuleType:
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)  # an installed command doesn't look where it is called, unlike `python script.py`
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise UserError(f"{name}: its module can't be imported:\n{traceback.format_exc()}") from error
        raise UserError(f"{name}: there is no module {error.name!r}, neither in {here} nor installed") from error
    except Exception as error:
        raise UserError(f"{name}: its module can't be imported:\n{traceback.format_exc()}") from error

"""What a user names as `my.module:Thing`: a task, a network, an algorithm. Free of torch."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from typing import Any

from zhixing.errors import UserError, unknown

known: set[str] = set()  # what was imported in this process, so that somebody must have named it


def child_environment() -> dict[str, str]:
    """For a process of ours: what can be imported here can be imported there."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path)}


def imported(name: str) -> Any:
    """The thing that `my.module:Thing` names; modules in the current folder are found, too."""
    known.add(name)
    module_name, _, attribute = name.partition(":")
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)  # an installed command doesn't look where it is called, unlike `python script.py`
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise UserError(f"{name}: its module can't be imported:\n{traceback.format_exc()}") from error
        raise UserError(f"{name}: there is no module {error.name!r}, neither in {here} nor installed") from error
    except Exception as error:
        raise UserError(f"{name}: its module can't be imported:\n{traceback.format_exc()}") from error
    if not hasattr(module, attribute):
        public = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise unknown(f"name in module {module_name}:", attribute, public)
    return getattr(module, attribute)

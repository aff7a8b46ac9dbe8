"""Objects given in Python, as in `zx.train("ppo", env=MyEnv, net=MyNet)`, and the names for them in settings.

A run's configuration is text. An object that other processes can import is recorded as `module:Name`. Any other object
(defined in a script or notebook, a lambda, an instance) is registered here, in memory. Its name is only a label: a run
that contains it can be loaded only where the object is given again. This module doesn't import torch.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from importlib.util import find_spec
from typing import Any

FILE_MODULE = "_file_"  # prefix of the names of modules that `importing` reads from a file

_objects: dict[str, Any] = {}  # by name


def register_object(given: Any, label: str | None = None) -> str:
    """Return the name of an object, and register it under this name if it can't be imported.

    A `label` is the name for an object that can't be imported.
    """
    module = getattr(given, "__module__", None) or type(given).__module__
    qualname = getattr(given, "__qualname__", None)
    if label is None and qualname is not None and _is_importable(given, module, qualname):
        return f"{sys.modules[module].__file__ if module.startswith(FILE_MODULE) else module}:{qualname}"
    name = f"{module}:{qualname or type(given).__qualname__}" if label is None else label
    if "<" in name or label is not None:  # names of lambdas and instances aren't unique: append a number
        number = 2
        while _objects.get(name, given) != given:
            name, number = f"{name.partition('#')[0]}#{number}", number + 1
    _objects[name] = given  # a class that a notebook defines again replaces the previous one
    return name


def register_as(name: str, given: Any) -> None:
    """Let a name from a run's configuration refer to this object."""
    _objects[name] = given


def is_registered(name: str) -> bool:
    return name in _objects


def get_object(name: str) -> Any:
    return _objects[name]


def registered_names() -> set[str]:
    return set(_objects)


def is_python_only(name: str) -> bool:
    """Return whether a name refers to an object that can't be imported."""
    return name.startswith("__main__:") or re.search(r":.*(<|\(\.\.\.\))", name) is not None


def select_objects(names: Iterable[str]) -> dict[str, Any]:
    """Return the registered objects among these names."""
    return {name: _objects[name] for name in names if name in _objects}


def _is_importable(given: Any, module: str, qualname: str) -> bool:
    if module == "__main__" or "<" in qualname:
        return False
    imported: Any = sys.modules.get(module)
    for part in qualname.split("."):
        imported = getattr(imported, part, None)
    try:
        return imported is given and find_spec(module) is not None
    except (ImportError, ValueError):  # the module was created at run time
        return False

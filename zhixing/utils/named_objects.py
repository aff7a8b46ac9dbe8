"""Classes, functions and environments that were given as Python objects, and the names that stand for them in settings.

`zx.train("ppo", env=MyEnv, net=MyNet)` takes objects; a run's configuration is text. An object that another process can
import is recorded as `module:Name`. Any other one (from a script or a notebook, a lambda, an instance) stays here, and
its name says only what it was: a run that names it can be loaded where the object is given again, and nowhere else.
Free of torch.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from importlib.util import find_spec
from typing import Any

_objects: dict[str, Any] = {}  # by name


def register_object(given: Any, label: str | None = None) -> str:
    """Return the name that stands for an object. With a `label` it is one that can't be imported."""
    module = getattr(given, "__module__", None) or type(given).__module__
    qualname = getattr(given, "__qualname__", None)
    if label is None and qualname is not None and _can_be_imported(given, module, qualname):
        return f"{module}:{qualname}"
    name = f"{module}:{qualname or type(given).__qualname__}" if label is None else label
    if "<" in name or label is not None:  # lambdas and instances have no name of their own: others may be there already
        number = 2
        while _objects.get(name, given) != given:
            name, number = f"{name.partition('#')[0]}#{number}", number + 1
    _objects[name] = given  # a class that a notebook defines again is the new one
    return name


def register_as(name: str, given: Any) -> None:
    """Let a name that is recorded in a run stand for this object."""
    _objects[name] = given


def is_registered(name: str) -> bool:
    return name in _objects


def get_object(name: str) -> Any:
    return _objects[name]


def registered_names() -> set[str]:
    return set(_objects)


def is_python_only(name: str) -> bool:
    """Whether a name is of an object that can't be imported."""
    return name.startswith("__main__:") or re.search(r":.*(<|\(\.\.\.\))", name) is not None


def select_objects(names: Iterable[str]) -> dict[str, Any]:
    """Return those of the names that stand for given objects, with the objects."""
    return {name: _objects[name] for name in names if name in _objects}


def _can_be_imported(given: Any, module: str, qualname: str) -> bool:
    if module == "__main__" or "<" in qualname:
        return False
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        found = getattr(found, part, None)
    try:
        return found is given and find_spec(module) is not None
    except (ImportError, ValueError):  # made at run time
        return False

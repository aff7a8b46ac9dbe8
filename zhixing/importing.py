"""The one place where a name becomes an import: `my.module:Thing` for an environment, a network or an algorithm.

A name may come from the user (command line, Python) or from a file that somebody else wrote: the configuration of a
run, a crash capsule, the manifest of a dataset. Names from a file pass two gates:

1. `check_names(values, trust)` finds every name in the file's values and rejects those that nobody approved.
2. `restricted_to(names)` surrounds whatever is then built from the file. Inside, `imported` and `import_package` accept
   only these names. A new setting that leads to an import can't bypass the first gate: it fails at the second.

Rules for code that imports by name: call `imported("my.module:Thing")` for an attribute of a module, and
`import_package("package")` or `import_package("package:Id-v0")` for a package that registers environments. Never call
`importlib.import_module`, `eval`, `pickle` or `gym.make("module:Id")` with text that can come from a file. A setting
that holds bare package names must be called `import` or `imports`: `names_in` finds it by that key. Free of torch.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from zhixing.errors import UserError, unknown

OBJECT = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", re.ASCII)  # my.module:Thing
PACKAGE = re.compile(r"[A-Za-z_][\w.]*(:[\w./-]+)?", re.ASCII)  # package, or Gymnasium's package:Id-v0
NAMED = ("algorithm", "env", "name", "kind")  # settings in which anything with a colon names code
PACKAGES = ("import", "imports")  # settings that list packages
ADDRESS = "address"  # of a Ray cluster, whose processes send pickles
POLICY = "ZHIXING_ALLOWED_IMPORTS"  # an environment variable, so worker processes inherit the restriction
STARTED_IN = os.getcwd()  # an environment may change the current folder later

known: set[str] = set()  # names imported by this process or one of its workers: somebody approved them already


def child_environment() -> dict[str, str]:
    """For a process of ours: what can be imported here can be imported there."""
    here = [os.getcwd(), STARTED_IN]  # what an empty entry means, or meant
    entries = [part for entry in sys.path for part in ([entry] if entry else here)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(entries)}


# --- the gates ---


def names_in(values: Any, key: str = "") -> set[str]:
    """Return all strings in a tree of settings that lead to an import, or to a cluster that this process would obey."""
    if isinstance(values, Mapping):
        return {name for k, value in values.items() for name in names_in(k) | names_in(value, str(k))}
    if isinstance(values, (list, tuple, set, frozenset)):
        return {name for value in values for name in names_in(value, key)}
    if not isinstance(values, str):
        return set()
    by_key = key in PACKAGES or key == ADDRESS or (key in NAMED and ":" in values)
    return {values} if by_key or OBJECT.fullmatch(values) else set()


def check_names(values: Any, trust: bool | Iterable[str] = False) -> set[str]:
    """Return the names in a file's values, for `restricted_to`. Raise `UserError` if one isn't approved: `trust` is the
    names that are, or true for all. Names imported earlier in this process are approved, too."""
    names = names_in(values)
    if trust is True or os.environ.get("ZHIXING_TRUST") == "1":
        return names
    approved = known | set(trust or ())
    if not names <= approved:
        unapproved = ", ".join(sorted(names - approved))
        raise UserError(
            f"it names code to import (or a cluster to join): {unapproved[:300]}; import nothing from people you don't "
            f"trust; if you trust it, say so with --trust"
        )
    return names


@contextmanager
def restricted_to(names: Iterable[str] | None) -> Iterator[None]:
    """Allow only these names to be imported in this process and in those it starts; None changes nothing."""
    before = os.environ.get(POLICY)
    if names is not None:
        os.environ[POLICY] = json.dumps(sorted(names))
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(POLICY, None)
        else:
            os.environ[POLICY] = before


def check_allowed(name: str) -> None:
    """Raise `UserError` if the restriction in force, if any, doesn't allow this name."""
    policy = os.environ.get(POLICY)
    if policy is not None and name not in known and name not in json.loads(policy):
        raise UserError(f"{name!r} comes from a file, and nobody approved it: it isn't imported")


# --- imports ---


def imported(name: str) -> Any:
    """The thing that `my.module:Thing` names; modules in the current folder are found, too."""
    if not isinstance(name, str) or not OBJECT.fullmatch(name):
        raise UserError(f"{str(name)[:200]!r} names no code; write your.module:Name, such as my_envs:Room")
    check_allowed(name)
    module_name, _, attribute = name.partition(":")
    module = _import(module_name, name)
    if not hasattr(module, attribute):
        public = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise unknown(f"name in module {module_name}:", attribute, public)
    known.add(name)
    return getattr(module, attribute)


def import_package(name: str) -> ModuleType:
    """Import a package for what it registers: `package`, or that of `package:Id-v0`."""
    if not isinstance(name, str) or not PACKAGE.fullmatch(name):
        raise UserError(f"{str(name)[:200]!r} names no package; write its name, or package:Id-v0")
    check_allowed(name)
    module = _import(name.partition(":")[0], name)
    known.add(name)
    return module


def _import(module_name: str, name: str) -> ModuleType:
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

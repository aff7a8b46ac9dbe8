"""The one place where a name becomes an import: `my.module:Thing` for an environment, a network or an algorithm.

A name may come from the user (command line, Python) or from a file that somebody else wrote: the configuration of a
run, a crash report, the manifest of a dataset. Names from a file pass two gates:

1. `check_names(values, trust)` finds every name in the file's values and rejects those that nobody approved.
2. `restricted_to(names)` surrounds whatever is then built from the file. Inside, `import_object` and `import_package`
   accept only these names. A new setting that leads to an import can't bypass the first gate: it fails at the second.

Rules for code that imports by name: call `import_object("my.module:Thing")` for an attribute of a module, and
`import_package("package")` or `import_package("package:Id-v0")` for a package that registers environments. Never call
`importlib.import_module`, `eval`, `pickle` or `gym.make("module:Id")` with text that can come from a file. A setting
that holds bare package names must be called `import` or `imports`: `names_in` finds it by that key. Free of torch.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
import os
import re
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle  # type: ignore[import-untyped]

from zhixing.errors import UserError, unknown
from zhixing.utils import named_objects

OBJECT = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*", re.ASCII)  # my.module:Thing
FILE = re.compile(r"[^:]*(?::[/\\][^:]*)?\.py:[A-Za-z_][\w.]*", re.DOTALL)  # my_env.py:Thing, or its path before it
PACKAGE = re.compile(r"[A-Za-z_][\w.]*(:[\w./-]+)?", re.ASCII)  # package, or Gymnasium's package:Id-v0
NAMED = ("algorithm", "env", "name", "kind")  # settings in which anything with a colon names code
PACKAGES = ("import", "imports")  # settings that list packages
ADDRESS = "address"  # of a Ray cluster, whose processes send pickles
POLICY = "ZHIXING_ALLOWED_IMPORTS"  # an environment variable, so worker processes inherit the restriction
STARTED_IN = os.getcwd()  # an environment may change the current folder later

_file_folders: set[str] = set()  # that were appended to the path, for modules beside a file
approved: set[str] = set()  # names imported by this process or one of its workers: somebody approved them already


def child_environment() -> dict[str, str]:
    """For a process of ours: what can be imported here can be imported there."""
    here = [os.getcwd(), STARTED_IN]  # what an empty entry means, or meant
    # a folder of single files comes last here, and would come before Python's own modules there
    known_folders = [entry for entry in sys.path if entry not in _file_folders]
    entries = [part for entry in known_folders for part in ([entry] if entry else here)]
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
    return {values} if by_key or OBJECT.fullmatch(values) or FILE.fullmatch(values) else set()


def check_names(values: Any, trust: bool | Iterable[str] = False) -> set[str]:
    """Return the names in a file's values, for `restricted_to`. Raise `UserError` if one isn't approved: `trust` is the
    names that are, or true for all. Names imported earlier in this process are approved, too."""
    names = names_in(values)
    if trust is True or os.environ.get("ZHIXING_TRUST") == "1":
        return names
    allowed = approved | named_objects.registered_names() | set(trust or ())
    if not names <= allowed:
        unapproved = ", ".join(sorted(names - allowed))
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
    if policy is not None and name not in approved and name not in json.loads(policy):
        raise UserError(f"{name!r} comes from a file, and nobody approved it: it isn't imported")


# --- imports ---


def import_object(name: str) -> Any:
    """The thing that `my.module:Thing` or `my_file.py:Thing` names; modules in the current folder are found, too. An
    object that was given in Python is returned for the name that stands for it."""
    if isinstance(name, str) and named_objects.is_registered(name):
        return named_objects.get_object(name)
    if isinstance(name, str) and named_objects.is_python_only(name):
        raise UserError(
            f"{name} was given to Python as an object, and can't be imported here; define it in a module that can be "
            f"imported, or give it again, such as zx.load(run, env=MyEnv) or zx.evaluate(run, env=MyEnv)"
        )
    file = isinstance(name, str) and FILE.fullmatch(name) is not None
    if not file and (not isinstance(name, str) or not OBJECT.fullmatch(name)):
        raise UserError(f"{str(name)[:200]!r} names no code; write your.module:Name, such as my_envs:Room")
    check_allowed(name)
    module_name, _, attribute = name.rpartition(":")
    module = _import_file(Path(module_name), name) if file else _import(module_name, name)
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            public = [key for key, value in vars(found).items() if callable(value) and not key.startswith("_")]
            raise unknown(f"name in module {module_name}:", part, public)
        found = getattr(found, part)
    approved.add(name)
    return found


def absolute(name: str) -> str:
    """Return `/path/to/my_file.py:Thing` for `my_file.py:Thing`, and other names as they are."""
    if not FILE.fullmatch(name):
        return name
    file, _, attribute = name.rpartition(":")
    return f"{Path(file).expanduser().absolute()}:{attribute}"


def import_package(name: str) -> ModuleType:
    """Import a package for what it registers: `package`, or that of `package:Id-v0`."""
    if not isinstance(name, str) or not PACKAGE.fullmatch(name):
        raise UserError(f"{str(name)[:200]!r} names no package; write its name, or package:Id-v0")
    check_allowed(name)
    module = _import(name.partition(":")[0], name)
    approved.add(name)
    return module


def _import_file(file: Path, name: str) -> ModuleType:
    """Import a file that needn't be on the path. Modules beside it can be imported by it."""
    file = file.expanduser().absolute()
    if not file.is_file():
        raise UserError(f"{name}: there is no file {file}")
    key = f"_file_{hashlib.sha256(os.fsencode(file)).hexdigest()[:12]}_{file.stem}"
    if key in sys.modules:
        return sys.modules[key]
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
        _file_folders.add(str(file.parent))
    spec = importlib.util.spec_from_file_location(key, file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[key] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[key]
        if not isinstance(error, Exception):
            raise
        raise UserError(f"{name}: {file} can't be imported:\n{traceback.format_exc()}") from error
    cloudpickle.register_pickle_by_value(module)  # other processes know it by no name
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

"""The only place that imports code by name, such as `my.module:Thing` for an environment, network or algorithm.

A name comes from the user (command line, Python) or from a file that somebody else may have written: a run's
configuration, a crash report, a dataset's manifest. Names from a file pass two checks:

1. `check_names(values, trust)` finds all names in the file's values and rejects those that the user hasn't approved.
2. `restricted_to(names)` is a context in which `import_object` and `import_package` accept only these names. Build
   everything from the file inside it: then a name in a new setting, which `names_in` doesn't find, is still rejected.

Rules for other modules: call `import_object("my.module:Thing")` for an attribute of a module, and
`import_package("package")` or `import_package("package:Id-v0")` for a package that registers environments. Never call
`importlib.import_module`, `eval`, `pickle` or `gym.make("module:Id")` with text that may come from a file. A setting
that contains package names without a colon must be called `import` or `imports`, so `names_in` finds it.

This module doesn't import torch.
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

OBJECT_PATTERN = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*", re.ASCII)  # my.module:Thing
# my_env.py:Thing or /path/to/my_env.py:Thing
FILE_PATTERN = re.compile(r"[^:]*(?::[/\\][^:]*)?\.py:[A-Za-z_][\w.]*", re.DOTALL)
PACKAGE_PATTERN = re.compile(r"[A-Za-z_][\w.]*(:[\w./-]+)?", re.ASCII)  # package, or Gymnasium's package:Id-v0
NAME_KEYS = ("algorithm", "env", "name", "kind")  # settings in which any text with a colon refers to code
PACKAGE_KEYS = ("import", "imports")  # settings with package names
# settings that connect to machines: to a Ray cluster, whose processes send pickles, and to trackers, which get the run
ADDRESS_KEYS = ("address", "wandb", "mlflow")
ALLOWED_NAMES = "ZHIXING_ALLOWED_IMPORTS"  # an environment variable, so worker processes inherit the restriction
INITIAL_FOLDER = os.getcwd()  # an environment may change the current folder later

_file_folders: set[str] = set()  # added to sys.path, so a file can import the modules next to it
approved: set[str] = set()  # names that this process or one of its workers has imported, so the user approved them


def child_environment() -> dict[str, str]:
    """Return the environment variables for a child process that can import the same modules as this process."""
    current_folders = [os.getcwd(), INITIAL_FOLDER]  # what an empty entry of sys.path means now, or meant before
    # leave out folders of single files: in PYTHONPATH they would come before the standard library
    inherited = [entry for entry in sys.path if entry not in _file_folders]
    entries = [folder for entry in inherited for folder in ([entry] if entry else current_folders)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(entries)}


# --- checks ---


def names_in(values: Any, key: str = "") -> set[str]:
    """Return all strings in a tree of settings that refer to code to import, or to machines to connect to."""
    if isinstance(values, Mapping):
        return {name for k, value in values.items() for name in names_in(k) | names_in(value, str(k))}
    if isinstance(values, (list, tuple, set, frozenset)):
        return {name for value in values for name in names_in(value, key)}
    if not isinstance(values, str):
        return set()
    by_key = key in PACKAGE_KEYS or key in ADDRESS_KEYS or (key in NAME_KEYS and ":" in values)
    return {values} if by_key or OBJECT_PATTERN.fullmatch(values) or FILE_PATTERN.fullmatch(values) else set()


def check_names(values: Any, trust: bool | Iterable[str] = False) -> set[str]:
    """Return the names in a file's values, for `restricted_to`; raise `UserError` if one of them isn't approved.

    `trust` contains the approved names, or is true to approve all. Names imported before by this process are approved.
    """
    names = names_in(values)
    if trust is True or os.environ.get("ZHIXING_TRUST") == "1":
        return names
    allowed = approved | named_objects.registered_names() | set(trust or ())
    if not names <= allowed:
        unapproved = ", ".join(sorted(names - allowed))
        raise UserError(
            f"it names code to import (or a machine to connect to): {unapproved[:300]}; import only code that you "
            f"trust; to import this, add --trust"
        )
    return names


@contextmanager
def restricted_to(names: Iterable[str] | None) -> Iterator[None]:
    """Allow only these names to be imported in this process and in those it starts. None means no restriction."""
    before = os.environ.get(ALLOWED_NAMES)
    if names is not None:
        os.environ[ALLOWED_NAMES] = json.dumps(sorted(names))
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(ALLOWED_NAMES, None)
        else:
            os.environ[ALLOWED_NAMES] = before


def check_allowed(name: str) -> None:
    """Raise `UserError` if this name isn't allowed inside the current `restricted_to`, if any."""
    allowed = os.environ.get(ALLOWED_NAMES)
    if allowed is not None and name not in approved and name not in json.loads(allowed):
        raise UserError(f"{name!r} comes from a file and isn't approved: it can't be imported or connected to")


# --- imports ---


def import_object(name: str) -> Any:
    """Return the object that `my.module:Thing` or `my_file.py:Thing` refers to, or a registered object by its name.

    Modules in the current folder can be imported, too.
    """
    if isinstance(name, str) and named_objects.is_registered(name):
        return named_objects.get_object(name)
    if isinstance(name, str) and named_objects.is_python_only(name):
        raise UserError(
            f"{name} was given in Python as an object, so it can't be imported here; define it in a module that can be "
            f"imported, or pass it again, such as zx.load(run, env=MyEnv), zx.evaluate(run, env=MyEnv) or "
            f"zx.Session.resume(run, trainer=my_trainer)"
        )
    in_file = isinstance(name, str) and FILE_PATTERN.fullmatch(name) is not None
    if not in_file and (not isinstance(name, str) or not OBJECT_PATTERN.fullmatch(name)):
        raise UserError(f"{str(name)[:200]!r} is not a name of code; write your.module:Name, such as my_envs:Room")
    check_allowed(name)
    module_name, _, attribute = name.rpartition(":")
    target: Any = _import_file(Path(module_name), name) if in_file else _import_module(module_name, name)
    for part in attribute.split("."):
        if not hasattr(target, part):
            public = [key for key, value in vars(target).items() if callable(value) and not key.startswith("_")]
            raise unknown(f"name in module {module_name}:", part, public)
        target = getattr(target, part)
    approved.add(name)
    return target


def absolute(name: str) -> str:
    """Return `/path/to/my_file.py:Thing` for `my_file.py:Thing`, and other names as they are."""
    if not FILE_PATTERN.fullmatch(name):
        return name
    file, _, attribute = name.rpartition(":")
    return f"{Path(file).expanduser().absolute()}:{attribute}"


def import_package(name: str) -> ModuleType:
    """Import `package`, or the package of `package:Id-v0`, so it registers its environments."""
    if not isinstance(name, str) or not PACKAGE_PATTERN.fullmatch(name):
        raise UserError(f"{str(name)[:200]!r} is not the name of a package; write package, or package:Id-v0")
    check_allowed(name)
    module = _import_module(name.partition(":")[0], name)
    approved.add(name)
    return module


def _import_file(file: Path, name: str) -> ModuleType:
    """Import a file, which can import the modules in its folder."""
    file = file.expanduser().absolute()
    if not file.is_file():
        raise UserError(f"{name}: there is no file {file}; check the path")
    key = f"{named_objects.FILE_MODULE}{hashlib.sha256(os.fsencode(file)).hexdigest()[:12]}_{file.stem}"
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
    cloudpickle.register_pickle_by_value(module)  # other processes can't import it by name
    return module


def _import_module(module_name: str, name: str) -> ModuleType:
    folder = os.getcwd()
    if folder not in sys.path:
        sys.path.insert(0, folder)  # installed commands don't search the current folder, unlike `python -m`
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise UserError(f"{name}: its module can't be imported:\n{traceback.format_exc()}") from error
        raise UserError(f"{name}: there is no module {error.name!r}, neither in {folder} nor installed") from error
    except Exception as error:
        raise UserError(f"{name}: its module can't be imported:\n{traceback.format_exc()}") from error

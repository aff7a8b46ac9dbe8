"""Tasks of Gymnasium, under their own ids, and those that other packages register with it."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
import warnings
from collections.abc import Iterable
from importlib.util import find_spec
from typing import Any

import gymnasium as gym
from gymnasium.envs.registration import EnvSpec, load_env_creator, parse_env_id, registry

from zhixing.envs.adapters import box2d, mujoco_v5
from zhixing.envs.options import check_options, parameters, unknown_option
from zhixing.errors import UserError, unknown
from zhixing.utils import named_objects
from zhixing.utils.extras import missing_extra, require_extra
from zhixing.utils.importing import FILE, OBJECT, import_package

# where a task's code lives -> the extra that brings what it needs
EXTRAS = {
    mujoco_v5.MODULE: "mujoco",
    box2d.MODULE: "box2d",
    "gymnasium.envs.toy_text": "toy-text",
}
# packages that register tasks when they are imported: their extra, and how the ids begin
PLUGINS = {
    "gymnasium_robotics": ("robotics", ("Fetch", "Hand", "Adroit", "FrankaKitchen", "PointMaze", "AntMaze")),
}
# JAX versions of other tasks; doors to the old Gym; what has an adapter of its own
HIDDEN = ("phys2d/", "tabular/", "GymV", "ALE/")


# packages that register environments only when they are asked to: their module with `register_envs`
REGISTRARS = {"minatar": "minatar.gym"}
imported_packages: list[str] = []  # those that the user asked for, in their order


def names() -> list[str]:
    """Ids that can be made, with their extra installed; only the newest version of each."""
    for package in PLUGINS:
        if find_spec(package) is not None:
            importlib.import_module(package)
    newest: dict[tuple[str | None, str], EnvSpec] = {}
    for spec in registry.values():
        known = newest.get((spec.namespace, spec.name))
        if not spec.id.startswith(HIDDEN) and (known is None or (spec.version or 0) > (known.version or 0)):
            newest[spec.namespace, spec.name] = spec
    return sorted(spec.id for spec in newest.values())


def supports(name: str) -> bool:
    """Also other versions of what there is: `make` then names the right one."""
    if name not in registry:
        _plug_in(name)
    return not name.startswith(HIDDEN) and (name in registry or _current(name) is not None)


def make(name: str, options: dict[str, Any]) -> gym.Env[Any, Any]:
    current = _current(name)
    if name not in registry:
        raise UserError(f"there is no {name}; the current version is {current!r}")
    spec = registry[name]
    further = ("max_episode_steps", *(mujoco_v5.OPTIONS if mujoco_v5.is_mujoco(name) else ()))
    try:
        creator = spec.entry_point if callable(spec.entry_point) else load_env_creator(str(spec.entry_point))
        check_options(name, creator, options, extra=further)
        if mujoco_v5.is_mujoco(name):
            return mujoco_v5.make(name, options)
        env = gym.make(name, disable_env_checker=True, **options)
        return box2d.FreshWorld(env) if str(spec.entry_point).startswith(box2d.MODULE) else env
    except gym.error.DependencyNotInstalled as error:
        raise missing_package(name, error) from error
    except ImportError as error:
        # tasks on mujoco-py have left Gymnasium, but their ids are still there
        advice = f"; the current version is {current!r}" if current != name else ""
        raise UserError(f"{name} can't be made: {error}{advice}") from error
    except UserError:
        raise
    except Exception as error:
        # constructors with open keywords tell of a wrong one only when they pass it on
        unexpected = re.search(r"unexpected keyword argument '(\w+)'", str(error))
        if isinstance(error, TypeError) and unexpected and unexpected[1] in options:
            raise unknown_option(name, unexpected[1], [*parameters(creator)[0], *further]) from error
        given = ", ".join(f"{key}={value!r}" for key, value in options.items())
        raise UserError(f"{name} can't be made with ({given}): {type(error).__name__}: {error}") from error


def import_packages(packages: Iterable[str]) -> None:
    """Import packages that register environments with Gymnasium."""
    for package in packages:
        if package not in imported_packages:
            _register(package)
            imported_packages.append(package)


def _register(name: str) -> None:
    """Import the package of `package` or `package:Id-v0`, and let it register its environments."""
    module = import_package(name)
    package, _, wanted = name.partition(":")
    if package in REGISTRARS:
        module = importlib.import_module(REGISTRARS[package])
    register = getattr(module, "register_envs", None)
    if inspect.isfunction(register) and wanted not in registry and not inspect.signature(register).parameters:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of ids that it has registered before
            register()


def id_in(name: str) -> str | None:
    """Return the Gymnasium id in `package:Id-v0`, once the package is imported; None for `my.module:MyEnv`."""
    package, sign, wanted = name.partition(":")
    if not sign or FILE.fullmatch(name) or named_objects.is_registered(name) or named_objects.is_python_only(name):
        return None
    is_object = OBJECT.fullmatch(name) is not None
    if is_object and hasattr(import_package(name), wanted.partition(".")[0]):
        return None
    _register(name)
    if is_object and wanted not in registry:
        return None
    if wanted not in registry and _current(wanted) is None:
        its = [spec.id for spec in registry.values() if module_of(spec).partition(".")[0] == package.partition(".")[0]]
        raise unknown(f"environment of {package}:", wanted, its)
    return wanted


def module_of(spec: EnvSpec) -> str:
    """Return the name of the module that an environment's code is in."""
    entry_point = spec.entry_point
    return (
        entry_point.partition(":")[0] if isinstance(entry_point, str) else str(getattr(entry_point, "__module__", ""))
    )


def registered_elsewhere(name: str) -> bool:
    """Whether another process has to be told of this id: neither Gymnasium nor an adapter registers it there."""
    return name in registry and module_of(registry[name]).partition(".")[0] not in ("gymnasium", "ale_py", *PLUGINS)


def registering_module(name: str) -> str | None:
    """Return the module that is to be imported for this id to be known; None where none is, or where none is known."""
    if not registered_elsewhere(name):
        return None
    module = module_of(registry[name])
    return module if module in sys.modules and module != "__main__" else None


def _plug_in(name: str) -> None:
    """Import the package that registers this task, if one of those known does."""
    for package, (extra, beginnings) in PLUGINS.items():
        if name.startswith(beginnings):
            with require_extra(name, extra):
                importlib.import_module(package)


def missing_package(name: str, error: Exception) -> UserError:
    """The one sentence for a task whose package isn't installed."""
    where = str(registry[name].entry_point) if name in registry else ""
    for module, extra in EXTRAS.items():
        if where.startswith(module):
            return missing_extra(name, extra)
    return UserError(f"{name} needs a package that isn't installed: {error}")


def _current(name: str) -> str | None:
    """The id of the newest version of this task."""
    try:
        namespace, base, _ = parse_env_id(name)
    except gym.error.Error:
        return None
    same = [spec for spec in registry.values() if (spec.namespace, spec.name) == (namespace, base)]
    return max(same, key=lambda spec: spec.version or 0).id if same else None

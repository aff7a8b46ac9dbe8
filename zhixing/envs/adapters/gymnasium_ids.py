"""Gymnasium's environments under their ids, including those that other packages register."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
import warnings
from collections.abc import Iterable
from contextlib import suppress
from importlib.util import find_spec
from typing import Any

import gymnasium as gym
from gymnasium.envs.registration import EnvSpec, load_env_creator, parse_env_id, registry

from zhixing.envs.adapters import box2d, mujoco_v5
from zhixing.envs.options import COMMON_OPTIONS, check_options, parameter_names, unknown_option
from zhixing.errors import UserError, unknown
from zhixing.utils import named_objects
from zhixing.utils.extras import missing_extra, require_extra
from zhixing.utils.importing import FILE_PATTERN, OBJECT_PATTERN, import_package

# module of an environment -> the extra that installs its dependencies
EXTRAS = {
    mujoco_v5.MODULE: "mujoco",
    box2d.MODULE: "box2d",
    "gymnasium.envs.toy_text": "toy-text",
}
# packages that register environments on import -> their extra and the prefixes of their ids
PLUGINS = {
    "gymnasium_robotics": ("robotics", ("Fetch", "Hand", "Adroit", "FrankaKitchen", "PointMaze", "AntMaze")),
}
# ids that aren't listed: JAX versions of other environments, wrappers of the old Gym, and Atari, which has an adapter
HIDDEN = ("phys2d/", "tabular/", "GymV", "ALE/")
# packages that don't register environments on import -> their module with `register_envs`
REGISTRARS = {"minatar": "minatar.gym"}
imported_packages: list[str] = []  # requested by the user, in order


def names() -> list[str]:
    """Return the newest version of each id, including those whose extra isn't installed."""
    for package in PLUGINS:
        if find_spec(package) is not None:
            importlib.import_module(package)
    newest: dict[tuple[str | None, str], EnvSpec] = {}
    for spec in registry.values():
        previous = newest.get((spec.namespace, spec.name))
        if not spec.id.startswith(HIDDEN) and (previous is None or (spec.version or 0) > (previous.version or 0)):
            newest[spec.namespace, spec.name] = spec
    return sorted(spec.id for spec in newest.values())


def supports(name: str) -> bool:
    """Accept also unknown versions of a registered id; `make` then names the newest version."""
    if name not in registry:
        _import_plugin(name)
    return not name.startswith(HIDDEN) and (name in registry or _newest_version(name) is not None)


def own_options(name: str, options: dict[str, Any]) -> set[str]:
    """Return the common options that `gymnasium.make`, the images of MuJoCo or the environment's class implement."""
    if name not in registry:
        return set()
    parameters: list[str] = []
    with suppress(Exception):  # `make` reports what is wrong
        parameters = parameter_names(_creator(registry[name]))
    own = set(COMMON_OPTIONS).intersection(parameters)
    return (
        {"max_episode_steps"} | own | ({"stack", "action_repeat"} if mujoco_v5.makes_images(name, options) else set())
    )


def make(name: str, options: dict[str, Any]) -> gym.Env[Any, Any]:
    newest = _newest_version(name)
    if name not in registry:
        raise UserError(f"there is no {name}; the newest version is {newest!r}")
    spec = registry[name]
    extra_options = ("max_episode_steps", *(mujoco_v5.OPTIONS if mujoco_v5.is_mujoco(name) else ()))
    try:
        creator = _creator(spec)
        check_options(name, creator, options, extra=extra_options)
        if mujoco_v5.is_mujoco(name):
            return mujoco_v5.make(name, options)
        env = gym.make(name, disable_env_checker=True, **options)
        return box2d.FreshWorld(env) if str(spec.entry_point).startswith(box2d.MODULE) else env
    except gym.error.DependencyNotInstalled as error:
        raise missing_package_error(name, error) from error
    except ImportError as error:
        # Gymnasium still registers the removed mujoco-py environments
        advice = f"; the newest version is {newest!r}" if newest != name else ""
        raise UserError(f"{name} can't be made: {error}{advice}") from error
    except UserError:
        raise
    except Exception as error:
        # a constructor with **kwargs rejects an unknown option only when it passes it on
        unexpected = re.search(r"unexpected keyword argument '(\w+)'", str(error))
        if isinstance(error, TypeError) and unexpected and unexpected[1] in options:
            raise unknown_option(name, unexpected[1], [*parameter_names(creator), *extra_options]) from error
        given = ", ".join(f"{key}={value!r}" for key, value in options.items())
        raise UserError(f"{name} can't be made with ({given}): {type(error).__name__}: {error}") from error


def _creator(spec: EnvSpec) -> Any:
    return spec.entry_point if callable(spec.entry_point) else load_env_creator(str(spec.entry_point))


def import_packages(packages: Iterable[str]) -> None:
    """Import packages that register environments with Gymnasium, each once."""
    for package in packages:
        if package not in imported_packages:
            _import_and_register(package)
            imported_packages.append(package)


def _import_and_register(name: str) -> None:
    """Import the package of `package` or `package:Id-v0`, and call its `register_envs` if necessary."""
    module = import_package(name)
    package, _, env_id = name.partition(":")
    if package in REGISTRARS:
        module = importlib.import_module(REGISTRARS[package])
    register = getattr(module, "register_envs", None)
    if inspect.isfunction(register) and env_id not in registry and not inspect.signature(register).parameters:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about ids that are already registered
            register()


def resolve_id(name: str) -> str | None:
    """Import the package of `package:Id-v0` and return the id; return None for `my.module:MyEnv` and other names."""
    package, colon, env_id = name.partition(":")
    if (
        not colon
        or FILE_PATTERN.fullmatch(name)
        or named_objects.is_registered(name)
        or named_objects.is_python_only(name)
    ):
        return None
    is_object = OBJECT_PATTERN.fullmatch(name) is not None
    if is_object and hasattr(import_package(name), env_id.partition(".")[0]):
        return None
    _import_and_register(name)
    if is_object and env_id not in registry:
        return None
    if env_id not in registry and _newest_version(env_id) is None:
        root = package.partition(".")[0]
        package_ids = [spec.id for spec in registry.values() if entry_module(spec).partition(".")[0] == root]
        raise unknown(f"environment of {package}:", env_id, package_ids)
    return env_id


def entry_module(spec: EnvSpec) -> str:
    """Return the name of the module that contains an environment's code."""
    entry_point = spec.entry_point
    return (
        entry_point.partition(":")[0] if isinstance(entry_point, str) else str(getattr(entry_point, "__module__", ""))
    )


def is_third_party(name: str) -> bool:
    """Return whether neither Gymnasium nor an adapter registers this id, so worker processes don't know it."""
    return name in registry and entry_module(registry[name]).partition(".")[0] not in ("gymnasium", "ale_py", *PLUGINS)


def registering_module(name: str) -> str | None:
    """Return the module to import so that this id is registered; None if none is needed or none is known."""
    if not is_third_party(name):
        return None
    module = entry_module(registry[name])
    return module if module in sys.modules and module != "__main__" else None


def _import_plugin(name: str) -> None:
    """Import the plugin that registers this id, if there is one."""
    for package, (extra, prefixes) in PLUGINS.items():
        if name.startswith(prefixes):
            with require_extra(name, extra):
                importlib.import_module(package)


def missing_package_error(name: str, error: Exception) -> UserError:
    """Return the error for an environment whose package isn't installed."""
    entry_point = str(registry[name].entry_point) if name in registry else ""
    for module, extra in EXTRAS.items():
        if entry_point.startswith(module):
            return missing_extra(name, extra)
    return UserError(f"{name} needs a package that isn't installed: {error}")


def _newest_version(name: str) -> str | None:
    """Return the newest version of an id, or None if no version is registered."""
    try:
        namespace, base, _ = parse_env_id(name)
    except gym.error.Error:
        return None
    versions = [spec for spec in registry.values() if (spec.namespace, spec.name) == (namespace, base)]
    return max(versions, key=lambda spec: spec.version or 0).id if versions else None

"""Configuration: typed, strict and complete. What isn't a setting is refused, with the nearest right name.

Later words win: defaults, preset of the algorithm for the task, files in their order, overrides in theirs.
The settings of an algorithm stand beside it, as a class derived from `OnPolicyConfig` or `OffPolicyConfig`.
"""

from __future__ import annotations

import fnmatch
import functools
import os
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from zhixing.config.other_libraries import OTHER_NAMES
from zhixing.config.schema import SHORT, OffPolicyConfig, RunConfig
from zhixing.config.yaml_files import parse_yaml, read_yaml
from zhixing.errors import UserError, unknown
from zhixing.utils import importing, named_objects


def parse_overrides(words: Sequence[str]) -> dict[str, Any]:
    """Return `["lr=3e-4", "num_envs=8"]` as nested settings."""
    values: dict[str, Any] = {}
    for word in words:
        key, sign, text = word.partition("=")
        if not sign or not key or key.startswith("-"):
            raise UserError(
                f"{word!r} is no setting; write name=value, for example lr=3e-4 or num_envs=8 "
                f"(environments are named by --env)"
            )
        values = merge(values, nest(key, parse_yaml(text, f"the value of {key!r}")))
    return values


def nest(key: str, value: Any) -> dict[str, Any]:
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


def merge(base: dict[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` on top of `base`, key by key; a task given by name takes options later."""
    merged = dict(base)
    for key, value in over.items():
        mine = merged.get(key)
        if key in SHORT:
            mine, value = ({SHORT[key]: part} if isinstance(part, str) else part for part in (mine, value))
        if key == "env":
            # another task doesn't inherit the options of the one before
            named = [part.get("name") for part in (mine, value) if isinstance(part, dict)]
            if None not in named and named[1:] not in ([], named[:1]):
                mine = None
        if isinstance(value, dict) and mine is not None and not isinstance(mine, dict):
            first = next(iter(value), "...")
            raise UserError(f"{key}={mine!r} and {key}.{first} can't both be set: {key} is a group of settings")
        merged[key] = merge(mine, value) if isinstance(mine, dict) and isinstance(value, dict) else value
    return merged


def preset(algorithm: str, env: str) -> dict[str, Any]:
    """The tuned settings of an algorithm for a task, or none. Presets are `presets/<algorithm>.yaml`, by task."""
    name = preset_name(algorithm, env)
    return {} if name is None else dict(presets(algorithm)[name])


def preset_name(algorithm: str, env: str) -> str | None:
    """Return the pattern of environments whose preset counts for this one, or None where there is none."""
    env = env.rpartition(":")[2]  # of package:Id-v0 the id counts
    return next((pattern for pattern in presets(algorithm) if fnmatch.fnmatchcase(env, pattern)), None)


@functools.cache
def presets(algorithm: str) -> dict[str, dict[str, Any]]:
    file = resources.files("zhixing.config") / "presets" / f"{algorithm}.yaml"
    if ":" in algorithm or "/" in algorithm or not file.is_file():
        return {}
    return parse_yaml(file.read_text(encoding="utf-8"), f"preset {algorithm}") or {}


def load(*files: str | Path, **overrides: Any) -> RunConfig:
    """Read configuration files, in order, and settings by name on top of them (`num_envs=8` or a dict)."""
    return build([read_yaml(Path(file)) for file in files], nested(overrides))


def nested(named: Mapping[str, Any]) -> dict[str, Any]:
    """`num_envs` and the like as groups of settings."""
    values: dict[str, Any] = {}
    for key, value in named.items():
        *_, last = key.split("__")
        values = merge(values, nest(key.replace("__", "."), _without_objects(last, value)))
    return values


def _without_objects(key: str, value: Any) -> Any:
    """The names of classes, functions and environments in the place of these."""
    if isinstance(value, Mapping):
        parts = {name: _without_objects(key if name == SHORT.get(key) else name, part) for name, part in value.items()}
        # an environment may have become its name and options
        return {**parts.pop("name"), **parts} if isinstance(parts.get("name"), Mapping) else parts
    if value is None or isinstance(value, (str, int, float, list, tuple, Path)):
        return value
    if key == "env":
        from zhixing.envs.portable import env_settings

        return env_settings(value)
    return named_objects.register_object(value) if callable(value) else value


def build(layers: Sequence[Mapping[str, Any]], overrides: Mapping[str, Any]) -> RunConfig:
    """A checked configuration of the algorithm and task that the layers name."""
    from zhixing import algorithms

    values: dict[str, Any] = {}
    for layer in (*layers, overrides):
        values = merge(values, layer)
    values = _with_paths(values)
    algorithm, env = values.get("algorithm"), values.get("env")
    if env is None and isinstance(values.get("dataset"), str):
        env = values["env"] = _env_of_data(values["dataset"])
    name = env.get("name") if isinstance(env, dict) else env
    if not isinstance(algorithm, str):
        raise UserError("no algorithm is named; set `algorithm`, for example algorithm=ppo (see `zhixing list`)")
    if not isinstance(name, str):
        raise UserError("no environment is named; set `env`, for example env=CartPole-v1 (see `zhixing list envs`)")
    algorithm, _, _, settings, _ = algorithms.get(algorithm)
    values["algorithm"] = algorithm  # as it is registered: PPO is ppo
    if values.get("dataset") is not None and "dataset" not in settings.model_fields:
        raise UserError(
            f"{algorithm} takes no dataset: it learns from what it has just done itself; those with a replay take one, "
            f"such as dqn, sac and iql"
        )
    cfg = absolute_paths(validate(settings, merge(preset(algorithm, name), values)))
    if cfg.imports:
        from zhixing.envs.adapters.gymnasium_ids import import_packages

        import_packages(cfg.imports)
    return cfg


def absolute_paths(cfg: RunConfig) -> RunConfig:
    """Make paths of the configuration absolute: an environment may change the current folder, and a run may be resumed
    from another one."""

    def absolute(values: Any, *names: str) -> dict[str, str]:
        given = {name: getattr(values, name, None) for name in names}
        return {name: os.path.abspath(value) for name, value in given.items() if value and os.path.exists(value)}

    changes: dict[str, Any] = {**absolute(cfg, "init_from", "dataset", "expert", "opponent")}
    if isinstance(cfg, OffPolicyConfig):
        changes["replay"] = cfg.replay.model_copy(update=absolute(cfg.replay, "start"))
    return cfg.model_copy(update=changes)


def provide(values: Mapping[str, Any], **objects: Any) -> None:
    """Let the names in a run's settings stand for objects: `env` for a class, a function or an environment, `net` for
    a class of networks."""
    for group, given in objects.items():
        if given is None:
            continue
        if isinstance(given, str):
            raise UserError(f"{group}={given!r} is a name; give the class itself, or a function that makes one")
        settings = values.get(group)
        name = settings.get(SHORT[group]) if isinstance(settings, Mapping) else settings
        if not isinstance(name, str):
            raise UserError(f"{group} can't be given: the run names none")
        if group == "env":
            from zhixing.envs.portable import make_factory

            given = make_factory(given)
        named_objects.register_as(name, given)


def _with_paths(values: Any) -> Any:
    """Names such as `my_env.py:MyEnv` with the whole path of the file: the run may be loaded from another folder."""
    if isinstance(values, Mapping):
        return {key: _with_paths(value) for key, value in values.items()}
    return importing.absolute(values) if isinstance(values, str) else values


def _env_of_data(source: str) -> dict[str, Any]:
    from zhixing import offline

    data = offline.open(source)
    if data.env is None:
        raise UserError(
            f"{source} doesn't name its environment; name it with --env, or learn without evaluations with --env none"
        )
    env = {"name": data.env, **data.options}
    try:
        importing.check_names(env)
    except UserError as error:
        raise UserError(f"{source}: {error}, or name the environment with --env") from None
    return env


def validate(model: type[RunConfig], values: Mapping[str, Any]) -> RunConfig:
    try:
        return model.model_validate(dict(values))
    except ValidationError as error:
        raise UserError("\n".join(_explain(model, problem) for problem in error.errors())) from None


def _explain(model: type[BaseModel], problem: Any) -> str:
    path = [str(part) for part in problem["loc"] if not str(part).startswith(("function-", "constrained-", "literal["))]
    name = ".".join(path)
    if problem["type"] == "extra_forbidden":
        owner: Any = model
        for part in path[:-1]:
            owner = owner.model_fields[part].annotation
        prefix = "".join(part + "." for part in path[:-1])
        return _unknown_setting(name, model, [prefix + field for field in owner.model_fields])
    if problem["type"] == "missing":
        return f"the setting {name!r} is missing"
    if name == "num_envs" and problem["input"] == "auto":
        return "num_envs='auto' is decided when training begins, by `zhixing train` or zx.train: write a number here"
    message = problem["msg"].removeprefix("Value error, ").removeprefix("Input ")
    if problem["type"] == "list_type":
        message += ", such as [64, 64]"
    if not name:
        return message
    # for a union pydantic also names the alternative; people don't need it
    name = ".".join(part for part in path if part not in ("int", "float", "str", "bool"))
    return f"{name}={problem['input']!r}: {message}"


def _unknown_setting(name: str, model: type[BaseModel], allowed: list[str]) -> str:
    """Name the setting that other libraries, or other algorithms, have by this name; else the most similar names."""
    from zhixing import algorithms

    other = OTHER_NAMES.get(name.rpartition(".")[2])
    if other is not None:
        setting = next((one for one in other.here if one.startswith("-") or has_setting(model, one)), None)
        if setting is not None or not other.here:
            return f"unknown setting: {other.sentence(name, setting)}"
    known_by = [each for each in algorithms.names() if has_setting(algorithms.get(each).settings, name)]
    if known_by:
        these = ", ".join(known_by[:6]) + (" and others" if len(known_by) > 6 else "")
        return f"unknown setting {name!r}: only other algorithms have it, such as {these}"
    return str(unknown("setting", name, allowed))


def setting_type(model: type[BaseModel], name: str) -> Any:
    """Return the annotation of a setting by its dotted name, or None where there is no such setting."""
    first, _, rest = name.partition(".")
    field = model.model_fields.get(first)
    if field is None or not rest:
        return None if field is None else field.annotation
    group = field.annotation
    return setting_type(group, rest) if isinstance(group, type) and issubclass(group, BaseModel) else None


def has_setting(model: type[BaseModel], name: str) -> bool:
    return setting_type(model, name) is not None


def dump(cfg: RunConfig) -> str:
    return yaml.safe_dump(cfg.model_dump(mode="json"), sort_keys=False, allow_unicode=True)

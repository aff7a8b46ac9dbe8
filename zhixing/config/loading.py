"""Build a configuration from presets, YAML files and overrides.

Later sources take precedence: the algorithm's defaults, its preset for the environment (unless `preset=False`), files,
overrides.
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
from pydantic import BaseModel

from zhixing.config.schema import SHORTHANDS, RunConfig, name_object
from zhixing.config.yaml_files import parse_yaml, read_yaml
from zhixing.errors import UserError
from zhixing.utils import importing, named_objects


def load(*files: str | Path, **overrides: Any) -> RunConfig:
    """Return the configuration from YAML files and overrides, such as `num_envs=8` or `net__activation="relu"`."""
    return build([read_yaml(Path(file)) for file in files], from_keywords(overrides))


def dump(cfg: RunConfig) -> str:
    """Return all settings as YAML."""
    return yaml.safe_dump(cfg.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


# --- overrides ---


def parse_overrides(arguments: Sequence[str]) -> dict[str, Any]:
    """Return `["lr=3e-4", "net.activation=relu"]` as nested settings."""
    values: dict[str, Any] = {}
    for argument in arguments:
        key, sign, text = argument.partition("=")
        if not sign or not key or key.startswith("-"):
            raise UserError(
                f"{argument!r} is not a setting; write name=value, for example lr=3e-4 or num_envs=8 "
                f"(set the environment with --env)"
            )
        values = merge(values, nest(key, parse_yaml(text, f"the value of {key!r}")))
    return values


def from_keywords(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Return keyword arguments as nested settings: `net__activation="relu"` sets `net.activation`.

    Classes, functions and environments are replaced by their names.
    """
    values: dict[str, Any] = {}
    for keyword, value in keywords.items():
        *_, last = keyword.split("__")
        values = merge(values, nest(keyword.replace("__", "."), _replace_objects(last, value)))
    return values


def _replace_objects(key: str, value: Any) -> Any:
    if isinstance(value, BaseModel):  # of a group: settings that aren't given keep their preset or default
        value = value.model_dump(exclude_unset=True)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        parts = {
            name: _replace_objects(key if name == SHORTHANDS.get(key) else name, part) for name, part in value.items()
        }
        # an environment object is replaced by its name and options
        return {**parts.pop("name"), **parts} if isinstance(parts.get("name"), Mapping) else parts
    if value is None or isinstance(value, (str, int, float, list, tuple)):
        return value
    if key == "env":
        from zhixing.envs.portable import env_settings

        return env_settings(value)
    return name_object(value)


def register_objects(values: Mapping[str, Any], **objects: Any) -> None:
    """Register objects under the names in a run's settings.

    `env` is a class, a function or an environment; `net` is a class of networks.
    """
    for group, value in objects.items():
        if value is None:
            continue
        if isinstance(value, str):
            raise UserError(
                f"{group}={value!r} is a string; pass the class itself, or a function that returns an object"
            )
        settings = values.get(group)
        name = settings.get(SHORTHANDS[group]) if isinstance(settings, Mapping) else settings
        if not isinstance(name, str):
            raise UserError(f"the run has no setting `{group}`, so {group}=... can't be passed; leave it out")
        if group == "env":
            from zhixing.envs.portable import make_factory

            value = make_factory(value)
        named_objects.register_as(name, value)


def as_layer(algorithm: Any) -> dict[str, Any]:
    """Return the settings of an algorithm by name or class, or those that a configuration sets, as a layer."""
    if not isinstance(algorithm, RunConfig):
        return from_keywords({"algorithm": algorithm})
    check_settings_class(type(algorithm), algorithm.algorithm)
    return {"algorithm": algorithm.algorithm, **algorithm.model_dump(mode="json", exclude_unset=True)}


def nest(key: str, value: Any) -> dict[str, Any]:
    """Return `{"net": {"activation": value}}` for the key `net.activation`."""
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


def merge(base: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` updated by `overrides`, recursively. Another environment drops the options of the first."""
    merged = dict(base)
    for key, value in overrides.items():
        merged[key] = _merge_value(key, merged.get(key), value)
    return merged


def _merge_value(key: str, old: Any, new: Any) -> Any:
    old, new = _expand_shorthand(key, old), _expand_shorthand(key, new)
    if old is None or not isinstance(new, dict) or (key == "env" and _is_another_env(old, new)):
        return new
    if not isinstance(old, dict):
        first = next(iter(new), "...")
        raise UserError(f"{key}={old!r} and {key}.{first} can't both be set: {key} is a group of settings")
    return merge(old, new)


def _expand_shorthand(key: str, value: Any) -> Any:
    return {SHORTHANDS[key]: value} if key in SHORTHANDS and isinstance(value, str) else value


def _is_another_env(old: Any, new: dict[str, Any]) -> bool:
    names = (old.get("name") if isinstance(old, dict) else None, new.get("name"))
    return None not in names and names[0] != names[1]


# --- presets ---


def preset(algorithm: str, env: str) -> dict[str, Any]:
    """Return the tuned settings of an algorithm for an environment, empty if there are none."""
    name = preset_name(algorithm, env)
    return {} if name is None else dict(presets(algorithm)[name])


def preset_name(algorithm: str, env: str) -> str | None:
    """Return the first pattern in the algorithm's presets that matches an environment, or None."""
    env = env.rpartition(":")[2]  # package:Id-v0 has the preset of Id-v0
    return next((pattern for pattern in presets(algorithm) if fnmatch.fnmatchcase(env, pattern)), None)


@functools.cache
def presets(algorithm: str) -> dict[str, dict[str, Any]]:
    """Return the presets of an algorithm by environment pattern, from `presets/<algorithm>.yaml`."""
    file = resources.files("zhixing.config") / "presets" / f"{algorithm}.yaml"
    if ":" in algorithm or "/" in algorithm or not file.is_file():
        return {}
    return parse_yaml(file.read_text(encoding="utf-8"), f"preset {algorithm}") or {}


# --- configuration ---


def build(layers: Sequence[Mapping[str, Any]], overrides: Mapping[str, Any]) -> RunConfig:
    """Return the validated configuration of layers of settings, in order, and overrides on top."""
    from zhixing import algorithms

    values: dict[str, Any] = {}
    for layer in (*layers, overrides):
        values = merge(values, layer)
    algorithm = values.get("algorithm")
    if not isinstance(algorithm, str):
        raise UserError("no algorithm is given: set `algorithm`, for example algorithm=ppo (see `zhixing list`)")
    algorithm, _, _, settings, _ = algorithms.get(algorithm)
    # the registered spelling: ppo for PPO
    return settings(**{**values, "algorithm": algorithm})


def rebuild(values: Mapping[str, Any], overrides: Mapping[str, Any]) -> RunConfig:
    """Return the configuration of settings that are complete, such as those of a run, and overrides on top.

    No preset applies, because it may have changed since the run.
    """
    cfg = build([values, {"preset": False}], overrides)
    return cfg.model_copy(update={"preset": values.get("preset", True)})


def check_settings_class(settings: type[RunConfig], algorithm: str) -> None:
    """Raise `UserError` if an algorithm has another class of settings."""
    from zhixing import algorithms

    expected = algorithms.get(algorithm).settings
    if settings is not expected:
        raise UserError(
            f"{settings.__name__} doesn't have the settings of algorithm={algorithm}: use {expected.__name__}, or set "
            f"algorithm to a learner with the settings {settings.__name__}"
        )


def complete(settings: type[RunConfig], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the user's settings with those of the preset and of the dataset, and with names in place of objects."""
    given = {name: _replace_objects(name, value) for name, value in values.items()}
    field = settings.model_fields["algorithm"]
    algorithm = given.get("algorithm", field.default)
    if isinstance(algorithm, str) and not field.is_required() and algorithm != field.default:
        check_settings_class(settings, algorithm)
    dataset = given.get("dataset")
    if given.get("env") is None and isinstance(dataset, str):
        given["env"] = _env_of_dataset(dataset)
    env = given.get("env")
    env_name = env.get("name") if isinstance(env, Mapping) else env
    if not isinstance(env_name, str):
        raise UserError("no environment is given: set `env`, for example env=CartPole-v1 (see `zhixing list envs`)")
    if dataset is not None and "dataset" not in settings.model_fields:
        raise UserError(
            f"{algorithm} can't learn from a dataset because it is on-policy; use an algorithm with a replay buffer, "
            f"such as dqn, sac or iql"
        )
    use_preset = given.get("preset", True) and isinstance(algorithm, str)
    return _absolute_paths(_absolute_references(merge(preset(algorithm, env_name) if use_preset else {}, given)))


def import_packages(names: Sequence[str]) -> None:
    """Import the packages that register environments."""
    from zhixing.envs.adapters import gymnasium_ids

    gymnasium_ids.import_packages(names)


def _absolute_paths(values: dict[str, Any]) -> dict[str, Any]:
    """Make paths absolute: an environment may change the working directory, and a run may be resumed from another."""
    replay = values.get("replay")
    groups = {"replay": _absolute(replay, "start")} if isinstance(replay, Mapping) else {}
    return {**_absolute(values, "init_from", "dataset", "expert", "opponent"), **groups}


def _absolute(settings: Mapping[str, Any], *names: str) -> dict[str, Any]:
    paths = {name: settings[name] for name in names if isinstance(settings.get(name), str)}
    return {**settings, **{name: os.path.abspath(path) for name, path in paths.items() if os.path.exists(path)}}


def _absolute_references(values: Any) -> Any:
    """Make the file in references such as `my_env.py:MyEnv` absolute: the run may be loaded from another folder."""
    if isinstance(values, Mapping):
        return {key: _absolute_references(value) for key, value in values.items()}
    return importing.absolute(values) if isinstance(values, str) else values


def _env_of_dataset(source: str) -> dict[str, Any]:
    from zhixing import offline

    data = offline.open(source)
    if data.env is None:
        raise UserError(
            f"{source} doesn't name its environment; set it with --env, or disable evaluations with --env none"
        )
    env = {"name": data.env, **data.options}
    try:
        importing.check_names(env)
    except UserError as error:
        raise UserError(f"{source}: {error}, or set the environment with --env") from None
    return env

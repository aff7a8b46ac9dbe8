"""Explain invalid settings, with errors that name the setting, its value and the closest valid name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from zhixing.config.other_libraries import LIBRARY_SETTINGS
from zhixing.config.schema import RunConfig, StrictModel
from zhixing.errors import UserError, unknown

Model = TypeVar("Model", bound=StrictModel)


def validate(model: type[Model], values: Mapping[str, Any]) -> Model:
    """Return complete settings, to which no preset is added, or raise `UserError` with one line per invalid setting."""
    try:
        return model.model_validate(dict(values))
    except ValidationError as error:
        raise explain(model, error) from None


def explain(model: type[BaseModel], error: ValidationError) -> UserError:
    """Return pydantic's error about settings of `model` as a `UserError` with one line per invalid setting."""
    return UserError("\n".join(_explain(model, problem) for problem in error.errors()))


def setting_type(model: type[BaseModel], name: str) -> Any:
    """Return the annotation of a setting by its dotted name, or None if there is no such setting."""
    first, _, rest = name.partition(".")
    field = model.model_fields.get(first)
    if field is None or not rest:
        return None if field is None else field.annotation
    group = field.annotation
    return setting_type(group, rest) if isinstance(group, type) and issubclass(group, BaseModel) else None


def has_setting(model: type[BaseModel], name: str) -> bool:
    return setting_type(model, name) is not None


def _explain(model: type[BaseModel], problem: Any) -> str:
    """Return the message for one of pydantic's errors."""
    path = [str(part) for part in problem["loc"] if not str(part).startswith(("function-", "constrained-", "literal["))]
    name = ".".join(path)
    if problem["type"] == "extra_forbidden":
        owner: Any = model
        for part in path[:-1]:
            owner = owner.model_fields[part].annotation
        prefix = "".join(part + "." for part in path[:-1])
        return _explain_unknown(name, model, [prefix + field for field in owner.model_fields])
    if problem["type"] == "missing":
        return f"the setting {name!r} is missing: set it with {name}=VALUE"
    if name == "num_envs" and problem["input"] == "auto":
        return "num_envs='auto' is only allowed in `zhixing train` and zx.train, which measure it: write a number here"
    message = problem["msg"].removeprefix("Value error, ").removeprefix("Input ")
    if problem["type"] == "list_type":
        message += ", such as [64, 64]"
    if not name:
        return message
    # for a union, pydantic adds the name of the alternative to the path
    name = ".".join(part for part in path if part not in ("int", "float", "str", "bool"))
    return f"{name}={problem['input']!r}: {message}"


def _explain_unknown(name: str, model: type[BaseModel], allowed: list[str]) -> str:
    """Return the equivalent of another library's setting, the algorithms with that setting, or the closest names."""
    from zhixing import algorithms

    known = LIBRARY_SETTINGS.get(name.rpartition(".")[2])
    if known is not None:
        options_and_settings = (e for e in known.equivalents if e.startswith("-") or has_setting(model, e))
        equivalent = next(options_and_settings, None)
        if equivalent is not None or not known.equivalents:
            return f"unknown setting: {known.message(name, equivalent)}"
    group, _, setting = name.partition("__")
    if setting and has_setting(model, f"{group}.{setting}"):
        group_class = setting_type(model, group).__name__
        return f"unknown setting {name!r}: write {group}={group_class}({setting}=...), or use zhixing.config.load"
    is_run = issubclass(model, RunConfig)  # not a group, such as NetConfig(lr=1e-3)
    owners = [a for a in algorithms.names() if is_run and has_setting(algorithms.get(a).settings, name)]
    if owners:
        examples = ", ".join(owners[:6]) + (" and others" if len(owners) > 6 else "")
        return f"unknown setting {name!r}: only other algorithms have it, such as {examples}"
    return str(unknown("setting", name, allowed))

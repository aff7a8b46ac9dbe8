"""Settings as text: their values, types, groups and descriptions."""

from __future__ import annotations

import sys
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel

from zhixing.config.schema import Group, RunConfig, StrictModel

# settings without an effect on returns: runs that differ only in these have the same configuration
WITHOUT_EFFECT = {"seed", "log_every_steps", "checkpoint_every_steps", "keep_checkpoints", "tensorboard"}
WITHOUT_EFFECT |= {"eval_video", "plot", "num_threads", "device", "vector.backend", "vector.workers"}


class Setting(NamedTuple):
    name: str  # dotted, such as net.hidden_sizes
    group: Group
    type: str  # with the allowed values, such as `int > 0`
    default: str
    description: str


def format_value(value: Any) -> str:
    """Return the value of a setting as written on the command line."""
    if value is None:
        return "none"
    return str(value).lower() if isinstance(value, bool) else str(value)


def flat_settings(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return groups of settings by dotted names."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        flat |= flat_settings(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return flat


def list_settings(model: type[RunConfig]) -> list[Setting]:
    """Return all settings of an algorithm, ordered by group."""
    groups = list(Group)
    return sorted(_settings(model), key=lambda setting: groups.index(setting.group))


def _settings(
    model: type[BaseModel], defaults: BaseModel | None = None, prefix: str = "", group: Group | None = None
) -> Iterator[Setting]:
    for name, field in model.model_fields.items():
        default = None if field.is_required() else field.default if defaults is None else getattr(defaults, name)
        own_group = group or _group(model, name)
        if isinstance(field.annotation, type) and issubclass(field.annotation, StrictModel):
            yield from _settings(field.annotation, default, f"{prefix}{name}.", own_group)
        else:
            text = "required" if field.is_required() else format_value(default)
            type_text = format_type(field.annotation, field.metadata)
            yield Setting(prefix + name, own_group, type_text, text, describe(model, name))


def _definitions(model: type[BaseModel], name: str) -> list[type[BaseModel]]:
    """Return the classes that have a setting: the model first, the one that introduces the setting last."""
    return [cls for cls in model.__mro__ if issubclass(cls, BaseModel) and name in cls.model_fields]


def describe(model: type[BaseModel], name: str) -> str:
    """Return the description of a setting. A class that only changes the default inherits the description."""
    descriptions = (cls.model_fields[name].description for cls in _definitions(model, name))
    return next(filter(None, descriptions), "")


def _group(model: type[BaseModel], name: str) -> Group:
    definitions = _definitions(model, name)
    annotated = [item for cls in definitions for item in cls.model_fields[name].metadata if isinstance(item, Group)]
    introduced_by: Any = definitions[-1]
    return annotated[0] if annotated else introduced_by.group


def format_type(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """Return a type with its allowed values: `int > 0`, `adam | rmsprop`, `float or none`."""
    arguments = typing.get_args(annotation)
    origin = typing.get_origin(annotation)
    if origin is Annotated:
        inner = [item for argument in arguments[1:] for item in getattr(argument, "metadata", [argument])]
        return format_type(arguments[0], [*inner, *metadata])
    if origin is Literal:
        return " | ".join(str(choice) for choice in arguments)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(format_type(argument) for argument in arguments)
    if origin is list:
        return f"list of {format_type(arguments[0])}"
    names = {int: "int", float: "float", str: "str", bool: "bool", type(None): "none"}
    name = names.get(annotation, "options" if origin is dict else "str")
    signs = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
    bounds = {sign: getattr(item, key) for item in metadata for key, sign in signs.items() if hasattr(item, key)}
    if bounds.keys() == {">=", "<="}:
        return f"{name} {bounds['>=']:g} to {bounds['<=']:g}"
    return f"{name} {' and '.join(f'{sign} {value:g}' for sign, value in bounds.items())}".strip()


def print_settings(title: str, model: type[RunConfig], preset: RunConfig | None = None) -> None:
    """Print the settings of an algorithm by group; with `preset`, also its values that differ from the defaults."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("setting", no_wrap=True)
    for column, width in {"type": 18, "default": 10, **({"preset": 10} if preset is not None else {})}.items():
        table.add_column(column, max_width=width, overflow="fold")
    table.add_column("description")
    values = {} if preset is None else flat_settings(preset.model_dump(exclude={"algorithm"}))
    values.pop("env.name", None)
    group = None
    for setting in list_settings(model):
        if setting.group is not group:
            if group is not None:
                table.add_section()
            group = setting.group
            table.add_row(Text(group.value, style="bold"))
        value = format_value(values[setting.name]) if setting.name in values else setting.default
        columns = [setting.type, setting.default]
        if preset is not None:
            columns.append("" if value == setting.default else value)
        table.add_row(*(Text(cell) for cell in (f"  {setting.name}", *columns, setting.description)))
    (Console() if sys.stdout.isatty() else Console(width=100)).print(table)

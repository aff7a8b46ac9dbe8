"""Settings as text: their values, types, groups and descriptions."""

from __future__ import annotations

import itertools
import shutil
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel

from zhixing.config.schema import Group, RunConfig, StrictModel
from zhixing.utils import named_objects

# settings without an effect on returns: runs that differ only in these have the same configuration
WITHOUT_EFFECT = {"seed", "log_every", "checkpoint_every", "keep_checkpoints", "tensorboard"}
WITHOUT_EFFECT |= {"wandb", "mlflow"}
WITHOUT_EFFECT |= {"eval_video", "plot", "num_threads", "device", "vector.backend", "vector.workers"}

# widths in `zhixing show`
MAX_WIDTH = 120
MAX_CELL = 18  # of a type or value
MIN_DESCRIPTION = 36  # with less space, descriptions are printed below the other columns


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
    if callable(value):  # a trainer or collector that a class sets
        return named_objects.register_object(value)
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
        return " or ".join(dict.fromkeys(format_type(argument) for argument in arguments))
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
    """Print the settings of an algorithm by group; with `preset`, also its values that differ from the defaults.

    In a wide terminal, descriptions form the last column; in a narrow one, they follow on separate lines.
    """
    settings = list_settings(model)
    columns = {
        "setting": [f"  {setting.name}" for setting in settings],
        "type": [setting.type for setting in settings],
        "default": [setting.default for setting in settings],
    }
    if preset is not None:
        values = {name: format_value(value) for name, value in flat_settings(preset.model_dump()).items()}
        values |= {"algorithm": "", "env.name": ""}  # the title has them
        actual = [values.get(setting.name, setting.default) for setting in settings]
        columns["preset"] = ["" if v == s.default else v for v, s in zip(actual, settings, strict=True)]
    total = min(MAX_WIDTH, shutil.get_terminal_size((100, 24)).columns)
    widths = [max(len(text) for text in (name, *cells)) for name, cells in columns.items()]
    widths[1:] = [min(width, MAX_CELL) for width in widths[1:]]
    description_width = total - sum(width + 2 for width in widths)
    is_wide = description_width >= MIN_DESCRIPTION
    if is_wide:
        columns["description"] = [setting.description for setting in settings]
        widths.append(description_width)
    else:
        widths[1] += description_width  # the type may use the free space
    print(f"{title}\n\n{_format_row(list(columns), widths)}\n{'-' * total}")
    for i, setting in enumerate(settings):
        if i == 0 or setting.group is not settings[i - 1].group:
            print(("\n" if i else "") + setting.group.value)
        print(_format_row([cells[i] for cells in columns.values()], widths))
        if not is_wide:
            print(textwrap.fill(setting.description, total, initial_indent=" " * 6, subsequent_indent=" " * 6))


def _format_row(cells: Sequence[str], widths: Sequence[int]) -> str:
    """Return the lines of a table row. Cells are wrapped to their widths."""
    wrapped = [
        textwrap.wrap(cell, width, drop_whitespace=not cell.startswith(" "))
        for cell, width in zip(cells, widths, strict=True)
    ]
    lines = itertools.zip_longest(*wrapped, fillvalue="")
    return "\n".join(
        "  ".join(part.ljust(width) for part, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )

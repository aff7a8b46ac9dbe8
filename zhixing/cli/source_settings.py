"""Read the settings of algorithms from source code, for shell completion: importing an algorithm takes seconds."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).parents[1]
SCHEMA, POLICIES = (PACKAGE / "config" / f"{name}.py" for name in ("schema", "policies"))


class SourceSetting(NamedTuple):
    """A setting as its class defines it. `default` is source code, empty if the setting is required."""

    description: str
    default: str
    choices: tuple[str, ...]


@functools.cache
def _sources() -> dict[Path, str]:
    files = sorted((PACKAGE / "algorithms").glob("*.py"))
    return {file: file.read_text(encoding="utf-8") for file in (SCHEMA, POLICIES, *files)}


def algorithm_summaries() -> dict[str, str]:
    """Return the summary of each algorithm by its name."""
    pattern = re.compile(r'^@?register\(\s*"(\w+)",\s*"([^"]+)"', re.M)
    return dict(sorted(match for text in _sources().values() for match in pattern.findall(text)))


def read_settings(algorithm: str) -> dict[str, SourceSetting]:
    """Return the settings of a built-in algorithm by dotted name; empty for other algorithms."""
    pattern = re.compile(
        rf'^class (\w+)\(.*\):\n(?:    """.*\n\n?)?    algorithm: str = "{re.escape(algorithm)}"$', re.M
    )
    names = [match[1] for text in _sources().values() for match in pattern.finditer(text)]
    return _settings_of_class(names[0]) if names else {}


def _settings_of_class(name: str, prefix: str = "") -> dict[str, SourceSetting]:
    node = _find_class(name)
    if node is None:
        return {}
    settings: dict[str, SourceSetting] = {}
    for base in reversed(node.bases):  # the first base takes precedence
        settings |= _settings_of_class(ast.unparse(base), prefix)
    for field, description in _fields(node):
        assert isinstance(field.target, ast.Name)
        setting, annotation = prefix + field.target.id, ast.unparse(field.annotation)
        if annotation == "EnvSetting":  # its options depend on the environment
            continue
        group = re.search(r"\b([A-Z]\w*Config)\b", annotation)
        if group is not None:
            settings |= _settings_of_class(group[1], f"{setting}.")
            settings |= _changed_defaults(field.value, settings, setting)
            continue
        inherited = settings.get(setting)
        value = field.value
        if isinstance(value, ast.Call) and ast.unparse(value.func) == "Field":  # Field(default, ...)
            value = value.args[0]
        settings[setting] = SourceSetting(
            description or (inherited.description if inherited else ""),
            "" if value is None else ast.unparse(value),
            _choices(annotation) or (inherited.choices if inherited else ()),
        )
    return settings


def _changed_defaults(
    value: ast.expr | None, settings: dict[str, SourceSetting], group: str
) -> dict[str, SourceSetting]:
    """Return the settings of a group whose defaults a class changes, as in `NetConfig(activation="relu")`."""
    keywords = value.keywords if isinstance(value, ast.Call) else []
    changed = {f"{group}.{keyword.arg}": ast.unparse(keyword.value) for keyword in keywords}
    return {name: settings[name]._replace(default=default) for name, default in changed.items()}


@functools.cache
def _find_class(name: str) -> ast.ClassDef | None:
    for file, text in _sources().items():
        if f"\nclass {name}(" in text:
            classes = (node for node in _parse(file).body if isinstance(node, ast.ClassDef))
            return next(node for node in classes if node.name == name)
    return None


@functools.cache
def _parse(file: Path) -> ast.Module:
    return ast.parse(_sources()[file])


def _fields(node: ast.ClassDef) -> Iterator[tuple[ast.AnnAssign, str]]:
    """Yield the fields of a class with the docstrings below them."""
    for i, statement in enumerate(node.body):
        if isinstance(statement, ast.AnnAssign) and "ClassVar" not in ast.unparse(statement.annotation):
            after = node.body[i + 1] if i + 1 < len(node.body) else None
            value = after.value if isinstance(after, ast.Expr) else None
            yield statement, str(value.value) if isinstance(value, ast.Constant) else ""


def _choices(annotation: str) -> tuple[str, ...]:
    """Return the allowed values if the type has only a few."""
    annotation = "".join(_aliases().get(part, part) for part in re.split(r"(\w+)", annotation))
    if re.search(r"\bbool\b", annotation):
        return ("true", "false", *(["auto"] if "auto" in annotation else []))
    names = [name for group in re.findall(r"Literal\[(.*?)\]", annotation) for name in re.findall(r"'([^']+)'", group)]
    numbers = re.search(r"\b(int|float|Positive\w*|Count|Threads)\b", annotation)
    return tuple(names) if len(names) > 1 or not numbers else ()


@functools.cache
def _aliases() -> dict[str, str]:
    """Return the names of types in the schema that are choices, such as `Schedule`."""
    assignments = (node for node in ast.walk(_parse(SCHEMA)) if isinstance(node, ast.Assign))
    types = [(ast.unparse(node.targets[0]), ast.unparse(node.value)) for node in assignments]
    return {name: text for name, text in types if re.match(r"Literal\[['\"]", text)}

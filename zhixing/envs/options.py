"""Options of a task, checked against what its constructor takes."""

from __future__ import annotations

import difflib
import functools
import inspect
import numbers
import os
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal, Union

import numpy as np

from zhixing.errors import UserError

_LISTS = (list, tuple, set, frozenset, np.ndarray)


def parameters(constructor: Callable[..., Any]) -> tuple[list[str], bool]:
    """The names of its arguments, and whether it takes others as well."""
    found = _signature(constructor)
    if found is None:
        return [], True
    named = [p.name for p in found if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return named, any(p.kind == p.VAR_KEYWORD for p in found)


def check_options(
    name: str, constructor: Callable[..., Any], options: Mapping[str, Any], extra: tuple[str, ...] = ()
) -> None:
    """Raise `UserError` for an option that the constructor doesn't have, or whose value is of another type than its
    annotation, or its default, says. Types that can't be judged pass."""
    named, open_ended = parameters(constructor)
    allowed = [*named, *extra]
    types_of = _types(constructor)
    for option, value in options.items():
        if not open_ended and option not in allowed:
            raise unknown_option(name, option, allowed)
        expected, default = types_of.get(option, (Any, None))
        if not _fits(value, expected) and _fits(default, expected):  # an annotation may be wrong itself
            raise UserError(
                f"{name}: option {option}={value!r} is of type {type(value).__name__}; it takes {_shown(expected)}"
                + (f", such as {default!r}" if default is not None else "")
            )


def unknown_option(name: str, option: str, allowed: list[str]) -> UserError:
    near = difflib.get_close_matches(option, allowed, n=1, cutoff=0.5)
    advice = f"; did you mean {near[0]!r}?" if near else ""
    return UserError(f"{name} has no option {option!r}, allowed: {', '.join(allowed) or 'none'}{advice}")


def _signature(constructor: Callable[..., Any]) -> list[inspect.Parameter] | None:
    try:
        return list(inspect.signature(constructor).parameters.values())
    except (TypeError, ValueError):  # built in C, without a signature
        return None


def _types(constructor: Callable[..., Any]) -> dict[str, tuple[Any, Any]]:
    """The type that each argument takes, and its default. `Any` where neither annotation nor default tells."""
    found: dict[str, tuple[Any, Any]] = {}
    for parameter in _signature(constructor) or []:
        default = None if parameter.default is parameter.empty else parameter.default
        if parameter.annotation is parameter.empty:
            expected = bool if isinstance(default, bool) else float if isinstance(default, (int, float)) else Any
        else:
            expected = _resolved(parameter.annotation, constructor)
        found[parameter.name] = (expected, default)
    return found


def _resolved(annotation: Any, constructor: Callable[..., Any]) -> Any:
    """The type that an annotation means; `Any` where it names what only a type checker imports."""
    if not isinstance(annotation, str):
        return annotation
    function: Any = constructor.__init__ if inspect.isclass(constructor) else constructor
    while isinstance(function, functools.partial):
        function = function.func
    holder = types.SimpleNamespace(__annotations__={"it": annotation})
    try:
        return typing.get_type_hints(holder, getattr(function, "__globals__", {}))["it"]
    except Exception:
        return Any


def _fits(value: Any, expected: Any) -> bool:
    """Whether an argument of the type `expected` may get the value. Whatever can't be told may be right."""
    origin, arguments = typing.get_origin(expected), typing.get_args(expected)
    if value is None or expected is Any:
        return True
    if origin in (Union, types.UnionType):
        return any(_fits(value, part) for part in arguments)
    if origin is Literal:
        return value in arguments
    kind = origin or expected
    if kind is type(None):
        return False
    if kind is bool:
        return isinstance(value, (bool, np.bool_)) or (isinstance(value, int) and value in (0, 1))
    if kind is int:
        return isinstance(value, numbers.Integral) or (isinstance(value, float) and value.is_integer())
    if kind is float:
        return isinstance(value, numbers.Real)
    if kind is str:
        return isinstance(value, (str, os.PathLike))
    if kind in _LISTS:
        return isinstance(value, _LISTS)
    return True


def _shown(expected: Any) -> str:
    return expected.__name__ if isinstance(expected, type) else str(expected).replace("typing.", "")

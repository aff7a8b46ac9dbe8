"""Check options against the signature of an environment's constructor, and call it."""

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

COMMON_OPTIONS = (
    "action_repeat",
    "info_fields",
    "max_episode_steps",
    "stack",
)  # of every environment, see `registry.make`
_LISTS = (list, tuple, set, frozenset, np.ndarray)


def parameter_names(constructor: Callable[..., Any]) -> list[str]:
    return [p.name for p in _signature(constructor) or [] if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]


def check_options(
    name: str, constructor: Callable[..., Any], options: Mapping[str, Any], extra: tuple[str, ...] = ()
) -> None:
    """Raise `UserError` for an option that the constructor doesn't have, or whose value has the wrong type.

    The type of an option is its annotation, or the type of its default. Unknown types accept any value. `extra` names
    options that are allowed in addition.
    """
    allowed = [*parameter_names(constructor), *extra]
    accepts_any = _accepts_any(constructor)
    types_of = _types(constructor)
    for option, value in options.items():
        if not accepts_any and option not in allowed:
            raise unknown_option(name, option, allowed)
        expected, default = types_of.get(option, (Any, None))
        # if not even the default fits, the annotation is wrong
        if not _fits(value, expected) and _fits(default, expected):
            example = f", such as {default!r}" if default is not None else ""
            raise UserError(
                f"{name}: option {option}={value!r} is of type {type(value).__name__}; "
                f"allowed is {_format_type(expected)}{example}"
            )


def construct_env(
    name: str,
    constructor: Callable[..., Any],
    options: Mapping[str, Any],
    signature: Callable[..., Any] | None = None,
) -> Any:
    """Check the options and call the constructor with them. If it raises, raise `UserError` with the options.

    The options are checked against `signature`, by default the constructor itself.
    """
    check_options(name, signature or constructor, options)
    try:
        return constructor(**options)
    except UserError:
        raise
    except Exception as error:
        given = ", ".join(f"{key}={value!r}" for key, value in options.items())
        raise UserError(f"{name} can't be made with ({given}): {type(error).__name__}: {error}") from error


def unknown_option(name: str, option: str, allowed: list[str]) -> UserError:
    if option not in COMMON_OPTIONS:  # else these environments don't have it
        allowed = [*allowed, *(common for common in COMMON_OPTIONS if common not in allowed)]
    near = difflib.get_close_matches(option, allowed, n=1, cutoff=0.5)
    advice = f"; did you mean {near[0]!r}?" if near else ""
    return UserError(f"{name} has no option {option!r}, allowed: {', '.join(allowed) or 'none'}{advice}")


def _accepts_any(constructor: Callable[..., Any]) -> bool:
    """Return whether the constructor has `**kwargs`, or no signature to check against."""
    signature = _signature(constructor)
    return signature is None or any(p.kind == p.VAR_KEYWORD for p in signature)


def _signature(constructor: Callable[..., Any]) -> list[inspect.Parameter] | None:
    try:
        return list(inspect.signature(constructor).parameters.values())
    except (TypeError, ValueError):  # implemented in C, without a signature
        return None


def _types(constructor: Callable[..., Any]) -> dict[str, tuple[Any, Any]]:
    """Return the type and the default of each parameter. Without annotation and default, the type is `Any`."""
    result: dict[str, tuple[Any, Any]] = {}
    for parameter in _signature(constructor) or []:
        default = None if parameter.default is parameter.empty else parameter.default
        if parameter.annotation is parameter.empty:
            expected = bool if isinstance(default, bool) else float if isinstance(default, (int, float)) else Any
        else:
            expected = _resolve(parameter.annotation, constructor)
        result[parameter.name] = (expected, default)
    return result


def _resolve(annotation: Any, constructor: Callable[..., Any]) -> Any:
    """Return the type of an annotation, or `Any` if it refers to names that are imported only for type checkers."""
    if not isinstance(annotation, str):
        return annotation
    function: Any = constructor.__init__ if inspect.isclass(constructor) else constructor
    while isinstance(function, functools.partial):
        function = function.func
    holder = types.SimpleNamespace(__annotations__={"parameter": annotation})
    try:
        return typing.get_type_hints(holder, getattr(function, "__globals__", {}))["parameter"]
    except Exception:
        return Any


def _fits(value: Any, expected: Any) -> bool:
    """Return whether a value is valid for a parameter of type `expected`. None and values of unknown types are."""
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


def _format_type(expected: Any) -> str:
    return expected.__name__ if isinstance(expected, type) else str(expected).replace("typing.", "")

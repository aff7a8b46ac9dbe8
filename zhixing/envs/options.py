"""Options of a task, checked against what its constructor takes."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable
from typing import Any

from zhixing.errors import UserError


def parameters(constructor: Callable[..., Any]) -> tuple[list[str], bool]:
    """The names of its arguments, and whether it takes others as well."""
    try:
        found = inspect.signature(constructor).parameters.values()
    except (TypeError, ValueError):  # built in C, without a signature
        return [], True
    named = [p.name for p in found if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return named, any(p.kind == p.VAR_KEYWORD for p in found)


def check_options(
    name: str, constructor: Callable[..., Any], options: Iterable[str], extra: tuple[str, ...] = ()
) -> None:
    named, open_ended = parameters(constructor)
    allowed = [*named, *extra]
    for option in options:
        if not open_ended and option not in allowed:
            raise unknown_option(name, option, allowed)


def unknown_option(name: str, option: str, allowed: list[str]) -> UserError:
    near = difflib.get_close_matches(option, allowed, n=1, cutoff=0.5)
    advice = f"; did you mean {near[0]!r}?" if near else ""
    return UserError(f"{name} has no option {option!r}, allowed: {', '.join(allowed) or 'none'}{advice}")

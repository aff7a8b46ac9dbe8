"""The one error that people cause and can mend: it says what was wrong, what is allowed and what to do."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, TextIO


class UserError(Exception):
    """Wrong input. The command line prints it as one message and exits with code 2."""


class NonFiniteError(UserError):
    """A loss or a gradient became NaN or Inf. The step that it belonged to changed no weight."""


class EnvCrashError(RuntimeError):
    """An environment raised, misbehaved, hung or died: names it, its index and step, with its own traceback."""

    report: dict[str, Any] | None = None  # what repeats it, until it is written to a file


def write_stderr(text: object, end: str = "\n") -> None:
    """Print to standard error. A full disk, a closed terminal or a broken pipe behind it never ends the program."""
    write_stream(sys.stderr, text, end)


def write_stream(stream: TextIO | None, text: object, end: str = "\n") -> None:
    """Print to a stream, which is None where the program was started with it closed. Failures are ignored."""
    if stream is not None:
        with suppress(OSError, ValueError, RuntimeError):  # closed; or a signal came while it was written to
            print(text, end=end, file=stream, flush=True)


def note(words: str) -> None:
    """Tell people what they should know though all goes on."""
    write_stderr(f"note: {words}")


def unknown(kind: str, name: str, allowed: Iterable[str], hint: str = "") -> UserError:
    """The error for a name that isn't there: the nearest right names first, else where to look."""
    choices = sorted(allowed)
    near = difflib.get_close_matches(name, choices, n=3, cutoff=0.5)
    if near:
        advice = f"did you mean {' or '.join(repr(choice) for choice in near)}?"
    elif not choices and hint:
        return UserError(f"unknown {kind} {name!r} {hint}")
    elif len(choices) <= 12:
        advice = f"allowed: {', '.join(choices) or 'none'}"
    else:
        advice = f"there are {len(choices)}, for example {', '.join(choices[:6])}"
    return UserError(f"unknown {kind} {name!r}: {advice}{' ' + hint if hint else ''}")

"""Errors that users can fix, and output to a terminal or pipe that may be broken."""

from __future__ import annotations

import difflib
import errno
import io
import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, TextIO

from zhixing.translation import translate


class UserError(Exception):
    """Invalid input. The message names what is wrong, what is allowed and what to do.

    The command line prints the message without a traceback and exits with code 2. The text of the error is in the
    language of the user; its argument stays English.
    """

    def __str__(self) -> str:
        return translate(super().__str__())


class NonFiniteError(UserError):
    """A loss or gradient became NaN or infinite. The optimizer skipped that step, so the weights are unchanged."""


class EnvCrashError(RuntimeError):
    """An environment raised an exception, broke the API, timed out or died.

    The message has the environment's name, index, step and traceback.
    """

    report: dict[str, Any] | None = None  # what `zhixing reproduce` needs, until it is written to a file


def unknown(kind: str, name: str, allowed: Iterable[str], hint: str = "") -> UserError:
    """Return the error for an unknown name, with the closest allowed names or examples of them."""
    choices = sorted(allowed)
    closest = difflib.get_close_matches(name, choices, n=3, cutoff=0.5)
    if closest:
        advice = f"did you mean {' or '.join(repr(choice) for choice in closest)}?"
    elif not choices and hint:
        return UserError(f"unknown {kind} {name!r} {hint}")
    elif len(choices) <= 12:
        advice = f"allowed: {', '.join(choices) or 'none'}"
    else:
        advice = f"there are {len(choices)}, for example {', '.join(choices[:6])}"
    advice = f"{advice} {hint}" if hint else advice
    return UserError(f"unknown {kind} {name!r}: {advice}")


# --- errors of the operating system ---


SYSTEM_ERRORS = {  # those that users can fix, with advice
    errno.ENOSPC: "free space on the disk",
    errno.EDQUOT: "free space in your quota",
    errno.EIO: "check the disk or the terminal",
    errno.EMFILE: "raise the limit, for example with `ulimit -n 65536`, or use fewer worker processes",
    errno.ENFILE: "close other programs, or raise the system's limit",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.EACCES: "check the permissions",
    errno.EPERM: "check the permissions",
    errno.EROFS: "choose a writable folder",
    errno.ENOMEM: "use fewer environments or worker processes, or close other programs",
    errno.EAGAIN: "use fewer worker processes, or raise the limit `ulimit -u`",
}


def describe_system_error(error: OSError) -> str:
    """Return a message with the file or resource, the reason and advice."""
    fallback = "the output" if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO) else "the system"
    name = fallback if error.filename is None else os.fsdecode(error.filename)
    name = name if len(name) <= 100 else f"{name[:60]}...{name[-30:]}"
    advice = SYSTEM_ERRORS.get(error.errno or 0)
    return f"{name}: {error.strerror}; {advice}" if advice else f"{name} can't be used: {error.strerror}"


# --- output ---


def note(text: str) -> None:
    """Print a note to standard error about something that doesn't stop the program."""
    write_stderr(f"note: {text}")


def write_stderr(text: object, end: str = "\n") -> None:
    """Print a message to standard error, ignoring a full disk, a closed terminal or a broken pipe."""
    write_stream(sys.stderr, translate(str(text)), end)


def write_stream(stream: TextIO | None, text: object, end: str = "\n") -> None:
    """Print to a stream and ignore failures. The stream is None if the program was started with it closed."""
    if stream is not None:
        with suppress(OSError, ValueError, RuntimeError):  # closed, or a signal interrupted another write
            print(text, end=end, file=stream, flush=True)


def escape_unprintable() -> None:
    """Escape characters that the terminal can't print, such as Unicode in an ASCII terminal."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def discard_broken_streams() -> None:
    """Redirect broken streams to the null device, so the interpreter's final flush doesn't fail."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):
            with suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())

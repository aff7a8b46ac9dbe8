"""Files that are whole or not there: the one way in which files are written that others may read."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any


def write_atomically(path: Path, write: Callable[[io.BufferedWriter], Any]) -> None:
    """Write a file under another name, make sure that it is on the disk, then rename it: never a half-written file."""
    aside = path.with_name(f".{path.name}.tmp")
    try:
        aside.unlink(missing_ok=True)
        with open(aside, "xb") as file:  # a new file: one that is there might be another name of something else
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except BaseException:
        with suppress(OSError):
            aside.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)

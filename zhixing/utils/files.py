"""Write files so that other processes, and a restart after a crash, see them complete or not at all."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any


def write_atomically(path: Path, write: Callable[[io.BufferedWriter], Any]) -> None:
    """Call `write` with a temporary file, flush it to the disk, then rename it to `path`."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.unlink(missing_ok=True)
        with open(temporary, "xb") as file:  # x: an existing file might be a link to another one
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # makes the new name durable
    finally:
        os.close(folder)


def bundled_agents() -> Path:
    """Return the folder of the agents that come with zhixing: `agents` in a wheel, `zoo` in a checkout."""
    package = Path(__file__).parents[1]
    return package / "agents" if (package / "agents").is_dir() else package.parent / "zoo"

"""Read and write files: writes are complete or not visible at all, also after a crash."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

MAX_JSON_DEPTH = 100  # of nested lists and objects


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


def parse_json(text: str | bytes, parse_constant: Callable[[str], Any] | None = None) -> Any:
    """Return the value of a JSON text, like `json.loads`. Raises ValueError if it is nested too deeply to process."""
    value = json.loads(text, parse_constant=parse_constant)
    level = [value]
    for _ in range(MAX_JSON_DEPTH + 1):
        nodes = [node.values() if isinstance(node, dict) else node for node in level if isinstance(node, (dict, list))]
        if not nodes:
            return value
        level = [child for children in nodes for child in children]
    raise ValueError(f"it is nested more than {MAX_JSON_DEPTH} levels deep")


def bundled_agents() -> Path:
    """Return the folder of the agents that come with zhixing: `agents` in a wheel, `zoo` in a checkout."""
    package = Path(__file__).parents[1]
    return package / "agents" if (package / "agents").is_dir() else package.parent / "zoo"

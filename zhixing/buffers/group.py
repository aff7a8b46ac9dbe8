"""The replay buffers of a run with several learners, which are saved together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from zhixing.buffers.buffer import Buffer


class BufferGroup:
    """Buffers by name, each saved in its own folder."""

    def __init__(self, buffers: Mapping[str, Buffer]) -> None:
        self.buffers = dict(buffers)

    def save(self, folder: str | Path) -> dict[str, Any]:
        return {name: buffer.save(Path(folder) / name) for name, buffer in self.buffers.items()}

    def load(self, state: Mapping[str, Any], folder: str | Path) -> None:
        for name, buffer in self.buffers.items():
            buffer.load(state[name], Path(folder) / name)

    def prune(self, folder: str | Path, states: Iterable[Mapping[str, Any]]) -> None:
        """Delete what none of these states needs."""
        kept = list(states)
        for name in self.buffers:
            Buffer.prune(Path(folder) / name, [state[name] for state in kept])

    def set_progress(self, fraction: float) -> None:
        for buffer in self.buffers.values():
            buffer.set_progress(fraction)

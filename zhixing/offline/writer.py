"""Record experience during collection: interleaved steps of several environments become consecutive episodes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from zhixing.buffers.fields import SUCCESSORS, BatchValidator
from zhixing.core.batch import Batch
from zhixing.core.spaces import Spaces
from zhixing.core.tree import Tree, tree_map
from zhixing.errors import UserError
from zhixing.offline.actions import to_env
from zhixing.offline.chunks import Array, Chunk, Header
from zhixing.offline.folder_writer import FolderWriter

Leaves = dict[str, list[Array]]


class Writer:
    """Write a dataset in zhixing's own format to a new folder.

    An episode is appended to the files when it ends; until then its steps are in memory. With `max_steps`, exactly that
    many steps are recorded, the last of them possibly from the first columns only. As a context manager, the writer is
    closed at the end; after an exception it removes its files.
    """

    def __init__(
        self,
        folder: str | Path,
        spaces: Spaces,
        env: str | None = None,
        options: Mapping[str, Any] | None = None,
        references: Mapping[str, float] | None = None,
        note: str = "",
        max_steps: int | None = None,
    ) -> None:
        if max_steps is not None and max_steps < 1:
            raise UserError(f"max_steps is {max_steps}; it must be at least 1")
        header = Header(
            spaces=spaces,
            env=env,
            options=dict(options or {}),
            references={kind: float(value) for kind, value in (references or {}).items()},
            note=note,
            name=str(folder),
        )
        self.spaces, self.max_steps = spaces, max_steps
        self._spec = spaces.fields()
        self._validator = BatchValidator(self._spec)
        self._unfinished: dict[int, list[Leaves]] = {}  # pieces of unfinished episodes by column, with successors
        self._finished: list[list[Leaves]] = []  # pieces of each episode to be written
        self._num_steps = 0
        self._closed = False
        self._files = FolderWriter(folder, header)

    def __len__(self) -> int:
        """Return the number of steps so far, including those of unfinished episodes."""
        return self._num_steps

    @property
    def full(self) -> bool:
        return self._num_steps == self.max_steps

    def add(self, batch: Batch, columns: Any = None) -> None:
        """Add steps `[T,N]` as `Actor.collect` returns them: with successors, and actions in the policy's scale.

        `columns` are the numbers of the N streams, by default 0 to N - 1. Fields that the spaces don't have, such as
        those that a learner declares, are left out. If a row doesn't follow from the previous one of its stream, the
        episode so far is recorded as incomplete and a new one begins.
        """
        if self._closed:
            raise UserError(f"the dataset {self._files.folder} is closed; add steps before close()")
        names = [name for name in self._validator.expected if name in batch]
        values, leading = self._validator.validate(batch.select(names))
        if len(leading) != 2:
            raise UserError(f"field 'terminated' has shape {list(leading)}, expected steps of streams [T, N]")
        T, N = leading
        numbers = list(range(N)) if columns is None else [int(column) for column in columns]
        if len(set(numbers)) != N or len(numbers) != N:
            raise UserError(f"columns {numbers} must be {N} distinct numbers, one for each column of the batch")
        values["action"] = [to_env(self.spaces, values["action"][0])]
        room = T * N if self.max_steps is None else min(T * N, self.max_steps - self._num_steps)
        lengths = room // N + (np.arange(N) < room % N)  # steps to record of each column
        boundaries = self._boundaries(values)
        starts = np.zeros(N, np.int64)
        for c, column in enumerate(numbers):
            if lengths[c] and not self._continues(column, values, c):
                self._end_episode(column)
        # in order of time, so episodes are written in the order of their ends
        for t, c in np.argwhere(boundaries & (np.arange(T)[:, None] < lengths)):
            self._keep_piece(numbers[c], values, c, int(starts[c]), int(t) + 1)
            self._end_episode(numbers[c])
            starts[c] = t + 1
        for c, column in enumerate(numbers):
            if starts[c] < lengths[c]:
                self._keep_piece(column, values, c, int(starts[c]), int(lengths[c]), copy=True)
        self._write_finished()
        self._num_steps += room

    def close(self, keep_unfinished: bool = True) -> None:
        """Complete the dataset. Unfinished episodes are recorded as incomplete: neither terminated nor truncated."""
        if self._closed:
            return
        self._closed = True
        with self._files:
            if keep_unfinished:
                for column in sorted(self._unfinished):
                    self._end_episode(column)
            self._write_finished()
        self._unfinished.clear()

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        elif not self._closed:
            self._closed = True
            self._files.abort()

    # --- streams ---

    def _boundaries(self, values: Leaves) -> Array:
        """Return after which steps `[T,N]` the episode ends, or the next row isn't the successor."""
        boundaries: Array = values["terminated"][0] | values["truncated"][0]
        for name in self._validator.obs_fields:
            for value, successor in zip(values[name], values[SUCCESSORS[name]], strict=True):
                differs = value[1:] != successor[:-1]
                boundaries[:-1] |= differs.any(axis=tuple(range(2, differs.ndim)))
        return boundaries

    def _continues(self, column: int, values: Leaves, c: int) -> bool:
        """Return whether the first row of column c of a batch continues the unfinished episode of its stream."""
        pieces = self._unfinished.get(column)
        if not pieces:
            return True
        return all(
            np.array_equal(successor[-1], value[0, c])
            for name in self._validator.obs_fields
            for value, successor in zip(values[name], pieces[-1][SUCCESSORS[name]], strict=True)
        )

    def _keep_piece(self, column: int, values: Leaves, c: int, start: int, stop: int, copy: bool = False) -> None:
        """Keep rows of an unfinished episode. Only the last successor is kept: the others are the next rows."""
        next_fields = {SUCCESSORS[name] for name in self._validator.obs_fields}
        piece = {
            name: [leaf[stop - 1 if name in next_fields else start : stop, c] for leaf in leaves]
            for name, leaves in values.items()
        }
        if copy:  # the next `collect` overwrites the batch
            piece = {name: [leaf.copy() for leaf in leaves] for name, leaves in piece.items()}
        self._unfinished.setdefault(column, []).append(piece)

    def _end_episode(self, column: int) -> None:
        if column in self._unfinished:
            self._finished.append(self._unfinished.pop(column))

    def _write_finished(self) -> None:
        """Write the finished episodes as one chunk."""
        if not self._finished:
            return
        pieces = [piece for episode in self._finished for piece in episode]
        last_pieces = [episode[-1] for episode in self._finished]
        lengths = [sum(len(piece["terminated"][0]) for piece in episode) for episode in self._finished]
        rows = {name: self._join(name, [piece[name] for piece in pieces]) for name in self._spec}
        final_fields = {
            name: self._join(name, [piece[SUCCESSORS[name]] for piece in last_pieces])
            for name in self._validator.obs_fields
        }
        self._finished = []
        self._files.append(Chunk(rows, np.cumsum(lengths) - 1, final_fields))

    def _join(self, name: str, pieces: list[list[Array]]) -> Tree:
        leaves = iter([np.concatenate(parts) for parts in zip(*pieces, strict=True)])
        return tree_map(lambda _: next(leaves), self._spec[name])

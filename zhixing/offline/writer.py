"""Recording experience as it is collected: many interleaved streams become episodes, one behind the other."""

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
from zhixing.offline.actions import to_task
from zhixing.offline.growing import Growing
from zhixing.offline.recording import Array, Chunk, Header

Leaves = dict[str, list[Array]]


class Writer:
    """Writes a dataset in our own format to a new folder.

    An episode is appended to the files when it ends; until then its steps are held in memory. With `max_steps` exactly
    so many are kept: of the step that reaches the limit, those of the first columns. As a context it is closed at the
    end; an exception leaves nothing behind.
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
        self._reader = BatchValidator(self._spec)
        self._followed = [name for name in SUCCESSORS if name in self._spec]
        self._streams: dict[int, list[Leaves]] = {}  # pieces of unfinished episodes, by column, with successors
        self._segments: list[list[Leaves]] = []  # those that are complete, to be written
        self._num_steps = 0
        self._closed = False
        self._files = Growing(folder, header)

    def __len__(self) -> int:
        """Steps taken so far, unfinished episodes' among them."""
        return self._num_steps

    @property
    def full(self) -> bool:
        return self._num_steps == self.max_steps

    def add(self, batch: Batch, columns: Any = None) -> None:
        """Take steps `[T,N]` as `Actor.collect` gives them: actions in the policy's scale, with successors.

        `columns` are the numbers of the N streams, by default 0 to N - 1. Fields that the spaces don't have, such as
        what a learner declared, are left out. Where a stream goes on elsewhere than it was, the piece before is kept
        as a segment of its own.
        """
        if self._closed:
            raise UserError(f"the dataset {self._files.folder} is closed and takes no more steps")
        values, lead = self._reader.validate(batch.select([name for name in self._reader.expected if name in batch]))
        if len(lead) != 2:
            raise UserError(f"field 'terminated' has shape {list(lead)}, expected steps of streams [T, N]")
        T, N = lead
        numbers = list(range(N)) if columns is None else [int(column) for column in columns]
        if len(set(numbers)) != N or len(numbers) != N:
            raise UserError(f"columns {numbers} must be {N} different numbers, one for each column of the batch")
        values["action"] = [to_task(self.spaces, values["action"][0])]
        room = T * N if self.max_steps is None else min(T * N, self.max_steps - self._num_steps)
        lengths = room // N + (np.arange(N) < room % N)  # steps taken of each column
        cuts = self._cuts(values)
        starts = np.zeros(N, np.int64)
        for c, column in enumerate(numbers):
            if lengths[c] and not self._goes_on(column, values, c):
                self._end(column)
        # in the order in which they happened
        for t, c in np.argwhere(cuts & (np.arange(T)[:, None] < lengths)):
            self._hold(numbers[c], values, c, int(starts[c]), int(t) + 1)
            self._end(numbers[c])
            starts[c] = t + 1
        for c, column in enumerate(numbers):
            if starts[c] < lengths[c]:
                self._hold(column, values, c, int(starts[c]), int(lengths[c]), copy=True)
        self._append()
        self._num_steps += room

    def close(self, keep_unfinished: bool = True) -> None:
        """Complete the dataset; unfinished episodes become segments that are neither terminated nor truncated."""
        if self._closed:
            return
        self._closed = True
        with self._files:
            if keep_unfinished:
                for column in sorted(self._streams):
                    self._end(column)
            self._append()
        self._streams.clear()

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

    # ------------------------------------------------------------------ streams

    def _cuts(self, values: Leaves) -> Array:
        """After which steps `[T,N]` a segment is over: the episode ended, or the next row isn't what followed."""
        cuts: Array = values["terminated"][0] | values["truncated"][0]
        for name in self._followed:
            for value, successor in zip(values[name], values[SUCCESSORS[name]], strict=True):
                differs = value[1:] != successor[:-1]
                cuts[:-1] |= differs.any(axis=tuple(range(2, differs.ndim)))
        return cuts

    def _goes_on(self, column: int, values: Leaves, c: int) -> bool:
        """Whether the first row of column c follows what is held of its stream."""
        held = self._streams.get(column)
        if not held:
            return True
        return all(
            np.array_equal(successor[-1], value[0, c])
            for name in self._followed
            for value, successor in zip(values[name], held[-1][SUCCESSORS[name]], strict=True)
        )

    def _hold(self, column: int, values: Leaves, c: int, start: int, stop: int, copy: bool = False) -> None:
        """Of successors only the last one can be needed: the others are the next rows."""
        after = {SUCCESSORS[name] for name in self._followed}
        piece = {
            name: [leaf[stop - 1 if name in after else start : stop, c] for leaf in leaves]
            for name, leaves in values.items()
        }
        if copy:  # the next `collect` writes over the batch
            piece = {name: [leaf.copy() for leaf in leaves] for name, leaves in piece.items()}
        self._streams.setdefault(column, []).append(piece)

    def _end(self, column: int) -> None:
        """What is held of a stream is a segment."""
        if column in self._streams:
            self._segments.append(self._streams.pop(column))

    def _append(self) -> None:
        """Write the segments that are complete, all at once."""
        if not self._segments:
            return
        pieces = [piece for segment in self._segments for piece in segment]
        finals = [segment[-1] for segment in self._segments]
        lengths = [sum(len(piece["terminated"][0]) for piece in segment) for segment in self._segments]
        rows = {name: self._joined(name, [piece[name] for piece in pieces]) for name in self._spec}
        lasts = {name: self._joined(name, [piece[SUCCESSORS[name]] for piece in finals]) for name in self._followed}
        self._segments = []
        self._files.append(Chunk(rows, np.cumsum(lengths) - 1, lasts))

    def _joined(self, name: str, pieces: list[list[Array]]) -> Tree:
        leaves = iter([np.concatenate(parts) for parts in zip(*pieces, strict=True)])
        return tree_map(lambda _: next(leaves), self._spec[name])

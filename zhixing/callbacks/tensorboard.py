"""TensorBoard events beside metrics.csv, with the same figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from zhixing.callbacks.base import Callback, is_due
from zhixing.callbacks.csv import row_is_due, row_of
from zhixing.errors import note

if TYPE_CHECKING:
    from torch import Tensor

    from zhixing.actor import Evaluation
    from zhixing.trainer import Loop


class TensorBoard(Callback):
    """Where the disk takes no more events training goes on without; metrics.csv holds the same figures."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._writer: Any = None  # none before training, and after the disk failed

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._write(lambda writer: writer.close())

    def train_begin(self, loop: Loop) -> None:
        from torch.utils.tensorboard import SummaryWriter  # slow to import

        # events after a checkpoint that a run is resumed from are hidden, so that none shows twice
        again = loop.steps > 0 or any(self.folder.glob("events.out.tfevents.*"))
        try:
            self._writer = SummaryWriter(str(self.folder), purge_step=loop.steps + 1 if again else None)
        except OSError as error:
            self._fail(error)

    def iteration_end(self, loop: Loop, metrics: Mapping[str, Tensor]) -> None:
        if row_is_due(loop):
            self._row(loop)
        if is_due(loop.steps, loop.steps_before, loop.cfg.checkpoint_every_steps):
            self._write(lambda writer: writer.flush())  # what a checkpoint is ahead of is never written again

    def train_end(self, loop: Loop) -> None:
        if not loop.interrupted:
            self._row(loop)

    def _row(self, loop: Loop) -> None:
        row = row_of(loop)
        self._scalars({name: row[name] for name in row if name != "env_steps" and row[name] == row[name]}, loop)

    def evaluation_end(self, loop: Loop, evaluation: Evaluation) -> None:
        self._scalars({f"eval/{name}": value for name, value in evaluation.summary().items()}, loop)

    def _scalars(self, values: Mapping[str, float], loop: Loop) -> None:
        def add(writer: Any) -> None:
            for name, value in values.items():
                writer.add_scalar(name, value, loop.steps)

        self._write(add)

    def _write(self, action: Callable[[Any], None]) -> None:
        if self._writer is not None:
            try:
                action(self._writer)
            except OSError as error:
                self._fail(error)

    def _fail(self, error: OSError) -> None:
        note(f"no more TensorBoard events, {self.folder} can't be written: {error.strerror or error}; training goes on")
        self._writer = None

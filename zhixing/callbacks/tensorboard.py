"""TensorBoard events beside metrics.csv, with the same figures."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from zhixing.callbacks.base import Callback
from zhixing.callbacks.csv import row_is_due, row_of

if TYPE_CHECKING:
    from torch import Tensor

    from zhixing.actor import Evaluation
    from zhixing.trainer import Loop


class TensorBoard(Callback):
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._writer: Any = None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._writer is not None:
            self._writer.close()

    def train_begin(self, loop: Loop) -> None:
        from torch.utils.tensorboard import SummaryWriter  # slow to import

        # events after a checkpoint that a run is resumed from are hidden, so that none shows twice
        self._writer = SummaryWriter(str(self.folder), purge_step=loop.steps + 1 if loop.steps else None)

    def iteration_end(self, loop: Loop, metrics: Mapping[str, Tensor]) -> None:
        if row_is_due(loop):
            self._row(loop)

    def train_end(self, loop: Loop) -> None:
        if not loop.interrupted:
            self._row(loop)

    def _row(self, loop: Loop) -> None:
        for name, value in row_of(loop).items():
            if name != "env_steps" and value == value:
                self._writer.add_scalar(name, value, loop.steps)

    def evaluation_end(self, loop: Loop, evaluation: Evaluation) -> None:
        for name, value in evaluation.summary().items():
            self._writer.add_scalar(f"eval/{name}", value, loop.steps)

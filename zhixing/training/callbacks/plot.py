"""Plot a run while it trains."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from zhixing.errors import UserError, unknown
from zhixing.training.callbacks.base import Callback
from zhixing.training.callbacks.csv import metrics_row

if TYPE_CHECKING:
    from torch import Tensor

    from zhixing.collectors.evaluation import Evaluation
    from zhixing.training.loop import TrainingLoop


class Plot(Callback):
    """Update `plot.png` at each evaluation and at the end, like `zhixing plot RUN --y NAME`.

    It comes after `Csv`, which writes the row of the evaluation first.
    """

    def __init__(self, run: Path, y: str) -> None:
        self.run, self.y = run, y
        self.due = False

    def check(self, loop: TrainingLoop) -> None:
        """Raise `UserError` if metrics.csv has no such column."""
        columns = ["return", *metrics_row(loop)]
        if self.y not in columns:
            raise unknown("column", self.y, columns, "(plot=... takes columns of metrics.csv)")

    def evaluation_end(self, loop: TrainingLoop, evaluation: Evaluation) -> None:
        self.due = True

    def iteration_end(self, loop: TrainingLoop, metrics: Mapping[str, Tensor]) -> None:
        if self.due and not loop.ending:  # the last plot follows the last row
            self._plot(loop)

    def train_end(self, loop: TrainingLoop) -> None:
        if not loop.interrupted:
            self._plot(loop)

    def _plot(self, loop: TrainingLoop) -> None:
        from zhixing.reports.plots import plot  # imports matplotlib, which is slow

        self.due = False
        with loop.paused():
            try:
                plot([self.run], self.run / "plot.png", self.y)
            except UserError:
                """There is nothing to plot before the first episode ends."""

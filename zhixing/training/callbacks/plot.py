"""A picture of a run, drawn by the run itself."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from zhixing.errors import UserError, unknown
from zhixing.training.callbacks.base import Callback
from zhixing.training.callbacks.csv import metrics_row

if TYPE_CHECKING:
    from torch import Tensor

    from zhixing.collect.evaluation import Evaluation
    from zhixing.training.loop import TrainingLoop


class Plot(Callback):
    """Draws `plot.png` anew at each evaluation and at the end, as `zhixing plot RUN --y NAME` does.

    Stands behind `Csv`, which has written the row of the evaluation by then.
    """

    def __init__(self, run: Path, y: str) -> None:
        self.run, self.y = run, y
        self.due = False

    def check(self, loop: TrainingLoop) -> None:
        columns = ["return", *metrics_row(loop)]
        if self.y not in columns:
            raise unknown("column", self.y, columns, "(plot=... draws what metrics.csv logs)")

    def evaluation_end(self, loop: TrainingLoop, evaluation: Evaluation) -> None:
        self.due = True

    def iteration_end(self, loop: TrainingLoop, metrics: Mapping[str, Tensor]) -> None:
        if self.due and not loop.ending:  # else at the end, when the last row is written
            self._draw(loop)

    def train_end(self, loop: TrainingLoop) -> None:
        if not loop.interrupted:
            self._draw(loop)

    def _draw(self, loop: TrainingLoop) -> None:
        from zhixing.report.plots import plot  # matplotlib, which others needn't wait for

        self.due = False
        with loop.paused():
            try:
                plot([self.run], self.run / "plot.png", self.y)
            except UserError:
                """There is nothing to draw yet: no episode has ended."""

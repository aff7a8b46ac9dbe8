"""metrics.csv: a row every `log_every_steps`, and a last one. A resumed run has no row twice and misses none."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from zhixing.callbacks.base import Callback, is_due

if TYPE_CHECKING:
    from torch import Tensor

    from zhixing.actor import Evaluation
    from zhixing.trainer import Loop

COLUMNS = (
    "env_steps",
    "updates",
    "episodes",
    "seconds",
    "steps_per_second",
    "return_mean",
    "length_mean",
    "eval_return_mean",
)


class Csv(Callback):
    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0  # bytes written; what stands behind belongs to steps that a resume does again
        self.eval_return = math.nan  # of the evaluation since the last row
        self.at_env_steps = -1
        self._file: io.FileIO | None = None

    def __enter__(self) -> Csv:
        self._file = open(self.path, "ab", buffering=0)  # closed in __exit__
        self._file.truncate(self.offset)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()

    def train_begin(self, loop: Loop) -> None:
        if self.offset == 0:
            self._write([*COLUMNS, *loop.learner.metrics])

    def evaluation_end(self, loop: Loop, evaluation: Evaluation) -> None:
        self.eval_return = evaluation.mean_return

    def iteration_end(self, loop: Loop, metrics: Mapping[str, Tensor]) -> None:
        if is_due(loop.env_steps, loop.env_steps_before, loop.cfg.log_every_steps):
            self._row(loop)

    def train_end(self, loop: Loop) -> None:
        # an interrupted run gets its last row when it ends for good
        if loop.stop_reason != "interrupted" and (
            self.at_env_steps != loop.env_steps or self.eval_return == self.eval_return
        ):
            self._row(loop)

    def _row(self, loop: Loop) -> None:
        row = row_of(loop)
        row["eval_return_mean"] = self.eval_return
        self._write(["" if value != value else f"{value:.7g}" for value in row.values()])
        self.eval_return, self.at_env_steps = math.nan, loop.env_steps

    def _write(self, cells: list[str]) -> None:
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerow(cells)
        assert self._file is not None
        self._file.write(text.getvalue().encode())
        self.offset = self._file.tell()

    def state_dict(self) -> dict[str, Any]:
        return {"offset": self.offset, "eval_return": self.eval_return, "at_env_steps": self.at_env_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


def row_of(loop: Loop) -> dict[str, float]:
    """The present figures of a run by column; NaN where there is none yet."""
    counts = {
        "env_steps": loop.env_steps,
        "updates": loop.updates,
        "episodes": loop.episodes,
        "seconds": loop.seconds,
        "steps_per_second": loop.env_steps / max(loop.seconds, 1e-9),
        "return_mean": loop.recent_mean("ret"),
        "length_mean": loop.recent_mean("length"),
        "eval_return_mean": math.nan,
    }
    return counts | {
        name: float(loop.metrics[name]) if name in loop.metrics else math.nan for name in loop.learner.metrics
    }

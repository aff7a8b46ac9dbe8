"""metrics.csv: a row every `log_every`, at each evaluation, and a last one. Resumed runs write the same rows.

A metric that is first logged after the first row becomes a new last column. The file is then rewritten, with blank
cells in the earlier rows.
"""

from __future__ import annotations

import csv
import errno
import io
import math
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from zhixing.collectors.evaluation import metric_name
from zhixing.core.state import Count, check_state
from zhixing.errors import UserError, note
from zhixing.training.callbacks.base import Callback
from zhixing.utils.files import write_atomically

if TYPE_CHECKING:
    from torch import Tensor

    from zhixing.collectors.evaluation import Evaluation
    from zhixing.training.loop import TrainingLoop

SAVED = {
    "offset": Count,
    "lines": Count,
    "columns": list[str],
    "eval_return": float,
    "eval_info": dict[str, float],
    "logged": dict[str, float],
    "unwritten": str,
}


class Csv(Callback):
    """Write metrics.csv."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0  # bytes written; a resumed run truncates the file here
        self.eval_return = math.nan  # of an evaluation that has no row yet
        self.eval_info: dict[str, float] = {}  # other columns of that evaluation
        self.columns: list[str] = []
        self.lines = 0  # written, including the header
        self.logged: dict[str, float] = {}  # by `loop.log` since the last row
        self.unwritten = ""  # rows that couldn't be written; they precede the next one
        self._file: io.FileIO | None = None
        self._builtin: set[str] = set()

    def __enter__(self) -> Csv:
        try:
            self._drop_later_columns()
            self._file = open(self.path, "ab", buffering=0)  # closed in __exit__
            self.offset = min(self.offset, os.fstat(self._file.fileno()).st_size)
            self._file.truncate(self.offset)
        except OSError as error:
            raise UserError(f"{self.path} can't be written: {error.strerror or error}") from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()
            if self.unwritten:
                note(f"the last rows of {self.path} couldn't be written; resuming the run writes them")

    def _drop_later_columns(self) -> None:
        """Remove columns added after the checkpoint from which the run is resumed: `offset` counts without them."""
        if not self.columns or not self.offset or not self.path.exists():
            return
        lines = self.path.read_text(encoding="utf-8", errors="replace").splitlines()[: self.lines]
        if lines and lines[0].split(",")[len(self.columns) :]:
            text = "".join(",".join(line.split(",")[: len(self.columns)]) + "\n" for line in lines)
            write_atomically(self.path, lambda file: file.write(text.encode()))

    def train_begin(self, loop: TrainingLoop) -> None:
        if self.offset == 0 and not self.unwritten:
            self.columns = [*metrics_row(loop)]
            self._write(self.columns)
        elif self.offset == 0:
            self.columns = self.unwritten.split("\n")[0].split(",")
        else:  # an older version may have written the header
            with open(self.path, encoding="utf-8") as file:
                self.columns = file.readline().rstrip("\n").split(",")
                self.lines = 1 + sum(1 for _ in file)

    def metric_logged(self, loop: TrainingLoop, name: str, value: float) -> None:
        self._builtin = self._builtin or {*metrics_row(loop)}
        if name in self._builtin:
            raise UserError(f"loop.log({name!r}, ...): metrics.csv already has this column; choose another name")
        self.logged[name] = value

    def evaluation_end(self, loop: TrainingLoop, evaluation: Evaluation) -> None:
        self.eval_return = evaluation.mean_return
        summary = evaluation.summary()
        names = map(metric_name, loop.logged_info_keys)
        self.eval_info = return_range(evaluation.returns, "eval_")
        self.eval_info |= {f"eval_{name}": summary[name] for name in names if name in summary}

    def iteration_end(self, loop: TrainingLoop, metrics: Mapping[str, Tensor]) -> None:
        evaluated = not math.isnan(self.eval_return)
        if row_is_due(loop) or (evaluated and not loop.ending):
            self._row(loop)

    def train_end(self, loop: TrainingLoop) -> None:
        if not loop.interrupted:  # a resumed run writes the last row
            self._row(loop)

    def _row(self, loop: TrainingLoop) -> None:
        new = [name for name in self.logged if name not in self.columns]
        if new:
            self._add_columns(new)
        row = metrics_row(loop) | {"eval_return_mean": self.eval_return, **self.eval_info} | self.logged
        values = [row.get(name, math.nan) for name in self.columns]
        self._write(["" if value != value else f"{value:.7g}" for value in values])
        self.eval_return, self.eval_info = math.nan, {}
        self.logged = {name: value for name, value in self.logged.items() if name not in self.columns}

    def _add_columns(self, names: list[str]) -> None:
        """Rewrite the file with more columns. If that fails, they are added with a later row."""
        assert self._file is not None
        try:
            header, *rows = (self.path.read_bytes()[: self.offset].decode() + self.unwritten).splitlines()
            lines = [",".join([header, *names]), *(row + "," * len(names) for row in rows)]
            text = "".join(line + "\n" for line in lines).encode()
            write_atomically(self.path, lambda file: file.write(text))
            widened = open(self.path, "ab", buffering=0)  # noqa: SIM115 (closed in __exit__)
        except OSError as error:
            note(f"{self.path} can't add the columns {', '.join(names)}: {error.strerror or error}; training continues")
            return
        self._file.close()
        self._file = widened
        self.columns, self.unwritten, self.lines, self.offset = [*self.columns, *names], "", len(lines), len(text)

    def _write(self, cells: list[str]) -> None:
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerow(cells)
        assert self._file is not None
        before, self.unwritten = self.unwritten, self.unwritten + text.getvalue()
        try:
            if self._file.write(self.unwritten.encode()) != len(self.unwritten.encode()):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            with suppress(OSError):
                self._file.truncate(self.offset)  # remove a partial row
            if not before:
                note(f"{self.path} can't be written: {error.strerror or error}; training continues and retries later")
            return
        self.lines += self.unwritten.count("\n")
        self.unwritten = ""
        self.offset = self._file.tell()

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in SAVED}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(check_state("metrics.csv", state, SAVED))


def row_is_due(loop: TrainingLoop) -> bool:
    """Return whether a row is due after this iteration. The last row waits for the final evaluation."""
    return loop.is_due(loop.cfg.log_every) and not loop.ending


def return_range(returns: np.ndarray[Any, Any], prefix: str = "") -> dict[str, float]:
    """Return std, minimum and maximum of the returns of episodes, by column; NaN without episodes."""
    std, lowest, highest = (returns.std(), returns.min(), returns.max()) if len(returns) else (math.nan,) * 3
    columns = {"return_std": float(std), "return_min": float(lowest), "return_max": float(highest)}
    return {f"{prefix}{column}": value for column, value in columns.items()}


def metrics_row(loop: TrainingLoop) -> dict[str, float]:
    """Return the current metrics by column; NaN if there is no value yet."""
    counts = {
        "env_steps": loop.env_steps,
        "updates": loop.updates,
        "episodes": loop.episodes,
        "seconds": loop.seconds,
        "steps_per_second": loop.steps / max(loop.seconds, 1e-9),
        "return_mean": loop.recent_mean("episode_return"),
        "length_mean": loop.recent_mean("length"),
        "eval_return_mean": math.nan,
        **return_range(np.array([episode.episode_return for episode in loop.recent_episodes])),
        **return_range(np.array([]), "eval_"),
    }
    info = {metric_name(name): loop.recent_info_mean(name) for name in loop.logged_info_keys}
    info |= dict.fromkeys([f"eval_{name}" for name in info], math.nan)
    metrics = {name: float(loop.metrics[name]) if name in loop.metrics else math.nan for name in loop.learner.metrics}
    return counts | info | metrics

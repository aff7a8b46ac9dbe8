"""Print progress: a live line in a terminal, a live display in a notebook, otherwise plain lines."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, TextIO

from zhixing.errors import write_stream
from zhixing.training.callbacks.base import Callback
from zhixing.training.callbacks.header import header
from zhixing.utils.notebook import LiveOutput, in_notebook

if TYPE_CHECKING:
    from torch import Tensor

    from zhixing.collectors.evaluation import Evaluation
    from zhixing.training.loop import TrainingLoop


class Progress(Callback):
    """Print a header, then steps, speed, returns, loss and the remaining time.

    A terminal or notebook is updated twice a second; other output gets a line every ten seconds. "train return" is the
    mean of the last 100 training episodes, "eval return" that of the last evaluation.
    """

    def __init__(self, out: TextIO | None = None, folder: Path | None = None) -> None:
        """`folder` is printed in the header. Without it, no header is printed."""
        self.out: TextIO | None = out or sys.stderr  # None if the program was started with stderr closed
        self.folder = folder
        self.notebook = LiveOutput() if out is None and in_notebook() else None
        self.live = self.notebook is not None or (self.out is not None and self.out.isatty())
        self._header = ""
        self.every_seconds = 0.5 if self.live else 10.0
        self._printed_at, self._printed_steps = 0.0, -1
        self._eval = ""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.live and self.notebook is None:
            write_stream(self.out, "")

    def train_begin(self, loop: TrainingLoop) -> None:
        if self.folder is not None:
            at = f"{loop.steps:,} {loop.unit}" if loop.steps else None
            self._header = header(loop.cfg, self.folder, at=at)
            if self.notebook is None:
                write_stream(self.out, self._header, end="")
        self._printed_at = time.monotonic()

    def evaluation_step(self, loop: TrainingLoop) -> None:
        if time.monotonic() - self._printed_at >= self.every_seconds:
            self._print(loop, "  evaluating")

    def evaluation_end(self, loop: TrainingLoop, evaluation: Evaluation) -> None:
        self._eval = f"  eval return {evaluation.mean_return:.4g}"
        self._printed_steps = -1  # the printed line lacks the evaluation

    def iteration_end(self, loop: TrainingLoop, metrics: Mapping[str, Tensor]) -> None:
        if time.monotonic() - self._printed_at >= self.every_seconds:
            self._print(loop)

    def train_end(self, loop: TrainingLoop) -> None:
        if self._printed_steps != loop.steps:
            self._print(loop)

    def _print(self, loop: TrainingLoop, state: str = "") -> None:
        self._printed_at, self._printed_steps = time.monotonic(), -1 if state else loop.steps
        losses = [name for name in loop.learner.metrics if "loss" in name and name in loop.metrics]
        loss = f"  {losses[0].replace('_', ' ')} {float(loop.metrics[losses[0]]):.3g}" if losses else ""
        mean_return = f"{loop.recent_mean('episode_return'):.4g}" if loop.recent_episodes else "-"
        train_return = f"  train return {mean_return}" if not loop.offline else ""
        env_restarts = f"  {loop.num_env_restarts} environments restarted" if loop.num_env_restarts else ""
        worker_restarts = f"  {loop.num_worker_restarts} workers restarted" if loop.num_worker_restarts else ""
        remaining = loop.seconds * (1 / loop.progress - 1) if loop.progress > 0 else 0.0
        line = (
            f"{loop.steps:>9,} {loop.unit} {100 * loop.progress:3.0f}%  {loop.steps / max(loop.seconds, 1e-9):,.0f}/s"
            f"{train_return}{self._eval}{loss}{env_restarts}{worker_restarts}{state}  {_format_time(remaining)} left"
        )
        if self.notebook is not None:
            self.notebook.update(self._header + line, loop.progress)
        else:
            write_stream(self.out, f"\r\x1b[2K{line}" if self.live else line, end="" if self.live else "\n")


def _format_time(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 100:
        return f"{hours // 24:,} days"
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"

"""Base of loggers that send runs to an experiment tracker, which may be on another machine."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from zhixing.errors import note
from zhixing.training.callbacks.scalars import ScalarLogger
from zhixing.utils.importing import check_allowed

if TYPE_CHECKING:
    from zhixing.config import RunConfig
    from zhixing.training.loop import TrainingLoop
    from zhixing.training.run_folder import RunFolder

RunId = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,128}$")]
Status = Literal["finished", "interrupted", "failed"]
RETRY_SECONDS, MAX_RETRY_SECONDS = 60.0, 1_800.0


class Tracker(ScalarLogger):
    """Send scalars, settings and videos to a tracker, and at the end of training the files of the run.

    A resumed run continues the tracker's run, whose id is in the checkpoint. What can't be sent is kept in memory and
    sent later, with pauses of up to half an hour, so a tracker that doesn't answer hardly slows training.
    """

    saved: ClassVar[Mapping[str, Any]] = {**ScalarLogger.saved, "run_id": RunId | None}

    def __init__(self, folder: RunFolder, target: str) -> None:
        """`target` is the setting that names the tracker's server or project."""
        super().__init__()
        check_allowed(target)
        self.folder, self.target = folder, target
        self.run_id: str | None = None
        self.status: Status = "failed"
        self._unsent: deque[Callable[[], None]] = deque()
        self._retry_at, self._retry_seconds, self._noted = 0.0, RETRY_SECONDS, False
        self._started = False

    @abstractmethod
    def start_run(self, cfg: RunConfig) -> None:
        """Start a run, or continue `run_id`, and send the settings."""

    @abstractmethod
    def send(self, values: Mapping[str, float], steps: int, seconds: float) -> None:
        """Send scalars that were logged at a time in seconds since the epoch."""

    @abstractmethod
    def send_video(self, path: Path, steps: int) -> None: ...

    @abstractmethod
    def send_files(self, files: list[Path]) -> None:
        """Send files of the run's folder."""

    @abstractmethod
    def end_run(self) -> None:
        """End the tracker's run with `status`."""

    def train_begin(self, loop: TrainingLoop) -> None:
        self._started, self.status = True, "failed"  # until training has ended
        self._submit(lambda: self.start_run(loop.cfg))

    def write_scalars(self, values: Mapping[str, float], steps: int) -> None:
        seconds = time.time()
        self._submit(lambda: self.send(values, steps, seconds))

    def video_recorded(self, loop: TrainingLoop, path: Path) -> None:
        steps = loop.steps
        with loop.paused():
            self._submit(lambda: self.send_video(path, steps))

    def train_end(self, loop: TrainingLoop) -> None:
        super().train_end(loop)
        self.status = "interrupted" if loop.interrupted else "finished"

    def close(self) -> None:
        if not self._started:
            return
        self._started = False
        if self.status == "finished":
            self._unsent.append(lambda: self.send_files(self.folder.summary_files()))
        self._unsent.append(self.end_run)
        self._retry_at = 0.0
        self._send_unsent()
        if self._unsent:
            note(f"{self.target} didn't receive everything; the complete metrics are in {self.folder.metrics_file}")

    def _submit(self, action: Callable[[], None]) -> None:
        self._unsent.append(action)
        self._send_unsent()

    def _send_unsent(self) -> None:
        if time.monotonic() < self._retry_at:
            return
        try:
            while self._unsent:
                self._unsent[0]()
                self._unsent.popleft()
            self._retry_seconds = RETRY_SECONDS
        except Exception as error:  # trackers raise errors of many libraries
            self._retry_at = time.monotonic() + self._retry_seconds
            self._retry_seconds = min(2.0 * self._retry_seconds, MAX_RETRY_SECONDS)
            if not self._noted:
                self._noted = True
                reason = str(error).strip().split("\n")[0][:300] or type(error).__name__
                note(f"{type(self).__name__} can't log to {self.target}: {reason}; training continues and tries again")

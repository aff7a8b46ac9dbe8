"""One run of a sweep or study, executed in a process that reports its progress.

Executors (executors.py) start jobs and receive their events.
"""

from __future__ import annotations

import shutil
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from zhixing import config
from zhixing.errors import EnvCrashError, UserError, write_stderr
from zhixing.training.callbacks.base import Callback
from zhixing.training.loop import INTERRUPTED, TrainingLoop
from zhixing.training.run_folder import RunFolder
from zhixing.utils.importing import names_in

if TYPE_CHECKING:
    from torch import Tensor

    from zhixing.collectors.evaluation import Evaluation

REPORT_EVERY_SECONDS = 0.5


@dataclass(frozen=True)
class Job:
    """A run to start, or to resume if its folder holds a checkpoint."""

    name: str
    folder: Path
    settings: Mapping[str, Any]  # the complete configuration as plain data: it may be sent to another machine
    prunable: bool = False  # after each evaluation, wait for a decision whether to continue

    @property
    def output(self) -> Path:
        """File of the run's printed output. It lies outside the run folder, whose contents stay as for any run."""
        return self.folder.parent / "output" / f"{self.name}.txt"


class JobEvent(NamedTuple):
    """A message from a job.

    `data` holds `fraction`, `steps` and `mean_return` for `progress` and `evaluation`, `error` for `failed`, and the
    run's result for `done`. A `stopped` job has saved a checkpoint if it had begun to train.
    """

    job: str
    kind: Literal["progress", "evaluation", "done", "failed", "stopped"]
    data: Mapping[str, Any]

    @property
    def is_final(self) -> bool:
        return self.kind in ("done", "failed", "stopped")


# (kind, data) -> whether to continue training; raises OSError if the receiver is gone
Report = Callable[[str, Mapping[str, Any]], bool]


def run_job(job: Job, report: Report) -> dict[str, Any]:
    """Start a run, or resume it from its last checkpoint, and return its result."""
    from zhixing.training.session import Session

    folder, callbacks = RunFolder(job.folder), [ReportProgress(report)]
    if any(folder.checkpoints.glob("[0-9]*.safetensors")):
        return Session.resume(job.folder, callbacks, quiet=True, trust=names_in(job.settings)).run()
    if folder.config_file.exists():  # killed before its first checkpoint: nothing to resume from
        folder.lock()
        shutil.rmtree(job.folder)
        folder.unlock()
    return Session(config.build([job.settings], {}), job.folder, callbacks, quiet=True).run()


class ReportProgress(Callback):
    """Report progress periodically and after each evaluation. If the receiver is gone, stop with a checkpoint."""

    def __init__(self, report: Report) -> None:
        self.report = report
        self._last_report = time.monotonic()

    def iteration_end(self, loop: TrainingLoop, metrics: Mapping[str, Tensor]) -> None:
        if time.monotonic() - self._last_report >= REPORT_EVERY_SECONDS:
            self._send(loop, "progress", loop.recent_mean("episode_return"))

    def evaluation_end(self, loop: TrainingLoop, evaluation: Evaluation) -> None:
        self._send(loop, "evaluation", evaluation.mean_return)

    def _send(self, loop: TrainingLoop, kind: str, mean_return: float) -> None:
        self._last_report = time.monotonic()
        try:
            data = {"fraction": loop.progress, "steps": loop.steps, "mean_return": mean_return}
            keep_training = self.report(kind, {**data, "evaluation": loop.num_intervals(loop.cfg.eval_every)})
        except OSError:
            loop.stop(INTERRUPTED)
            return
        if not keep_training and not loop.ending:
            loop.stop("stopped early")


def run_and_report(job: Job, report: Report) -> tuple[str, Mapping[str, Any]]:
    """Run a job until it ends or fails, and return its final event as (kind, data)."""
    try:
        return "done", run_job(job, report)
    except KeyboardInterrupt:
        return "stopped", {}
    except (UserError, EnvCrashError) as error:
        write_stderr(error)
        return "failed", {"error": str(error)}
    except Exception as error:
        traceback.print_exc()
        return "failed", {"error": f"{type(error).__name__}: {error}"}


def main(fd: int) -> None:
    """Receive a job through a socket and run it. `LocalProcesses` starts processes that call this."""
    parent = Connection(fd)
    job: Job = parent.recv()

    def report(kind: str, data: Mapping[str, Any]) -> bool:
        parent.send((kind, data))
        try:
            return parent.recv() if job.prunable and kind == "evaluation" else True
        except EOFError:
            raise OSError("the parent process is gone") from None

    final = run_and_report(job, report)
    with suppress(OSError):
        parent.send(final)
    parent.close()

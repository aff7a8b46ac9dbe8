"""What happens at the other end of a sweep: one run, told of by name, that tells how it gets on.

It doesn't know who listens, nor from where: see executors.py.
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

    from zhixing.collect.evaluation import Evaluation

TOLD_EVERY_SECONDS = 0.5


@dataclass(frozen=True)
class Job:
    """A run to begin, or to go on with: whatever its folder holds."""

    name: str
    folder: Path
    settings: Mapping[str, Any]  # its whole configuration, plain: it may travel far
    asks: bool = False  # after each evaluation, whether to go on

    @property
    def output(self) -> Path:
        """What the run prints, outside its folder, which is as that of any run."""
        return self.folder.parent / "output" / f"{self.name}.txt"


class JobEvent(NamedTuple):
    """What a job tells. `progress` and `evaluation` tell `fraction`, `steps` and `ret`; `failed` tells `error`; `done`
    tells the run's result. `stopped` left a checkpoint, unless there was nothing to save yet."""

    job: str
    kind: Literal["progress", "evaluation", "done", "failed", "stopped"]
    told: Mapping[str, Any]

    @property
    def last(self) -> bool:
        return self.kind in ("done", "failed", "stopped")


# tells news; returns whether to go on, raises OSError when nobody listens any more
TellNews = Callable[[str, Mapping[str, Any]], bool]


def run_job(job: Job, tell: TellNews) -> dict[str, Any]:
    """Begin a run, or go on with it from its last checkpoint; returns its result."""
    from zhixing.training.session import Session

    folder, told = RunFolder(job.folder), [ReportProgress(tell)]
    if any(folder.checkpoints.glob("[0-9]*.safetensors")):
        return Session.resume(job.folder, told, quiet=True, trust=names_in(job.settings)).run()
    if folder.config_file.exists():  # killed before its first checkpoint: there is nothing in it to go on from
        folder.lock()
        shutil.rmtree(job.folder)
        folder.unlock()
    return Session(config.build([job.settings], {}), job.folder, told, quiet=True).run()


class ReportProgress(Callback):
    """How a run gets on, now and then, and each evaluation; where nobody listens any more it ends with a checkpoint."""

    def __init__(self, tell: TellNews) -> None:
        self.tell = tell
        self._told_at = time.monotonic()

    def iteration_end(self, loop: TrainingLoop, metrics: Mapping[str, Tensor]) -> None:
        if time.monotonic() - self._told_at >= TOLD_EVERY_SECONDS:
            self._tell(loop, "progress", loop.recent_mean("episode_return"))

    def evaluation_end(self, loop: TrainingLoop, evaluation: Evaluation) -> None:
        self._tell(loop, "evaluation", evaluation.mean_return)

    def _tell(self, loop: TrainingLoop, kind: str, ret: float) -> None:
        self._told_at = time.monotonic()
        try:
            go_on = self.tell(kind, {"fraction": loop.progress, "steps": loop.steps, "ret": ret})
        except OSError:
            loop.stop(INTERRUPTED)
            return
        if not go_on and not loop.ending:
            loop.stop("asked not to go on")


def run_and_report(job: Job, tell: Callable[[str, Mapping[str, Any]], bool]) -> tuple[str, Mapping[str, Any]]:
    """Run a job to its end, whatever that is: the last that there is to tell of it."""
    try:
        return "done", run_job(job, tell)
    except KeyboardInterrupt:
        return "stopped", {}
    except (UserError, EnvCrashError) as error:
        write_stderr(error)
        return "failed", {"error": str(error)}
    except Exception as error:
        traceback.print_exc()
        return "failed", {"error": f"{type(error).__name__}: {error}"}


def main(fd: int) -> None:
    """A job that comes through a socket, in a process that `LocalProcesses` started."""
    parent = Connection(fd)
    job: Job = parent.recv()

    def tell(kind: str, told: Mapping[str, Any]) -> bool:
        parent.send((kind, told))
        try:
            return parent.recv() if job.asks and kind == "evaluation" else True
        except EOFError:
            raise OSError("nobody listens any more") from None

    last = run_and_report(job, tell)
    with suppress(OSError):
        parent.send(last)
    parent.close()

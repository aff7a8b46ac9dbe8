"""Many runs at once: each is a job in a process of its own.

`LocalProcesses` starts them on this machine, `RayJobs` (ray_jobs.py) on a Ray cluster. `drive` keeps either busy.
"""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from zhixing.errors import UserError, write_stderr
from zhixing.experiments.jobs import TOLD_EVERY_SECONDS, Job, JobEvent
from zhixing.training.lock import FolderLock
from zhixing.utils.cpus import CPU_COUNT, cpu_count
from zhixing.utils.importing import child_environment

PROGRAM = "import sys; from zhixing.experiments.jobs import main; main(int(sys.argv[1]))"


class Executor(ABC):
    """Starts jobs and brings their news."""

    workers: int  # jobs at once

    @property
    @abstractmethod
    def running(self) -> list[str]:
        """Names of jobs whose last news hasn't come yet."""

    @abstractmethod
    def start(self, job: Job) -> None: ...

    @abstractmethod
    def news(self, seconds: float) -> list[JobEvent]:
        """What has come, after waiting for it so long at most."""

    @abstractmethod
    def answer(self, job: str, go_on: bool) -> None:
        """To a job that asks, after each evaluation that it told."""

    @abstractmethod
    def ask_to_stop(self) -> None:
        """All jobs, each with a checkpoint; their last news still come."""

    @abstractmethod
    def close(self) -> None:
        """End at once what still runs."""


class LocalProcesses(Executor):
    """Fresh interpreters on this machine. They notice when this process is gone, and end with a checkpoint."""

    def __init__(self, workers: int, lock: int) -> None:
        """`lock` is the file that claims the folder of the runs: jobs keep it claimed as long as they run."""
        self.workers, self.lock = workers, lock
        self._processes: dict[str, tuple[subprocess.Popen[bytes], Connection]] = {}
        self._stopping = False

    @property
    def running(self) -> list[str]:
        return list(self._processes)

    def start(self, job: Job) -> None:
        ours, theirs = socket.socketpair()
        job.output.parent.mkdir(parents=True, exist_ok=True)
        with theirs, open(job.output, "ab") as output:
            process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, str(theirs.fileno())],
                pass_fds=(theirs.fileno(), self.lock),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**child_environment(), **self._share(job)},
                start_new_session=True,  # Ctrl-C in a terminal comes to us alone, who then ask each job once
            )
        connection = Connection(ours.detach())
        self._processes[job.name] = (process, connection)
        with suppress(OSError):  # it died at once, which `news` tells
            connection.send(job)

    def _share(self, job: Job) -> dict[str, str]:
        """Each run has a part of the CPUs for its environments; libraries besides torch mustn't take all either."""
        cpus = max(1, cpu_count() // self.workers)
        return {CPU_COUNT: str(cpus), "OMP_NUM_THREADS": str(job.settings["num_threads"])}

    def news(self, seconds: float) -> list[JobEvent]:
        by_connection = {connection: name for name, (_, connection) in self._processes.items()}
        found = []
        for ready in wait(list(by_connection), seconds):
            assert isinstance(ready, Connection)
            name = by_connection[ready]
            try:
                kind, told = ready.recv()
            except (EOFError, OSError):
                kind, told = self._death(name)
            news = JobEvent(name, kind, told)
            if news.last:
                process, _ = self._processes.pop(name)
                ready.close()
                process.wait()
            found.append(news)
        return found

    def _death(self, name: str) -> tuple[str, Mapping[str, Any]]:
        """Of a job that ended without a word."""
        code = self._processes[name][0].wait()
        if self._stopping and code == -signal.SIGTERM:  # it hadn't begun to train
            return "stopped", {}
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return "failed", {"error": f"its process {how}"}

    def answer(self, job: str, go_on: bool) -> None:
        if job in self._processes:
            with suppress(OSError):
                self._processes[job][1].send(go_on)

    def ask_to_stop(self) -> None:
        self._stopping = True
        for process, connection in self._processes.values():
            process.terminate()
            with suppress(OSError):
                connection.send(True)  # one that waits for an answer hears the signal after it

    def close(self) -> None:
        for process, connection in self._processes.values():
            process.kill()
            process.wait()
            connection.close()
        self._processes = {}


def drive(executor: Executor, next_job: Callable[[], Job | None], on_event: Callable[[JobEvent], None]) -> None:
    """Start jobs as long as there are some, and pass on what they tell. Ctrl-C stops all, each with a checkpoint."""
    try:
        more = True
        while more or executor.running:
            while more and len(executor.running) < executor.workers:
                job = next_job()
                more = job is not None
                if job is not None:
                    executor.start(job)
            for news in executor.news(TOLD_EVERY_SECONDS):
                on_event(news)
    except KeyboardInterrupt:
        write_stderr("\nstopping all runs after their present iteration (again to stop at once)")
        executor.ask_to_stop()
        while executor.running:
            for news in executor.news(TOLD_EVERY_SECONDS):
                if news.kind != "evaluation":  # nobody is judged any more
                    on_event(news)
        raise
    finally:
        executor.close()


@contextmanager
def locked(folder: Path, seconds: float = 5.0) -> Iterator[int]:
    """A folder of runs for this process and its jobs alone, since two at the same run would spoil it. Waits a little:
    jobs of one that was killed may still be saving. Gives the file that holds the claim."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FolderLock(folder, seconds)
    except OSError as error:
        raise UserError(f"--out {folder} can't be written: {error.strerror or error}") from None
    try:
        yield lock.fd
    finally:
        lock.drop()  # jobs that still run keep the folder locked


def executor_on(where: str, workers: int | None, lock: int) -> Executor:
    """`local`: processes of this machine; `ray`: a Ray that is started here; else the address of a Ray cluster."""
    if where == "local":
        return LocalProcesses(workers or default_workers(), lock)
    from zhixing.experiments.ray_jobs import RayJobs  # only now: others needn't have it

    return RayJobs(workers or default_workers(), None if where == "ray" else where)


def default_workers() -> int:
    """Half the CPUs: the other half is for environments and for whoever else is there."""
    return max(1, cpu_count() // 2)


class ProgressBoard:
    """Progress of many runs: a live line in a terminal, and one line for each that ended."""

    def __init__(self, total: int, done: int) -> None:
        self.total, self.done, self.failed = total, done, 0
        self.live = sys.stderr is not None and sys.stderr.isatty()
        self._running: dict[str, str] = {}
        self._shown_at = 0.0

    def on_event(self, news: JobEvent, ending: str = "") -> None:
        """`ending` stands behind the name of a run that ended."""
        if not news.last:
            ret = "" if news.told["ret"] != news.told["ret"] else f" {news.told['ret']:.4g}"
            self._running[news.job] = f"{news.job} {100 * news.told['fraction']:.0f}%{ret}"
            self._show()
            return
        self._running.pop(news.job, None)
        self.done += news.kind == "done"
        self.failed += news.kind == "failed"
        self._print(f"{news.kind:8} {news.job}  {ending}", "\n")

    def _show(self) -> None:
        if self.live and time.monotonic() - self._shown_at >= TOLD_EVERY_SECONDS:
            self._shown_at = time.monotonic()
            failed = f", {self.failed} failed" if self.failed else ""
            line = f"{self.done} of {self.total} done{failed}  {'  '.join(self._running.values())}"
            self._print(line[: shutil.get_terminal_size().columns - 1], "")

    def _print(self, line: str, end: str) -> None:
        write_stderr(f"\r\x1b[2K{line}" if self.live else line, end=end)

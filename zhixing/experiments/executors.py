"""Executors run jobs (runs of a sweep or study) in parallel, each in a separate process.

`LocalProcesses` starts them on this machine, `RayJobs` (ray_jobs.py) on a Ray cluster. `run_jobs` drives either one.
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
from zhixing.experiments.jobs import REPORT_EVERY_SECONDS, Job, JobEvent
from zhixing.training.lock import FolderLock
from zhixing.utils.cpus import CPU_COUNT, cpu_count
from zhixing.utils.importing import child_environment
from zhixing.utils.notebook import LiveOutput, in_notebook

PROGRAM = "import sys; from zhixing.experiments.jobs import main; main(int(sys.argv[1]))"


class Executor(ABC):
    """Start jobs and receive their events."""

    workers: int  # number of jobs that run at the same time

    @property
    @abstractmethod
    def running(self) -> list[str]:
        """Return the names of jobs whose final event hasn't been received yet."""

    @abstractmethod
    def start(self, job: Job) -> None: ...

    @abstractmethod
    def poll(self, timeout: float) -> list[JobEvent]:
        """Return the events received, after waiting at most `timeout` seconds for the first."""

    @abstractmethod
    def decide(self, job: str, keep_training: bool) -> None:
        """Send the decision that a prunable job waits for after each evaluation."""

    @abstractmethod
    def request_stop(self) -> None:
        """Ask all jobs to save a checkpoint and stop. Keep polling for their final events."""

    @abstractmethod
    def close(self) -> None:
        """Kill the jobs that still run."""


class LocalProcesses(Executor):
    """Run jobs in new interpreters on this machine. If this process dies, they save a checkpoint and stop."""

    def __init__(self, workers: int, lock: int) -> None:
        """`lock` is the descriptor of the lock on the sweep's folder: jobs inherit it, so they hold the lock too."""
        self.workers, self.lock = workers, lock
        self._processes: dict[str, tuple[subprocess.Popen[bytes], Connection]] = {}
        self._stopping = False

    @property
    def running(self) -> list[str]:
        return list(self._processes)

    def start(self, job: Job) -> None:
        parent_end, child_end = socket.socketpair()
        job.output.parent.mkdir(parents=True, exist_ok=True)
        with child_end, open(job.output, "ab") as output:
            process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, str(child_end.fileno())],
                pass_fds=(child_end.fileno(), self.lock),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**child_environment(), **self._cpu_limits(job)},
                start_new_session=True,  # Ctrl-C in a terminal reaches only this process, which stops each job once
            )
        connection = Connection(parent_end.detach())
        self._processes[job.name] = (process, connection)
        with suppress(OSError):  # the process died at once: `poll` reports it
            connection.send(job)

    def _cpu_limits(self, job: Job) -> dict[str, str]:
        """Return environment variables that give each job its share of the CPUs, also in libraries besides torch."""
        cpus = max(1, cpu_count() // self.workers)
        return {CPU_COUNT: str(cpus), "OMP_NUM_THREADS": str(job.settings["num_threads"])}

    def poll(self, timeout: float) -> list[JobEvent]:
        by_connection = {connection: name for name, (_, connection) in self._processes.items()}
        events = []
        for ready in wait(list(by_connection), timeout):
            assert isinstance(ready, Connection)
            name = by_connection[ready]
            try:
                kind, data = ready.recv()
            except (EOFError, OSError):
                kind, data = self._exit_event(name)
            event = JobEvent(name, kind, data)
            if event.is_final:
                process, _ = self._processes.pop(name)
                ready.close()
                process.wait()
            events.append(event)
        return events

    def _exit_event(self, name: str) -> tuple[str, Mapping[str, Any]]:
        """Return the final event of a job whose process exited without sending one."""
        code = self._processes[name][0].wait()
        if self._stopping and code == -signal.SIGTERM:  # it hadn't begun to train
            return "stopped", {}
        cause = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        return "failed", {"error": f"the process {cause}"}

    def decide(self, job: str, keep_training: bool) -> None:
        if job in self._processes:
            with suppress(OSError):
                self._processes[job][1].send(keep_training)

    def request_stop(self) -> None:
        self._stopping = True
        for process, connection in self._processes.values():
            process.terminate()
            with suppress(OSError):
                connection.send(True)  # a job that waits for a decision acts on the signal only after receiving one

    def close(self) -> None:
        for process, connection in self._processes.values():
            process.kill()
            process.wait()
            connection.close()
        self._processes = {}


def run_jobs(executor: Executor, next_job: Callable[[], Job | None], on_event: Callable[[JobEvent], None]) -> None:
    """Run jobs until `next_job` returns None and all have ended. Ctrl-C stops them, each with a checkpoint."""
    try:
        more = True
        while more or executor.running:
            while more and len(executor.running) < executor.workers:
                job = next_job()
                more = job is not None
                if job is not None:
                    executor.start(job)
            for event in executor.poll(REPORT_EVERY_SECONDS):
                on_event(event)
    except KeyboardInterrupt:
        write_stderr("\nstopping all runs after their current iteration (press Ctrl-C again to stop at once)")
        executor.request_stop()
        while executor.running:
            for event in executor.poll(REPORT_EVERY_SECONDS):
                if event.kind != "evaluation":  # no more decisions about pruning
                    on_event(event)
        raise
    finally:
        executor.close()


@contextmanager
def locked(folder: Path, timeout: float = 5.0) -> Iterator[int]:
    """Lock a sweep's folder for this process and its jobs, and yield the lock's file descriptor.

    Two processes writing the same run would corrupt it. Waits up to `timeout` seconds: jobs of a killed sweep may still
    be saving.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FolderLock(folder, timeout)
    except OSError as error:
        raise UserError(f"can't write to --out {folder}: {error.strerror or error}") from None
    try:
        yield lock.fd
    finally:
        lock.drop()  # jobs that still run keep the folder locked


def make_executor(on: str, workers: int | None, lock: int) -> Executor:
    """Make an executor: `local` processes, a `ray` instance started here, or the Ray cluster at an address."""
    if on == "local":
        return LocalProcesses(workers or default_workers(), lock)
    from zhixing.experiments.ray_jobs import RayJobs  # imported here because Ray is optional

    return RayJobs(workers or default_workers(), None if on == "ray" else on)


def default_workers() -> int:
    """Return half the CPUs: the other half is for environment processes and other programs."""
    return max(1, cpu_count() // 2)


class ProgressBoard:
    """Print the progress of several runs: a line in a terminal or notebook, and a line for each run that ends."""

    def __init__(self, total: int, done: int) -> None:
        self.total, self.done, self.failed = total, done, 0
        self.notebook = LiveOutput() if in_notebook() else None
        self.live = sys.stderr is not None and sys.stderr.isatty()
        self._running: dict[str, str] = {}
        self._last_update = 0.0

    def on_event(self, event: JobEvent, summary: str = "") -> None:
        """`summary` is printed after the name of a run that ended."""
        if not event.is_final:
            mean_return = event.data["mean_return"]
            text = "" if mean_return != mean_return else f" {mean_return:.4g}"
            self._running[event.job] = f"{event.job} {100 * event.data['fraction']:.0f}%{text}"
            self._update_line()
            return
        self._running.pop(event.job, None)
        self.done += event.kind == "done"
        self.failed += event.kind == "failed"
        self._print(f"{event.kind:8} {event.job}  {summary}", "\n")
        if self.notebook is not None:
            self.notebook.update(self._line(), self.done / self.total)

    def _line(self) -> str:
        failed = f", {self.failed} failed" if self.failed else ""
        return f"{self.done} of {self.total} done{failed}  {'  '.join(self._running.values())}"

    def _update_line(self) -> None:
        is_live = self.live or self.notebook is not None
        if not is_live or time.monotonic() - self._last_update < REPORT_EVERY_SECONDS:
            return
        self._last_update = time.monotonic()
        if self.notebook is not None:
            self.notebook.update(self._line(), self.done / self.total)
        else:
            self._print(self._line()[: shutil.get_terminal_size().columns - 1], "")

    def _print(self, line: str, end: str) -> None:
        write_stderr(f"\r\x1b[2K{line}" if self.live else line, end=end)

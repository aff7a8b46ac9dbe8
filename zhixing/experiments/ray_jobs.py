"""Run jobs on Ray, each in a Ray actor. A job's run may itself use Ray workers."""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from typing import Any

from zhixing.distributed.cluster import Cluster
from zhixing.experiments.executors import Executor
from zhixing.experiments.jobs import Job, JobEvent, run_and_report

POLL_SECONDS = 1.0  # how long a remote call waits for a job's next event


class RayJobs(Executor):
    """Run jobs on a Ray cluster, or on a Ray instance started here. All machines must share the folder of the runs.

    Jobs die with the driver process. Rerunning the command resumes them from their last checkpoints.
    """

    def __init__(self, workers: int, address: str | None = None) -> None:
        self.workers = workers
        self.cluster = Cluster(address)
        self.ray = self.cluster.ray
        self._jobs: dict[str, Any] = {}
        self._polls: dict[Any, str] = {}  # pending calls of `RemoteJob.poll` and the names of their jobs
        try:
            cpus = self.cluster.cpus_per_worker(workers)
            self._remote = self.ray.remote(num_cpus=cpus, max_concurrency=4)(RemoteJob)
        except BaseException:
            self.cluster.close()
            raise

    @property
    def running(self) -> list[str]:
        return list(self._jobs)

    def start(self, job: Job) -> None:
        job = replace(job, folder=job.folder.resolve())  # Ray's processes have another working directory
        job.output.parent.mkdir(parents=True, exist_ok=True)
        actor = self._jobs[job.name] = self._remote.remote(job, [entry for entry in sys.path if entry])
        self._start_poll(job.name, actor)

    def _start_poll(self, name: str, actor: Any) -> None:
        self._polls[actor.poll.remote()] = name

    def poll(self, timeout: float) -> list[JobEvent]:
        if not self._polls:
            return []
        ready, _ = self.ray.wait(list(self._polls), num_returns=1, timeout=timeout)
        events: list[JobEvent] = []
        for call in ready:
            name = self._polls.pop(call)
            try:
                messages = self.ray.get(call)
            except self.ray.exceptions.RayError as error:
                messages = [("failed", {"error": f"the process was lost: {str(error).strip().splitlines()[0]}"})]
            job_events = [JobEvent(name, kind, data) for kind, data in messages]
            if any(event.is_final for event in job_events):
                self.ray.kill(self._jobs.pop(name))
            else:
                self._start_poll(name, self._jobs[name])
            events += job_events
        return events

    def decide(self, job: str, keep_training: bool) -> None:
        if job in self._jobs:
            self._jobs[job].decide.remote(keep_training)

    def request_stop(self) -> None:
        for actor in self._jobs.values():
            actor.stop.remote()

    def close(self) -> None:
        for actor in self._jobs.values():
            self.ray.kill(actor)
        self._jobs = {}
        self.cluster.close()


class RemoteJob:
    """Ray actor that runs a job in a thread and answers calls meanwhile."""

    def __init__(self, job: Job, import_path: list[str]) -> None:
        self.job = job
        self._messages: queue.Queue[tuple[str, Mapping[str, Any]]] = queue.Queue()
        self._decisions: queue.Queue[bool] = queue.Queue()
        self._stopping = False
        sys.path += [entry for entry in import_path if entry not in sys.path]
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        try:
            with open(self.job.output, "a") as output, redirect_stdout(output), redirect_stderr(output):
                final = run_and_report(self.job, self._report)
        except OSError as error:
            final = "failed", {"error": f"{error}; all machines must share the folder of the runs"}
        self._messages.put(final)

    def _report(self, kind: str, data: Mapping[str, Any]) -> bool:
        if self._stopping:
            raise OSError("a stop was requested")
        self._messages.put((kind, data))
        if not (self.job.prunable and kind == "evaluation"):
            return True
        keep_training = self._decisions.get()
        if self._stopping:
            raise OSError("a stop was requested")
        return keep_training

    def poll(self) -> list[tuple[str, Mapping[str, Any]]]:
        """Return the messages since the last call, after waiting up to `POLL_SECONDS` for the first."""
        try:
            messages = [self._messages.get(timeout=POLL_SECONDS)]
        except queue.Empty:
            return []
        while not self._messages.empty():
            messages.append(self._messages.get())
        return messages

    def decide(self, keep_training: bool) -> None:
        self._decisions.put(keep_training)

    def stop(self) -> None:
        self._stopping = True
        self._decisions.put(True)  # wakes a job that waits for a decision

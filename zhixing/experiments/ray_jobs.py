"""Jobs of a sweep on Ray: each is an actor there, whose runs may have workers of their own."""

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

POLL_SECONDS = 1.0  # how long a question for news waits at the other end


class RayJobs(Executor):
    """Jobs on a Ray cluster, or one that is started here. All machines must see the folder of the runs.

    A job whose driver is gone goes with it; the same command goes on from its last checkpoint."""

    def __init__(self, workers: int, address: str | None = None) -> None:
        self.workers = workers
        self.cluster = Cluster(address)
        self.ray = self.cluster.ray
        self._jobs: dict[str, Any] = {}
        self._asked: dict[Any, str] = {}  # questions for news
        try:
            cpus = self.cluster.cpus(workers)
            self._remote = self.ray.remote(num_cpus=cpus, max_concurrency=4)(RemoteJob)
        except BaseException:
            self.cluster.close()
            raise

    @property
    def running(self) -> list[str]:
        return list(self._jobs)

    def start(self, job: Job) -> None:
        job = replace(job, folder=job.folder.resolve())  # processes there work elsewhere
        job.output.parent.mkdir(parents=True, exist_ok=True)
        actor = self._jobs[job.name] = self._remote.remote(job, [entry for entry in sys.path if entry])
        self._ask(job.name, actor)

    def _ask(self, name: str, actor: Any) -> None:
        self._asked[actor.news.remote()] = name

    def news(self, seconds: float) -> list[JobEvent]:
        if not self._asked:
            return []
        ready, _ = self.ray.wait(list(self._asked), num_returns=1, timeout=seconds)
        found: list[JobEvent] = []
        for question in ready:
            name = self._asked.pop(question)
            try:
                told = self.ray.get(question)
            except self.ray.exceptions.RayError as error:
                told = [("failed", {"error": f"its process was lost: {str(error).strip().splitlines()[0]}"})]
            heard = [JobEvent(name, kind, what) for kind, what in told]
            if any(news.last for news in heard):
                self.ray.kill(self._jobs.pop(name))
            else:
                self._ask(name, self._jobs[name])
            found += heard
        return found

    def answer(self, job: str, go_on: bool) -> None:
        if job in self._jobs:
            self._jobs[job].answer.remote(go_on)

    def ask_to_stop(self) -> None:
        for actor in self._jobs.values():
            actor.stop.remote()

    def close(self) -> None:
        for actor in self._jobs.values():
            self.ray.kill(actor)
        self._jobs = {}
        self.cluster.close()


class RemoteJob:
    """The run is in a thread of its own; questions are answered beside it."""

    def __init__(self, job: Job, search: list[str]) -> None:
        self.job = job
        self._told: queue.Queue[tuple[str, Mapping[str, Any]]] = queue.Queue()
        self._answers: queue.Queue[bool] = queue.Queue()
        self._stopping = False
        sys.path += [entry for entry in search if entry not in sys.path]
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        try:
            with open(self.job.output, "a") as output, redirect_stdout(output), redirect_stderr(output):
                last = run_and_report(self.job, self._tell)
        except OSError as error:  # a folder that isn't seen from here
            last = "failed", {"error": f"{error}; all machines must see the folder of the runs"}
        self._told.put(last)

    def _tell(self, kind: str, told: Mapping[str, Any]) -> bool:
        if self._stopping:
            raise OSError("asked to stop")
        self._told.put((kind, told))
        if not (self.job.asks and kind == "evaluation"):
            return True
        go_on = self._answers.get()
        if self._stopping:
            raise OSError("asked to stop")
        return go_on

    def news(self) -> list[tuple[str, Mapping[str, Any]]]:
        """What was told since the last question, after waiting a little for it."""
        try:
            found = [self._told.get(timeout=POLL_SECONDS)]
        except queue.Empty:
            return []
        while not self._told.empty():
            found.append(self._told.get())
        return found

    def answer(self, go_on: bool) -> None:
        self._answers.put(go_on)

    def stop(self) -> None:
        self._stopping = True
        self._answers.put(True)

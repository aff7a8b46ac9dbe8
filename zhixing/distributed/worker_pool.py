"""Workers and what they are at: in this process, one after the other, or each in a process on Ray."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from zhixing.distributed.cluster import Cluster
from zhixing.distributed.worker import Setup, Weights, Worker
from zhixing.errors import UserError

MAX_CONSECUTIVE_FAILURES = 5  # deaths of a worker without a result: then another one is no help


class WorkerPool(ABC):
    """`start` gives a worker something to do, `wait` brings what the first one to end has found."""

    here: bool  # in this process, where the same start gives the same end
    lost: int = 0  # workers that died and were replaced

    def __init__(self, setups: Sequence[Setup]) -> None:
        self.setups = list(setups)

    def __len__(self) -> int:
        return len(self.setups)

    @abstractmethod
    def share(self, weights: Weights) -> Any:
        """Weights to `start` with, by many workers."""

    @abstractmethod
    def start(self, worker: int, weights: Any, method: str, *arguments: Any) -> None:
        """Let it take over the weights, unless None, and then call a method of its own."""

    @abstractmethod
    def wait(self) -> tuple[int, Any]:
        """The worker that ended first, and its result."""

    @property
    @abstractmethod
    def pending(self) -> list[tuple[Any, ...]]:
        """What was started and not brought yet, in that order: worker, method and arguments."""

    def call(self, weights: Any, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Let all do it at the same time, each with its own arguments; none may be at work."""
        for worker, own in enumerate(arguments):
            self.start(worker, weights, method, *own)
        found = dict(self.wait() for _ in arguments)
        return [found[worker] for worker in range(len(arguments))]

    @abstractmethod
    def begin_anew(self, incarnations: Sequence[int]) -> None:
        """Workers whose state is lost: others than those before, so that they don't repeat them."""

    @property
    def incarnations(self) -> list[int]:
        return [setup.incarnation for setup in self.setups]

    @abstractmethod
    def close(self) -> None: ...


class LocalCrew(WorkerPool):
    """They take turns in this process: a worker's turn comes when all others before it have had theirs, and it acts
    with the weights of when it was started."""

    here = True

    def __init__(self, setups: Sequence[Setup]) -> None:
        super().__init__(setups)
        self.workers = [Worker(setup) for setup in setups]
        self._tasks: deque[tuple[Any, ...]] = deque()

    def share(self, weights: Weights) -> Weights:
        return weights

    def start(self, worker: int, weights: Any, method: str, *arguments: Any) -> None:
        if weights is not None:
            self.workers[worker].load(weights)
        self._tasks.append((worker, method, *arguments))

    def wait(self) -> tuple[int, Any]:
        worker, method, *arguments = self._tasks.popleft()
        return worker, getattr(self.workers[worker], method)(*arguments)

    @property
    def pending(self) -> list[tuple[Any, ...]]:
        return list(self._tasks)

    def begin_anew(self, incarnations: Sequence[int]) -> None:
        self.close()
        self.setups = [
            replace(setup, incarnation=incarnation)
            for setup, incarnation in zip(self.setups, incarnations, strict=True)
        ]
        self.workers = [Worker(setup) for setup in self.setups]

    def close(self) -> None:
        for worker in self.workers:
            worker.close()


class RayCrew(WorkerPool):
    """Each worker is a Ray actor. One that dies, with its process or its machine, is replaced by another that does what
    it was at; what it had done so far nobody has seen, so nothing counts twice."""

    here = False

    def __init__(self, setups: Sequence[Setup], address: str | None) -> None:
        super().__init__(setups)
        self.cluster = Cluster(address)
        self.ray = self.cluster.ray
        ends = self.ray.exceptions
        self._deaths = (ends.RayActorError, ends.WorkerCrashedError, ends.OutOfMemoryError, ends.ObjectLostError)
        self.handles: list[Any] = [None] * len(setups)  # of those that were started
        try:
            self._remote = self.ray.remote(num_cpus=self.cluster.cpus(len(setups)))(RemoteWorker)
        except BaseException:
            self.cluster.close()
            raise
        self._tasks: dict[Any, tuple[Any, ...]] = {}
        self._strikes = [0] * len(setups)

    def share(self, weights: Weights) -> Any:
        return self.ray.put(weights)

    def start(self, worker: int, weights: Any, method: str, *arguments: Any) -> None:
        if self.handles[worker] is None:
            self.handles[worker] = self._remote.remote(self.setups[worker])
        task = self.handles[worker].do.remote(weights, method, *arguments)
        self._tasks[task] = (worker, weights, method, *arguments)

    def wait(self) -> tuple[int, Any]:
        while True:
            (task,), _ = self.ray.wait(list(self._tasks), num_returns=1)
            worker, weights, method, *arguments = self._tasks.pop(task)
            try:
                found = self.ray.get(task)
            except self._deaths as death:
                self._replace(worker, death)
                self.start(worker, weights, method, *arguments)
            except self.ray.exceptions.RayTaskError as error:
                raise (error.cause if isinstance(error.cause, Exception) else error) from None
            else:
                self._strikes[worker] = 0
                return worker, found

    def _replace(self, worker: int, death: Exception) -> None:
        self._strikes[worker] += 1
        if self._strikes[worker] > MAX_CONSECUTIVE_FAILURES:
            reason = str(death).strip().split("\n")[0]
            raise UserError(f"worker {worker} died {self._strikes[worker]} times in a row; the last time: {reason}")
        self.lost += 1
        self._renew(worker, self.setups[worker].incarnation + 1)

    def _renew(self, worker: int, incarnation: int) -> None:
        self._end(worker)  # it may be only its result that is lost
        self.setups[worker] = replace(self.setups[worker], incarnation=incarnation)

    def _end(self, worker: int) -> None:
        if self.handles[worker] is not None:
            self.ray.kill(self.handles[worker])
            self.handles[worker] = None

    @property
    def pending(self) -> list[tuple[Any, ...]]:
        return [(worker, method, *arguments) for worker, _, method, *arguments in self._tasks.values()]

    def begin_anew(self, incarnations: Sequence[int]) -> None:
        self._tasks.clear()
        for worker, incarnation in enumerate(incarnations):
            self._renew(worker, incarnation)

    def close(self) -> None:
        if self.ray.is_initialized():  # else they are gone already
            for worker in range(len(self)):
                self._end(worker)
        self.cluster.close()


class RemoteWorker(Worker):
    """What Ray starts: weights and work come in one message."""

    def do(self, weights: Weights | None, method: str, *arguments: Any) -> Any:
        if weights is not None:
            self.load(weights)
        return getattr(self, method)(*arguments)

"""Pools of rollout workers: in this process, one after the other, or on Ray, each in its own process."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from zhixing.distributed.cluster import Cluster
from zhixing.distributed.worker import RolloutWorker, Weights, WorkerSpec
from zhixing.errors import UserError

MAX_CONSECUTIVE_FAILURES = 5  # deaths of a worker without a result in between; after that, restarting doesn't help


class Call(NamedTuple):
    """A pending call of a worker's method."""

    worker: int
    method: str
    arguments: tuple[Any, ...]


class WorkerPool(ABC):
    """Workers by index. `submit` starts a call of a worker's method, `wait` returns the first result."""

    num_restarts = 0  # how many workers died and were restarted

    def __init__(self, specs: Sequence[WorkerSpec]) -> None:
        self.specs = list(specs)

    def __len__(self) -> int:
        return len(self.specs)

    @abstractmethod
    def put(self, weights: Weights) -> Any:
        """Return a reference to weights that several calls of `submit` can use."""

    @abstractmethod
    def submit(self, worker: int, weights: Any, method: str, *arguments: Any) -> None:
        """Start a call of a worker's method, after loading `weights` unless they are None."""

    @abstractmethod
    def wait(self) -> tuple[int, Any]:
        """Wait for the first call to finish. Return the index of its worker and its result."""

    @property
    @abstractmethod
    def pending(self) -> list[Call]:
        """The calls whose results `wait` hasn't returned yet, in the order of `submit`."""

    def call_all(self, weights: Any, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call a method of all workers at the same time, each with its own arguments. No call may be pending."""
        for worker, args in enumerate(arguments):
            self.submit(worker, weights, method, *args)
        results = dict(self.wait() for _ in arguments)
        return [results[worker] for worker in range(len(arguments))]

    @abstractmethod
    def state_dicts(self) -> list[dict[str, Any]] | None:
        """Return the states of all workers, or None if calls are pending in other processes: nothing waits for them."""

    @abstractmethod
    def restart_all(self, incarnations: Sequence[int]) -> None:
        """Discard all workers and pending calls, and start new workers with these incarnations."""

    @property
    def incarnations(self) -> list[int]:
        return [spec.incarnation for spec in self.specs]

    @abstractmethod
    def close(self) -> None: ...


class LocalWorkerPool(WorkerPool):
    """Runs workers in this process, one call at a time, in the order of `submit`. Runs are reproducible.

    A worker acts with the weights from the time of `submit`, although its call runs later.
    """

    def __init__(self, specs: Sequence[WorkerSpec]) -> None:
        super().__init__(specs)
        self.workers = [RolloutWorker(spec) for spec in specs]
        self._calls: deque[Call] = deque()

    def put(self, weights: Weights) -> Weights:
        return weights

    def submit(self, worker: int, weights: Any, method: str, *arguments: Any) -> None:
        if weights is not None:
            self.workers[worker].load_weights(weights)
        self._calls.append(Call(worker, method, arguments))

    def wait(self) -> tuple[int, Any]:
        call = self._calls.popleft()
        return call.worker, getattr(self.workers[call.worker], call.method)(*call.arguments)

    @property
    def pending(self) -> list[Call]:
        return list(self._calls)

    def state_dicts(self) -> list[dict[str, Any]]:
        with_policy = bool(self._calls)  # the weights of a pending call may be older than the learner's
        return [worker.state_dict(with_policy) for worker in self.workers]

    def restart_all(self, incarnations: Sequence[int]) -> None:
        self.close()
        self._calls.clear()
        self.specs = [
            replace(spec, incarnation=incarnation) for spec, incarnation in zip(self.specs, incarnations, strict=True)
        ]
        self.workers = [RolloutWorker(spec) for spec in self.specs]

    def close(self) -> None:
        for worker in self.workers:
            worker.close()


class RayWorkerPool(WorkerPool):
    """Runs each worker as a Ray actor.

    If a worker dies, with its process or machine, a new one repeats the pending call. The steps of the unfinished call
    are lost and not counted.
    """

    def __init__(self, specs: Sequence[WorkerSpec], address: str | None) -> None:
        super().__init__(specs)
        self.cluster = Cluster(address)
        self.ray = self.cluster.ray
        errors = self.ray.exceptions
        self._lost_errors = (
            errors.RayActorError,
            errors.WorkerCrashedError,
            errors.OutOfMemoryError,
            errors.ObjectLostError,
        )
        self.handles: list[Any] = [None] * len(specs)  # of the actors; None until the first call
        try:
            cpus = self.cluster.cpus_per_worker(len(specs))
            self._remote = self.ray.remote(num_cpus=cpus)(RayWorker)
        except BaseException:
            self.cluster.close()
            raise
        self._calls: dict[Any, tuple[Call, Any]] = {}  # pending calls and their weights, by Ray's reference to a result
        self._consecutive_failures = [0] * len(specs)

    def put(self, weights: Weights) -> Any:
        return self.ray.put(weights)

    def submit(self, worker: int, weights: Any, method: str, *arguments: Any) -> None:
        if self.handles[worker] is None:
            self.handles[worker] = self._remote.remote(self.specs[worker])
        reference = self.handles[worker].load_and_call.remote(weights, method, *arguments)
        self._calls[reference] = Call(worker, method, arguments), weights

    def wait(self) -> tuple[int, Any]:
        while True:
            (reference,), _ = self.ray.wait(list(self._calls), num_returns=1)
            call, weights = self._calls.pop(reference)
            try:
                result = self.ray.get(reference)
            except self._lost_errors as error:
                self._restart(call.worker, error)
                self.submit(call.worker, weights, call.method, *call.arguments)
            except self.ray.exceptions.RayTaskError as error:
                raise (error.cause if isinstance(error.cause, Exception) else error) from None
            else:
                self._consecutive_failures[call.worker] = 0
                return call.worker, result

    def _restart(self, worker: int, error: Exception) -> None:
        """Replace a lost worker; raise `UserError` if that has failed too often."""
        self._consecutive_failures[worker] += 1
        failures = self._consecutive_failures[worker]
        if failures > MAX_CONSECUTIVE_FAILURES:
            reason = str(error).strip().split("\n")[0]
            raise UserError(f"worker {worker} died {failures} times in a row; the last time: {reason}")
        self.num_restarts += 1
        self._set_incarnation(worker, self.specs[worker].incarnation + 1)

    def _set_incarnation(self, worker: int, incarnation: int) -> None:
        """Kill the worker, so the next call starts a new one."""
        self._kill(worker)  # it may still run if only its result was lost
        self.specs[worker] = replace(self.specs[worker], incarnation=incarnation)

    def _kill(self, worker: int) -> None:
        if self.handles[worker] is not None:
            self.ray.kill(self.handles[worker])
            self.handles[worker] = None

    @property
    def pending(self) -> list[Call]:
        return [call for call, _ in self._calls.values()]

    def state_dicts(self) -> list[dict[str, Any]] | None:
        return None if self._calls else self.call_all(None, "state_dict", [(False,)] * len(self))

    def restart_all(self, incarnations: Sequence[int]) -> None:
        self._calls.clear()
        for worker, incarnation in enumerate(incarnations):
            self._set_incarnation(worker, incarnation)

    def close(self) -> None:
        if self.ray.is_initialized():  # otherwise all actors have ended
            for worker in range(len(self)):
                self._kill(worker)
        self.cluster.close()


class RayWorker(RolloutWorker):
    """A worker as a Ray actor. Weights and call come in one message."""

    def load_and_call(self, weights: Weights | None, method: str, *arguments: Any) -> Any:
        if weights is not None:
            self.load_weights(weights)
        return getattr(self, method)(*arguments)

"""Environments on Ray: each worker has one, or several neighbours, and sends their rows after every step.

The numbers are those of the serial back end. It suits tasks that take long to step or that need a machine of their own:
a step costs a message to each worker and one back.
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import numpy as np

from zhixing.core.tree import Tree, tree_leaves
from zhixing.distributed.cluster import Cluster
from zhixing.envs.crash.failure_policy import IN_A_ROW, INTERRUPTED, FailurePolicy
from zhixing.envs.env_spec import EnvSpec
from zhixing.envs.vector.base import Info, Result, VectorEnv, as_ids, partial_result, result, shown
from zhixing.envs.vector.serial import Factory, name_of
from zhixing.envs.vector.step_buffers import Array, Snapshot, StepBuffers, allocate
from zhixing.envs.vector.sub_env_group import Numbers, State, SubEnvGroup
from zhixing.errors import EnvCrashError

Rows = list[Array]  # of all arrays of some environments, in one order


class EnvWorker:
    """At the other end: neighbouring environments, from `first` to before `last`."""

    def __init__(self, factory: Any, name: str, layout: EnvSpec, first: int, last: int, replace: bool) -> None:
        self.arrays = allocate(layout.spaces, last - first)
        self.make = partial(SubEnvGroup, [factory] * (last - first), layout, self.arrays, first, name, replace=replace)
        self.slots: SubEnvGroup | None = None

    def call(self, method: str, *arguments: Any) -> tuple[Any, Rows]:
        """What a method of the slots returns, and what the environments show after it."""
        if self.slots is None:  # not sooner, so that what goes wrong is told like any other mistake
            self.slots = self.make()
        return getattr(self.slots, method)(*arguments), leaves(self.arrays)

    def step(self, actions: Array) -> tuple[dict[int, Numbers], list[EnvCrashError], Rows]:
        assert self.slots is not None
        self.arrays.action[...] = actions
        ended = self.slots.step()
        crashes, self.slots.crashes = self.slots.crashes, []
        return ended, crashes, leaves(self.arrays, final=bool(ended))


class RayVectorEnv(VectorEnv):
    """A worker that dies is the end of its episodes, and with `on_crash=replace` not of the run."""

    def __init__(
        self,
        factory: Factory,
        num: int,
        workers: int,
        layout: EnvSpec,
        faults: FailurePolicy | None = None,
        address: str | None = None,
    ) -> None:
        self.factory, self.layout, self.faults = factory, layout, faults or FailurePolicy()
        self.logged_info_keys, self.max_episode_steps = layout.logged_info_keys, layout.max_episode_steps
        super().__init__(name_of(factory), layout.spaces, num, "ray", workers)
        self.arrays = allocate(layout.spaces, num)
        self._twin = Snapshot(self.arrays) if self.faults.replace else None
        self._bounds = list(itertools.pairwise(np.linspace(0, num, workers + 1).astype(int).tolist()))
        self._strikes = [0] * workers
        self._seed_of = [None] * num  # type: list[int | None]
        self._lives = [0] * num
        self.cluster = Cluster(address)
        self.ray, self._workers = self.cluster.ray, []  # type: Any, list[Any]
        self._tasks: dict[Any, int] = {}
        self.closed = False
        try:
            cpus = self.cluster.cpus(workers)
            self._remote = self.ray.remote(num_cpus=cpus)(EnvWorker)
            self._workers = [self._worker(*bounds) for bounds in self._bounds]
        except BaseException:
            self.close()
            raise

    def _worker(self, first: int, last: int) -> Any:
        return self._remote.remote(self.factory, self.name, self.layout, first, last, self.faults.replace)

    def reset(self, *, seed: int | None = None, options: State | None = None) -> tuple[Tree, Info]:
        self._seed_of = self._seeds(seed)
        self._call("reset", [(self._seed_of[first:last], options) for first, last in self._bounds])
        return shown(self.arrays)

    def step(self, actions: Array) -> Result:
        self.arrays.action[...] = actions
        if self._twin is not None:
            self._twin.take()
        tasks = [self._start(worker) for worker in range(self.workers)]
        ended: dict[int, Numbers] = {}
        for worker, task in enumerate(tasks):
            ended.update(self._ended(worker, task))
        return result(self.arrays, ended)

    def send(self, actions: Array, ids: Array) -> None:
        wanted = set(as_ids(ids).tolist())
        workers = [worker for worker, (first, _) in enumerate(self._bounds) if first in wanted]
        if wanted != {index for worker in workers for index in range(*self._bounds[worker])}:
            raise ValueError(f"send ids as recv gave them: {sorted(wanted)} are not the environments of whole workers")
        self.arrays.action[ids] = actions
        if self._twin is not None:
            self._twin.take(as_ids(ids))
        for worker in workers:
            self._tasks[self._start(worker)] = worker

    def recv(self, min_ready: int = 1) -> tuple[Array, Tree, Array, Array, Array, Info]:
        sent = sum(last - first for first, last in (self._bounds[worker] for worker in self._tasks.values()))
        if sent < min_ready:
            raise ValueError(f"recv waits for {min_ready} environments, but only {sent} were sent actions")
        ids: list[int] = []
        ended: dict[int, Numbers] = {}
        while len(ids) < min_ready:
            (task,), _ = self.ray.wait(list(self._tasks), num_returns=1)
            worker = self._tasks.pop(task)
            ended.update(self._ended(worker, task))
            ids += range(*self._bounds[worker])
        return partial_result(self.arrays, ended, as_ids(ids))

    def _start(self, worker: int) -> Any:
        first, last = self._bounds[worker]
        return self._workers[worker].step.remote(self.arrays.action[first:last])

    def _ended(self, worker: int, task: Any) -> dict[int, Numbers]:
        try:
            ended, crashes, rows = self._get(worker, task)
        except EnvCrashError as crash:
            self._keep(crash, self.factory)
            if self._twin is None or not isinstance(crash, LostWorkerError) or self._strikes[worker] >= IN_A_ROW:
                raise
            return self._replace(worker, self._twin)
        self._write(worker, rows)
        for survived in crashes:
            self._keep(survived, self.factory)
            self.num_env_restarts += 1
        if any(INTERRUPTED not in numbers for numbers in ended.values()):
            self._strikes[worker] = 0
        return ended

    def _replace(self, worker: int, twin: Snapshot) -> dict[int, Numbers]:
        """Another one for a worker that is gone: the episodes of all its environments are over."""
        first, last = self._bounds[worker]
        self._strikes[worker] += 1
        self._workers[worker] = self._worker(first, last)
        self._lives[first:last] = [incarnation + 1 for incarnation in self._lives[first:last]]
        known = list(zip(self._seed_of[first:last], self._lives[first:last], strict=True))
        _, rows = self._get(worker, self._workers[worker].call.remote("revive", known))
        self._write(worker, rows)
        twin.end(slice(first, last))
        self.num_env_restarts += last - first
        return {index: {INTERRUPTED: True} for index in range(first, last)}

    def _call(self, method: str, arguments: list[Any]) -> list[Any]:
        """Let all workers do it at the same time."""
        tasks = [worker.call.remote(method, *own) for worker, own in zip(self._workers, arguments, strict=True)]
        found = []
        for worker, task in enumerate(tasks):
            try:
                value, rows = self._get(worker, task)
            except EnvCrashError as crash:
                self._keep(crash, self.factory)
                raise
            self._write(worker, rows)
            found.append(value)
        return found

    def _get(self, worker: int, task: Any) -> Any:
        try:
            return self.ray.get(task)
        except self.ray.exceptions.RayTaskError as error:
            raise (error.cause if isinstance(error.cause, Exception) else error) from None
        except self.ray.exceptions.RayError as error:
            first, last = self._bounds[worker]
            indices = str(first) if last == first + 1 else f"{first} to {last - 1}"
            reason = str(error).strip().split("\n")[0]
            raise LostWorkerError(f"the Ray worker of {self.name} (index {indices}) was lost: {reason}") from None

    def _write(self, worker: int, rows: Rows) -> None:
        own = leaves(self.arrays.rows(slice(*self._bounds[worker])))
        for mine, theirs in zip(own, rows, strict=False):  # without `final_*` where no episode ended
            mine[...] = theirs

    def state_dict(self) -> State:
        states = self._call("state", [()] * self.workers)
        return {"kind": "slots", "name": self.name, "num": self.num_envs, "envs": list(itertools.chain(*states))}

    def load_state_dict(self, state: State) -> tuple[Tree, Info]:
        self._check_state(state, "slots")
        self.inexact = list(itertools.chain(*self._call("load", [(state["envs"][a:b],) for a, b in self._bounds])))
        self._seed_of = [slot["seed"] for slot in state["envs"]]
        self._lives = [slot.get("replaced", 0) for slot in state["envs"]]
        self.num_env_restarts = sum(self._lives)
        return shown(self.arrays)

    def render(self, index: int = 0) -> np.ndarray[Any, Any]:  # type: ignore[override]
        worker = next(k for k, (first, last) in enumerate(self._bounds) if first <= index < last)
        return self._get(worker, self._workers[worker].call.remote("render", index))[0]

    def close_extras(self) -> None:
        for worker in self._workers:
            self.ray.kill(worker)
        self.cluster.close()


class LostWorkerError(EnvCrashError):
    """A worker died with its environments."""


def leaves(arrays: StepBuffers, final: bool = True) -> Rows:
    """What is shown first, what episodes showed last behind it."""
    found = [*tree_leaves(arrays.obs), *arrays.beside.values(), arrays.reward, arrays.terminated, arrays.truncated]
    return [*found, *tree_leaves(arrays.final_obs), *arrays.final_beside.values()] if final else found

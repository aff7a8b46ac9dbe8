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
from zhixing.envs.crash.failure_policy import INTERRUPTED, MAX_CONSECUTIVE_FAILURES, FailurePolicy
from zhixing.envs.env_spec import EnvSpec
from zhixing.envs.vector.base import Info, Result, VectorEnv, recv_result, reset_result, sorted_ids, step_result
from zhixing.envs.vector.serial import EnvFn, env_name_of
from zhixing.envs.vector.step_buffers import Array, Snapshot, StepBuffers, allocate
from zhixing.envs.vector.sub_env import ScalarInfo, State
from zhixing.envs.vector.sub_env_group import SubEnvGroup
from zhixing.errors import EnvCrashError

Rows = list[Array]  # of all arrays of some environments, in one order


class EnvWorker:
    """At the other end: neighbouring environments, from `first` to before `last`."""

    def __init__(self, env_fn: Any, name: str, env_spec: EnvSpec, first: int, last: int, replace: bool) -> None:
        self.buffers = allocate(env_spec.spaces, last - first)
        self.make = partial(
            SubEnvGroup, [env_fn] * (last - first), env_spec, self.buffers, first, name, replace=replace
        )
        self.group: SubEnvGroup | None = None

    def call(self, method: str, *arguments: Any) -> tuple[Any, Rows]:
        """What a method of the sub-environments returns, and what the environments show after it."""
        if self.group is None:  # not sooner, so that what goes wrong is told like any other mistake
            self.group = self.make()
        return getattr(self.group, method)(*arguments), leaves(self.buffers)

    def step(self, actions: Array) -> tuple[dict[int, ScalarInfo], list[EnvCrashError], Rows]:
        assert self.group is not None
        self.buffers.action[...] = actions
        ended = self.group.step()
        crashes, self.group.crashes = self.group.crashes, []
        return ended, crashes, leaves(self.buffers, final=bool(ended))


class RayVectorEnv(VectorEnv):
    """A worker that dies is the end of its episodes, and with `on_crash=replace` not of the run."""

    def __init__(
        self,
        env_fn: EnvFn,
        num: int,
        workers: int,
        env_spec: EnvSpec,
        failure_policy: FailurePolicy | None = None,
        address: str | None = None,
    ) -> None:
        self.env_fn, self.env_spec, self.failure_policy = env_fn, env_spec, failure_policy or FailurePolicy()
        self.logged_info_keys, self.max_episode_steps = env_spec.logged_info_keys, env_spec.max_episode_steps
        super().__init__(env_name_of(env_fn), env_spec.spaces, num, "ray", workers)
        self.buffers = allocate(env_spec.spaces, num)
        self._snapshot = Snapshot(self.buffers) if self.failure_policy.replace else None
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
        return self._remote.remote(self.env_fn, self.name, self.env_spec, first, last, self.failure_policy.replace)

    def reset(self, *, seed: int | None = None, options: State | None = None) -> tuple[Tree, Info]:
        self._seed_of = self._seeds(seed)
        self._call("reset", [(self._seed_of[first:last], options) for first, last in self._bounds])
        return reset_result(self.buffers)

    def step(self, actions: Array) -> Result:
        self.buffers.action[...] = actions
        if self._snapshot is not None:
            self._snapshot.take()
        tasks = [self._start(worker) for worker in range(self.workers)]
        ended: dict[int, ScalarInfo] = {}
        for worker, task in enumerate(tasks):
            ended.update(self._ended(worker, task))
        return step_result(self.buffers, ended)

    def send(self, actions: Array, ids: Array) -> None:
        wanted = set(sorted_ids(ids).tolist())
        workers = [worker for worker, (first, _) in enumerate(self._bounds) if first in wanted]
        if wanted != {index for worker in workers for index in range(*self._bounds[worker])}:
            raise ValueError(f"send ids as recv gave them: {sorted(wanted)} are not the environments of whole workers")
        self.buffers.action[ids] = actions
        if self._snapshot is not None:
            self._snapshot.take(sorted_ids(ids))
        for worker in workers:
            self._tasks[self._start(worker)] = worker

    def recv(self, min_ready: int = 1) -> tuple[Array, Tree, Array, Array, Array, Info]:
        sent = sum(last - first for first, last in (self._bounds[worker] for worker in self._tasks.values()))
        if sent < min_ready:
            raise ValueError(f"recv waits for {min_ready} environments, but only {sent} were sent actions")
        ids: list[int] = []
        ended: dict[int, ScalarInfo] = {}
        while len(ids) < min_ready:
            (task,), _ = self.ray.wait(list(self._tasks), num_returns=1)
            worker = self._tasks.pop(task)
            ended.update(self._ended(worker, task))
            ids += range(*self._bounds[worker])
        return recv_result(self.buffers, ended, sorted_ids(ids))

    def _start(self, worker: int) -> Any:
        first, last = self._bounds[worker]
        return self._workers[worker].step.remote(self.buffers.action[first:last])

    def _ended(self, worker: int, task: Any) -> dict[int, ScalarInfo]:
        try:
            ended, crashes, rows = self._get(worker, task)
        except EnvCrashError as crash:
            self._save_crash_report(crash)
            if (
                self._snapshot is None
                or not isinstance(crash, LostWorkerError)
                or self._strikes[worker] >= MAX_CONSECUTIVE_FAILURES
            ):
                raise
            return self._replace(worker, self._snapshot)
        self._write(worker, rows)
        for survived in crashes:
            self._save_crash_report(survived)
            self.num_env_restarts += 1
        if any(INTERRUPTED not in numbers for numbers in ended.values()):
            self._strikes[worker] = 0
        return ended

    def _replace(self, worker: int, snapshot: Snapshot) -> dict[int, ScalarInfo]:
        """Another one for a worker that is gone: the episodes of all its environments are over."""
        first, last = self._bounds[worker]
        self._strikes[worker] += 1
        self._workers[worker] = self._worker(first, last)
        self._lives[first:last] = [incarnation + 1 for incarnation in self._lives[first:last]]
        known = list(zip(self._seed_of[first:last], self._lives[first:last], strict=True))
        _, rows = self._get(worker, self._workers[worker].call.remote("restart", known))
        self._write(worker, rows)
        snapshot.truncate(slice(first, last))
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
                self._save_crash_report(crash)
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
        own = leaves(self.buffers.rows(slice(*self._bounds[worker])))
        for mine, theirs in zip(own, rows, strict=False):  # without `final_*` where no episode ended
            mine[...] = theirs

    def state_dict(self) -> State:
        states = self._call("state", [()] * self.workers)
        return {
            "kind": "sub_envs",
            "name": self.name,
            "num_envs": self.num_envs,
            "envs": list(itertools.chain(*states)),
        }

    def load_state_dict(self, state: State) -> tuple[Tree, Info]:
        self._check_state(state, "sub_envs")
        self.inexact = list(itertools.chain(*self._call("load", [(state["envs"][a:b],) for a, b in self._bounds])))
        self._seed_of = [sub_env["seed"] for sub_env in state["envs"]]
        self._lives = [sub_env["num_restarts"] for sub_env in state["envs"]]
        self.num_env_restarts = sum(self._lives)
        return reset_result(self.buffers)

    def render(self, index: int = 0) -> np.ndarray[Any, Any]:  # type: ignore[override]
        worker = next(k for k, (first, last) in enumerate(self._bounds) if first <= index < last)
        return self._get(worker, self._workers[worker].call.remote("render", index))[0]

    def close_extras(self) -> None:
        for worker in self._workers:
            self.ray.kill(worker)
        self.cluster.close()


class LostWorkerError(EnvCrashError):
    """A worker died with its environments."""


def leaves(buffers: StepBuffers, final: bool = True) -> Rows:
    """What is shown first, what episodes showed last behind it."""
    found = [*tree_leaves(buffers.obs), *buffers.extras.values(), buffers.reward, buffers.terminated, buffers.truncated]
    return [*found, *tree_leaves(buffers.final_obs), *buffers.final_extras.values()] if final else found

"""Environments on Ray: each worker has consecutive environments and sends their results after every step.

The results equal those of the serial back end. A step costs a message to each worker and one back, so this suits
environments that are slow to step or need a separate machine.
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

Rows = list[Array]  # the arrays of `list_arrays` for some environments


class LostWorkerError(EnvCrashError):
    """A worker died, and its environments with it."""


class EnvWorker:
    """Ray actor with the environments from `first` up to, but not including, `last`."""

    def __init__(self, env_fn: Any, name: str, env_spec: EnvSpec, first: int, last: int, replace: bool) -> None:
        self.buffers = allocate(env_spec.spaces, last - first)
        env_fns = [env_fn] * (last - first)
        self._make_group = partial(SubEnvGroup, env_fns, env_spec, self.buffers, first, name, replace=replace)
        self.group: SubEnvGroup | None = None

    def call(self, method: str, *arguments: Any) -> tuple[Any, Rows]:
        """Call a method of `SubEnvGroup`. Return its result and the current rows."""
        if self.group is None:  # made here, so its errors are raised like those of any other call
            self.group = self._make_group()
        return getattr(self.group, method)(*arguments), list_arrays(self.buffers)

    def step(self, actions: Array) -> tuple[dict[int, ScalarInfo], list[EnvCrashError], Rows]:
        assert self.group is not None
        self.buffers.action[...] = actions
        ended = self.group.step()
        crashes, self.group.crashes = self.group.crashes, []
        return ended, crashes, list_arrays(self.buffers, final=bool(ended))


class RayVectorEnv(VectorEnv):
    """Environments in Ray actors.

    With `on_crash=replace`, a new worker replaces one that dies; the episodes of its environments are truncated.
    """

    def __init__(
        self,
        env_fn: EnvFn,
        num_envs: int,
        workers: int,
        env_spec: EnvSpec,
        failure_policy: FailurePolicy | None = None,
        address: str | None = None,
    ) -> None:
        self.env_fn, self.env_spec, self.failure_policy = env_fn, env_spec, failure_policy or FailurePolicy()
        self.logged_info_keys, self.max_episode_steps = env_spec.logged_info_keys, env_spec.max_episode_steps
        super().__init__(env_name_of(env_fn), env_spec.spaces, num_envs, "ray", workers)
        self.buffers = allocate(env_spec.spaces, num_envs)
        self._snapshot = Snapshot(self.buffers) if self.failure_policy.replace else None
        # per worker: the indices of its environments, as (first, last + 1)
        self._bounds = list(itertools.pairwise(np.linspace(0, num_envs, workers + 1).astype(int).tolist()))
        self._consecutive_failures = [0] * workers
        self._env_seeds: list[int | None] = [None] * num_envs  # of the last reset
        self._env_restarts = [0] * num_envs
        self.cluster = Cluster(address)
        self.ray = self.cluster.ray
        self._workers: list[Any] = []
        self._pending: dict[Any, int] = {}  # steps started by `send`: Ray's references to the results, and workers
        self.closed = False
        try:
            cpus = self.cluster.cpus_per_worker(workers)
            self._remote = self.ray.remote(num_cpus=cpus)(EnvWorker)
            self._workers = [self._start_worker(*bounds) for bounds in self._bounds]
        except BaseException:
            self.close()
            raise

    def _start_worker(self, first: int, last: int) -> Any:
        return self._remote.remote(self.env_fn, self.name, self.env_spec, first, last, self.failure_policy.replace)

    def reset(self, *, seed: int | None = None, options: State | None = None) -> tuple[Tree, Info]:
        self._env_seeds = self._seeds(seed)
        self._call_all("reset", [(self._env_seeds[first:last], options) for first, last in self._bounds])
        return reset_result(self.buffers)

    def step(self, actions: Array) -> Result:
        self.buffers.action[...] = self.spaces.flatten_action(actions)
        if self._snapshot is not None:
            self._snapshot.take()
        references = [self._start_step(worker) for worker in range(self.workers)]
        ended: dict[int, ScalarInfo] = {}
        for worker, reference in enumerate(references):
            ended.update(self._receive_step(worker, reference))
        return step_result(self.buffers, ended)

    def send(self, actions: Array, ids: Array) -> None:
        indices = set(sorted_ids(ids).tolist())
        workers = [worker for worker, (first, _) in enumerate(self._bounds) if first in indices]
        if indices != {index for worker in workers for index in range(*self._bounds[worker])}:
            raise ValueError(f"ids {sorted(indices)} are not all environments of some workers; send ids as from recv")
        self.buffers.action[ids] = self.spaces.flatten_action(actions)
        if self._snapshot is not None:
            self._snapshot.take(sorted_ids(ids))
        for worker in workers:
            self._pending[self._start_step(worker)] = worker

    def recv(self, min_ready: int = 1) -> tuple[Array, Tree, Array, Array, Array, Info]:
        num_sent = sum(last - first for first, last in (self._bounds[worker] for worker in self._pending.values()))
        if num_sent < min_ready:
            raise ValueError(f"recv needs {min_ready} environments, but actions were sent to {num_sent}")
        ids: list[int] = []
        ended: dict[int, ScalarInfo] = {}
        while len(ids) < min_ready:
            (reference,), _ = self.ray.wait(list(self._pending), num_returns=1)
            worker = self._pending.pop(reference)
            ended.update(self._receive_step(worker, reference))
            ids += range(*self._bounds[worker])
        return recv_result(self.buffers, ended, sorted_ids(ids))

    def _start_step(self, worker: int) -> Any:
        first, last = self._bounds[worker]
        return self._workers[worker].step.remote(self.buffers.action[first:last])

    def _receive_step(self, worker: int, reference: Any) -> dict[int, ScalarInfo]:
        """Wait for a worker to finish its step, and replace it if it is lost and the policy allows it.

        Return the last info of ended episodes, by index.
        """
        try:
            ended, crashes, rows = self._get(worker, reference)
        except EnvCrashError as crash:
            self._save_crash_report(crash)
            may_retry = self._consecutive_failures[worker] < MAX_CONSECUTIVE_FAILURES
            if self._snapshot is None or not isinstance(crash, LostWorkerError) or not may_retry:
                raise
            return self._replace_worker(worker, self._snapshot)
        self._write_rows(worker, rows)
        for handled in crashes:
            self._save_crash_report(handled)
            self.num_env_restarts += 1
        if any(INTERRUPTED not in final_info for final_info in ended.values()):
            self._consecutive_failures[worker] = 0
        return ended

    def _replace_worker(self, worker: int, snapshot: Snapshot) -> dict[int, ScalarInfo]:
        """Replace a lost worker, which interrupts the episodes of all its environments."""
        first, last = self._bounds[worker]
        self._consecutive_failures[worker] += 1
        self._workers[worker] = self._start_worker(first, last)
        self._env_restarts[first:last] = [count + 1 for count in self._env_restarts[first:last]]
        seeds_and_restarts = list(zip(self._env_seeds[first:last], self._env_restarts[first:last], strict=True))
        _, rows = self._get(worker, self._workers[worker].call.remote("restart", seeds_and_restarts))
        self._write_rows(worker, rows)
        snapshot.truncate(slice(first, last))
        self.num_env_restarts += last - first
        return {index: {INTERRUPTED: True} for index in range(first, last)}

    def _call_all(self, method: str, arguments: list[tuple[Any, ...]]) -> list[Any]:
        """Call a method of `SubEnvGroup` in all workers at the same time, each with its own arguments."""
        references = [worker.call.remote(method, *args) for worker, args in zip(self._workers, arguments, strict=True)]
        results = []
        for worker, reference in enumerate(references):
            try:
                result, rows = self._get(worker, reference)
            except EnvCrashError as crash:
                self._save_crash_report(crash)
                raise
            self._write_rows(worker, rows)
            results.append(result)
        return results

    def _get(self, worker: int, reference: Any) -> Any:
        """Wait for a result. Raise the error of the call, or `LostWorkerError`."""
        try:
            return self.ray.get(reference)
        except self.ray.exceptions.RayTaskError as error:
            raise (error.cause if isinstance(error.cause, Exception) else error) from None
        except self.ray.exceptions.RayError as error:
            first, last = self._bounds[worker]
            indices = str(first) if last == first + 1 else f"{first} to {last - 1}"
            reason = str(error).strip().split("\n")[0]
            raise LostWorkerError(f"the Ray worker of {self.name} (index {indices}) was lost: {reason}") from None

    def _write_rows(self, worker: int, rows: Rows) -> None:
        targets = list_arrays(self.buffers.rows(slice(*self._bounds[worker])))
        for target, source in zip(targets, rows, strict=False):  # `rows` has no final values if no episode ended
            target[...] = source

    def state_dict(self) -> State:
        states = self._call_all("state", [()] * self.workers)
        envs = list(itertools.chain(*states))
        return {"kind": "sub_envs", "name": self.name, "num_envs": self.num_envs, "envs": envs}

    def load_state_dict(self, state: State) -> tuple[Tree, Info]:
        self._check_state(state, "sub_envs")
        envs = state["envs"]
        inexact = self._call_all("load", [(envs[first:last],) for first, last in self._bounds])
        self.inexact = list(itertools.chain(*inexact))
        self._env_seeds = [env["seed"] for env in envs]
        self._env_restarts = [env["num_restarts"] for env in envs]
        self.num_env_restarts = sum(self._env_restarts)
        return reset_result(self.buffers)

    def render(self, index: int = 0) -> np.ndarray[Any, Any]:  # type: ignore[override]
        worker = next(k for k, (first, last) in enumerate(self._bounds) if first <= index < last)
        return self._get(worker, self._workers[worker].call.remote("render", index))[0]

    def close_extras(self) -> None:
        for worker in self._workers:
            self.ray.kill(worker)
        self.cluster.close()


def list_arrays(buffers: StepBuffers, final: bool = True) -> Rows:
    """Return the results of a step in a fixed order; with `final`, also the last values of episodes, at the end."""
    flags = [buffers.reward, buffers.terminated, buffers.truncated, *buffers.info.values()]
    current = [*tree_leaves(buffers.obs), *buffers.extras.values(), *flags]
    return [*current, *tree_leaves(buffers.final_obs), *buffers.final_extras.values()] if final else current

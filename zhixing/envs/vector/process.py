"""Environments in worker processes, several per worker, with all arrays of a step in shared memory.

A step costs one byte to each worker and one back. Workers are fresh interpreters: they are safe to start from a program
with threads, don't import torch, and need no `if __name__ == "__main__"` in scripts.

In the back end `mixed`, this process is the first of the workers: fewer processes have to be woken, and this one isn't
idle while the others work. It gives no protection: an environment that kills its process kills the training process.
"""

from __future__ import annotations

import itertools
import mmap
import os
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import wait
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import numpy as np

from zhixing.core.tree import Tree
from zhixing.envs.crash.failure_policy import INTERRUPTED, MAX_CONSECUTIVE_FAILURES, FailurePolicy
from zhixing.envs.env_spec import EnvSpec
from zhixing.envs.vector.action_log import ActionLog, action_log_bytes
from zhixing.envs.vector.backend_choice import Timing, default_workers
from zhixing.envs.vector.base import Info, Result, VectorEnv, recv_result, reset_result, sorted_ids, step_result
from zhixing.envs.vector.inline_worker import InlineWorker
from zhixing.envs.vector.orphans import kill_marked
from zhixing.envs.vector.serial import EnvFn, env_name_of, infer_env_spec
from zhixing.envs.vector.step_buffers import Array, Snapshot, allocate, shared_bytes
from zhixing.envs.vector.sub_env import ScalarInfo, State
from zhixing.envs.vector.sub_env_group import SubEnvGroup
from zhixing.envs.vector.worker import SPIN_SECONDS, WorkerSetup
from zhixing.envs.vector.worker_process import CLOSE_SECONDS, WorkerProcess
from zhixing.errors import EnvCrashError, UserError, note
from zhixing.utils import importing
from zhixing.utils.cpus import cpu_count

Worker = WorkerProcess | InlineWorker
CLOSE_SECONDS_PER_WORKER = 0.2  # in addition to CLOSE_SECONDS: many workers share few CPUs
MANY_WORKERS_PER_CPU = 16  # starting more takes so long that a note is printed


class ProcessVectorEnv(VectorEnv):
    """Environments in worker processes. With `workers=None`, timing some steps determines the number of workers.

    Except with `mixed`, no code of the environment runs in this process: a worker infers the `EnvSpec` from a temporary
    environment.
    """

    def __init__(
        self,
        env_fn: EnvFn,
        num_envs: int,
        workers: int | None,
        env_spec: EnvSpec | None = None,
        failure_policy: FailurePolicy | None = None,
        *,
        mixed: bool = False,
    ) -> None:
        if workers is not None and not 1 <= workers <= num_envs:
            raise UserError(f"workers is {workers}; it must be from 1 to num_envs ({num_envs})")
        self.env_fn, self.failure_policy = env_fn, failure_policy or FailurePolicy()
        self.name, self.num_envs, self.backend = env_name_of(env_fn), num_envs, "mixed" if mixed else "process"
        self._pickled_env_fn = _pickle_env_fn(env_fn, self.name)
        self._workers: list[Worker] = []
        self._memory_fd = _create_shared_memory()
        self.closed = False
        try:
            if mixed:
                env_spec = env_spec or infer_env_spec(env_fn)
            workers = self._start_and_allocate(env_spec, workers, mixed)
            super().__init__(self.name, self.env_spec.spaces, num_envs, self.backend, workers)
            self.metadata["render_fps"] = self.env_spec.render_fps
            self._make_envs(mixed)
        except BaseException as error:
            if isinstance(error, EnvCrashError):
                self._save_crash_report(error)
            for worker in self._workers:
                worker.kill()
            self.close()
            raise

    def _start_and_allocate(self, env_spec: EnvSpec | None, workers: int | None, mixed: bool) -> int:
        """Start the processes and allocate the shared memory. Return the number of workers."""
        started = self._start_processes((workers or 1) - mixed)
        if env_spec is None:
            first = started[0]
            first.drain()
            importing.approved.update(first.call("make_probe_env", self._pickled_env_fn, self.name))
            env_spec = first.call("describe_probe_env")
            self._allocate(env_spec, mixed, workers)
            if workers is None:
                first.action_log = self._action_log
                timing: Timing = first.call("time_probe_env", self._worker_setup(0, 1))
                workers = default_workers(self.num_envs, timing.waits)
            first.call("close_probe_env")
            self._start_processes(workers - len(started))
        else:
            self._allocate(env_spec, mixed, workers)
        assert workers is not None
        return workers

    def _allocate(self, env_spec: EnvSpec, mixed: bool, workers: int | None) -> None:
        spaces, num_envs = env_spec.spaces, self.num_envs
        self.env_spec = env_spec
        self.logged_info_keys, self.max_episode_steps = env_spec.logged_info_keys, env_spec.max_episode_steps
        # if each worker has its own CPU, polling for a short time saves waking those that have just worked
        self._spin_seconds = SPIN_SECONDS if mixed and workers is not None and workers <= cpu_count() else 0.0
        self._action_log_offset = shared_bytes(spaces, num_envs)
        self._memory_bytes = self._action_log_offset + action_log_bytes(spaces, num_envs)
        os.ftruncate(self._memory_fd, self._memory_bytes)
        memory = mmap.mmap(self._memory_fd, self._memory_bytes)
        self.buffers = allocate(spaces, num_envs, memory)
        self._action_log = ActionLog(spaces, num_envs, memory, self._action_log_offset)
        self._snapshot = Snapshot(self.buffers) if self.failure_policy.replace else None

    def _make_envs(self, mixed: bool) -> None:
        """Make the environments in all workers at the same time."""
        num_envs, workers = self.num_envs, self.workers
        bounds = [-(-num_envs * i // workers) for i in range(workers + 1)]  # the first workers get one more, if any
        processes = [worker for worker in self._workers if isinstance(worker, WorkerProcess)]
        for process, (first, last) in zip(processes, itertools.pairwise(bounds[mixed:]), strict=True):
            process.drain()
            process.start_open(self._worker_setup(first, last), self._action_log)
        if mixed:  # while the other workers start
            count = bounds[1]
            rows = self.buffers.rows(slice(0, count))
            group = SubEnvGroup([self.env_fn] * count, self.env_spec, rows, 0, self.name)
            self._workers.insert(0, InlineWorker(group))
        for worker in self._workers:
            worker.drain()

    def _start_processes(self, count: int) -> list[WorkerProcess]:
        """Start `count` more worker processes."""
        # the kernel kills a worker when the thread that started it ends: only the main thread lives long enough
        in_main_thread = threading.current_thread() is threading.main_thread()
        started: list[WorkerProcess] = []
        total = len(self._workers) + count
        if count > MANY_WORKERS_PER_CPU * cpu_count():
            note(f"starting {count} worker processes on {cpu_count()} CPUs takes a while")
        for _ in range(count):
            try:
                worker = WorkerProcess(self.name, self._memory_fd, self.failure_policy, die_with_parent=in_main_thread)
            except OSError as error:
                raise UserError(
                    f"worker process {len(self._workers) + 1} of {total} can't be started: {error.strerror}; use fewer "
                    f"(vector.workers), or raise the limits of open files and processes (ulimit -n, ulimit -u)"
                ) from error
            self._workers.append(worker)
            started.append(worker)
        return started

    def _worker_setup(self, first: int, last: int) -> WorkerSetup:
        return WorkerSetup(
            env_fn=self._pickled_env_fn,
            name=self.name,
            env_spec=self.env_spec,
            num_envs=self.num_envs,
            first=first,
            last=last,
            memory_bytes=self._memory_bytes,
            action_log_offset=self._action_log_offset,
            replace=self.failure_policy.replace,
            spin_seconds=self._spin_seconds,
        )

    def reset(self, *, seed: int | None = None, options: State | None = None) -> tuple[Tree, Info]:
        seeds = self._seeds(seed)
        for worker in self._workers:
            worker.drain()
            with suppress(EnvCrashError):  # if the worker is gone, `receive` reports it
                worker.start_call("reset", (seeds[worker.first : worker.last], options))
        for worker in tuple(self._workers):
            try:
                worker.receive()
            except EnvCrashError as crash:
                self._save_crash_report(crash)
                if self._snapshot is None or not worker.lost or options is not None:
                    raise
                self._replace_worker(worker, self._snapshot, seeds[worker.first : worker.last])
        return reset_result(self.buffers)

    def step(self, actions: Array) -> Result:
        self._check_idle(self._workers)
        self.buffers.action[...] = self.spaces.flatten_action(actions)
        if self._snapshot is not None:
            self._snapshot.take()
        for worker in self._workers:
            worker.start_step()
        return step_result(self.buffers, self._finish_steps(self._workers))

    def send(self, actions: Array, ids: Array) -> None:
        indices = set(sorted_ids(ids).tolist())
        workers = [worker for worker in self._workers if worker.first in indices]
        if indices != {index for worker in workers for index in range(worker.first, worker.last)}:
            raise ValueError(f"ids {sorted(indices)} are not all environments of some workers; send ids as from recv")
        self._check_idle(workers)
        self.buffers.action[ids] = self.spaces.flatten_action(actions)
        if self._snapshot is not None:
            self._snapshot.take(sorted_ids(ids))  # not all rows: other workers may be writing theirs
        for worker in workers:
            worker.start_step()

    def recv(self, min_ready: int = 1) -> tuple[Array, Tree, Array, Array, Array, Info]:
        busy = [worker for worker in self._workers if worker.busy]
        num_sent = sum(worker.last - worker.first for worker in busy)
        if num_sent < min_ready:
            raise ValueError(f"recv needs {min_ready} environments, but actions were sent to {num_sent}")
        ids: list[int] = []
        ended: dict[int, ScalarInfo] = {}
        while len(ids) < min_ready:
            for worker in _wait_for_workers(busy):
                busy.remove(worker)
                ended.update(self._finish_steps([worker]))
                ids += range(worker.first, worker.last)
        return recv_result(self.buffers, ended, sorted_ids(ids))

    def state_dict(self) -> State:
        states = self._call_all("state", [()] * self.workers)
        envs = list(itertools.chain(*states))
        return {"kind": "sub_envs", "name": self.name, "num_envs": self.num_envs, "envs": envs}

    def load_state_dict(self, state: State) -> tuple[Tree, Info]:
        self._check_state(state, "sub_envs")
        envs = state["envs"]
        parts = [envs[worker.first : worker.last] for worker in self._workers]
        # restoring an environment may repeat all its actions
        num_steps = [sum(len(env["actions"]) for env in part if env["actions"] is not None) for part in parts]
        inexact = self._call_all("load", [(part,) for part in parts], num_steps)
        self.inexact = list(itertools.chain(*inexact))
        self.num_env_restarts = sum(env["num_restarts"] for env in envs)
        return reset_result(self.buffers)

    def render(self, index: int = 0) -> np.ndarray[Any, Any]:  # type: ignore[override]
        worker = next(worker for worker in self._workers if worker.first <= index < worker.last)
        return _call(worker, "render", index)

    def goal_functions(self) -> list[str]:
        return list(_call(self._workers[0], "goal_functions"))

    def compute(self, name: str, achieved: Array, desired: Array, info: State) -> Array:
        """Call a goal function of the first environment; `info` has arrays [B,...]."""
        return np.asarray(_call(self._workers[0], "compute", name, achieved, desired, info))

    def close_extras(self) -> None:
        for worker in self._workers:
            worker.close_pipes()
        deadline = time.monotonic() + CLOSE_SECONDS + CLOSE_SECONDS_PER_WORKER * len(self._workers)
        for worker in self._workers:
            worker.join(max(0.0, deadline - time.monotonic()))
        kill_marked([worker.mark for worker in self._workers if isinstance(worker, WorkerProcess)])
        os.close(self._memory_fd)

    def start_recorded_episode(self, seed: int | None, origin: State) -> None:
        """Start the episode of the only environment in the same way as a recorded one."""
        self._call_all("start_recorded_episode", [(seed, origin)])

    def _call_all(self, method: str, arguments: list[Any], num_steps: list[int] | None = None) -> list[Any]:
        """Call a method in all workers at the same time, each with its own arguments."""
        try:
            for worker in self._workers:
                worker.drain()
            for worker, args, count in zip(self._workers, arguments, num_steps or [0] * self.workers, strict=True):
                worker.start_call(method, args, count)
            return [worker.receive() for worker in self._workers]
        except EnvCrashError as crash:
            self._save_crash_report(crash)
            raise

    def _finish_steps(self, workers: list[Worker]) -> dict[int, ScalarInfo]:
        """Wait for consecutive workers to finish their steps. Return the last info of ended episodes, by index."""
        ended: dict[int, ScalarInfo] = {}
        # the last worker to start is mostly the last to finish: waiting for it first takes one sleep, not several
        for worker in (workers[0], *reversed(workers[1:])):
            worker_ended = self._receive_step(worker)
            if worker_ended is not None:
                ended.update(worker_ended)
        # workers don't reply with episodes that have no numbers in their last info: find them in the flags
        first, last = workers[0].first, workers[-1].last
        flags = self.buffers.terminated[first:last] | self.buffers.truncated[first:last]
        if 1 in flags.tobytes():
            for row in flags.nonzero()[0].tolist():
                ended.setdefault(first + row, {})
        for worker in workers:
            if worker.consecutive_failures and any(
                index in ended and INTERRUPTED not in ended[index] for index in range(worker.first, worker.last)
            ):
                worker.consecutive_failures = 0
        return ended

    def _receive_step(self, worker: Worker) -> dict[int, ScalarInfo] | None:
        """Wait for a worker to finish its step, and replace it if it is lost and the policy allows it."""
        try:
            reply = worker.receive()
        except EnvCrashError as crash:
            self._save_crash_report(crash)
            if self._snapshot is None or not worker.lost or worker.consecutive_failures >= MAX_CONSECUTIVE_FAILURES:
                raise
            return self._replace_worker(worker, self._snapshot)
        if reply is None:
            return None
        ended, crashes = reply
        for handled in crashes:
            self._save_crash_report(handled)
            self.num_env_restarts += 1
        return ended

    def _replace_worker(
        self, worker: Worker, snapshot: Snapshot, seeds: list[int | None] | None = None
    ) -> dict[int, ScalarInfo]:
        """Replace a lost worker, which interrupts the episodes of all its environments.

        `seeds` are those of the reset in which the worker was lost, if it was a seeded reset.
        """
        indices = range(worker.first, worker.last)
        episodes = [self._action_log.read(index) or {"seed": None, "num_restarts": 0} for index in indices]
        if seeds is None:
            seeds = [episode["seed"] for episode in episodes]
        restarts = [episode["num_restarts"] for episode in episodes]
        position = self._workers.index(worker)
        while True:
            failures = worker.consecutive_failures + 1
            worker.close_pipes()
            worker.join(0.0)
            (worker,) = self._start_processes(1)
            self._workers[position] = self._workers.pop()
            worker.consecutive_failures = failures
            self.num_env_restarts += len(indices)
            restarts = [count + 1 for count in restarts]
            try:
                worker.drain()
                worker.start_open(self._worker_setup(indices.start, indices.stop), self._action_log)
                worker.receive()
                worker.call("restart", list(zip(seeds, restarts, strict=True)))
            except EnvCrashError as crash:
                self._save_crash_report(crash)
                if not worker.lost or failures >= MAX_CONSECUTIVE_FAILURES:
                    raise
            else:
                snapshot.truncate(slice(indices.start, indices.stop))
                return {index: {INTERRUPTED: True} for index in indices}

    def _check_idle(self, workers: list[Worker]) -> None:
        for worker in workers:
            if worker.busy:
                raise RuntimeError(f"environments {worker.index_range} are still stepping; call recv first")


def _call(worker: Worker, method: str, *arguments: Any) -> Any:
    worker.drain()
    worker.start_call(method, arguments)
    return worker.receive()


def _wait_for_workers(workers: Sequence[Worker]) -> list[Worker]:
    """Wait for some of these workers. Return those that replied, died or timed out, which may be none."""
    timeouts = [seconds for worker in workers if (seconds := worker.seconds_to_wait) is not None]
    readable = set(wait([fd for worker in workers for fd in worker.fds], min(timeouts, default=None)))
    return [worker for worker in workers if not readable.isdisjoint(worker.fds) or worker.ready_without_data]


def _pickle_env_fn(env_fn: EnvFn, name: str) -> bytes:
    try:
        return bytes(cloudpickle.dumps(env_fn))  # unlike pickle, it can send what __main__ defines
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"{name} can't be sent to worker processes: {type(error).__name__}: {error}; make it inside a function, "
            f"or use vector.backend=serial"
        ) from error


def _create_shared_memory() -> int:
    """Return the file descriptor of an unnamed file in memory. The system frees it when its last user exits."""
    if sys.platform == "linux":
        return os.memfd_create("zhixing")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())

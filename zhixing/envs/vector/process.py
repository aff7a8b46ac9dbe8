"""Environments in worker processes, several per worker; observations, actions, rewards and flags in shared memory.

A step costs one byte to each worker and one back. Workers are fresh interpreters: safe beside threads, free of torch,
and a script needs no `if __name__ == "__main__"`.

As the back end `mixed`, this process is the first of the workers: fewer have to be woken, and none is idle while others
work. It protects from nothing: a task that ends its process ends this one.
"""

from __future__ import annotations

import itertools
import mmap
import os
import sys
import tempfile
import threading
import time
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
CLOSE_SECONDS_PER_WORKER = 0.2  # beyond CLOSE_SECONDS: many take turns on few CPUs
MANY_PER_CPU = 16  # worker processes; more take long enough to start that people should know why they wait
_GOES_ON: ScalarInfo = {INTERRUPTED: True}  # of an episode that hasn't ended, for who asks whether one ended by itself


class ProcessVectorEnv(VectorEnv):
    """With `workers=None` a trial of the task decides how many there are. But for `mixed`, nothing of the task runs in
    this process: its layout is found in a worker, too, on a copy that is thrown away."""

    def __init__(
        self,
        factory: EnvFn,
        num: int,
        workers: int | None,
        env_spec: EnvSpec | None = None,
        failure_policy: FailurePolicy | None = None,
        *,
        mixed: bool = False,
    ) -> None:
        if workers is not None and not 1 <= workers <= num:
            raise UserError(f"the number of workers is {workers}; it must be from 1 to the {num} environments")
        self.factory, self.failure_policy = factory, failure_policy or FailurePolicy()
        self.name, self.num_envs, self.backend = env_name_of(factory), num, "mixed" if mixed else "process"
        self._factory_bytes = _pickled(factory, self.name)
        self._workers: list[Worker] = []
        self._memory_fd = _unnamed_file()
        self.closed = False
        try:
            if mixed:
                env_spec = env_spec or infer_env_spec(factory)
            workers = self._prepare(env_spec, workers, mixed)
            super().__init__(self.name, self.env_spec.spaces, num, self.backend, workers)
            self.metadata["render_fps"] = self.env_spec.render_fps
            self._open(mixed)
        except BaseException as error:
            if isinstance(error, EnvCrashError):
                self._save_crash_report(error, factory)
            for worker in self._workers:
                worker.kill()
            self.close()
            raise

    def _prepare(self, env_spec: EnvSpec | None, workers: int | None, mixed: bool) -> int:
        """Start the processes and allocate the memory. Gives the number of workers."""
        started = self._start((workers or 1) - mixed)
        if env_spec is None:
            first = started[0]
            first.drain()
            importing.approved.update(first.call("make_trial", self._factory_bytes, self.name))
            env_spec = first.call("describe_trial")
            self._allocate(env_spec, mixed, workers)
            if workers is None:
                first.action_log = self._action_log
                timing: Timing = first.call("time_trial", self._setup(0, 1))
                workers = default_workers(self.num_envs, timing.waits)
            first.call("close_trial")
            self._start(workers - len(started))
        else:
            self._allocate(env_spec, mixed, workers)
        assert workers is not None
        return workers

    def _allocate(self, env_spec: EnvSpec, mixed: bool, workers: int | None) -> None:
        num = self.num_envs
        self.env_spec, self.logged_info_keys, self.max_episode_steps = (
            env_spec,
            env_spec.logged_info_keys,
            env_spec.max_episode_steps,
        )
        # where each has a CPU to itself, nobody has to be woken who has just worked
        self._spin_seconds = SPIN_SECONDS if mixed and workers is not None and workers <= cpu_count() else 0.0
        self._action_log_offset = shared_bytes(env_spec.spaces, num)
        self._size = self._action_log_offset + action_log_bytes(env_spec.spaces, num)
        os.ftruncate(self._memory_fd, self._size)
        memory = mmap.mmap(self._memory_fd, self._size)
        self.buffers = allocate(env_spec.spaces, num, memory)
        self._action_log = ActionLog(env_spec.spaces, num, memory, self._action_log_offset)
        self._snapshot = Snapshot(self.buffers) if self.failure_policy.replace else None

    def _open(self, mixed: bool) -> None:
        """Make the environments, in all workers at the same time."""
        num, workers = self.num_envs, self.workers
        bounds = [-(-num * i // workers) for i in range(workers + 1)]  # the first have one more, where they differ
        processes = [worker for worker in self._workers if isinstance(worker, WorkerProcess)]
        for process, (first, last) in zip(processes, itertools.pairwise(bounds[mixed:]), strict=True):
            process.drain()
            process.start_open(self._setup(first, last), self._action_log)
        if mixed:  # while the others start
            own = self.buffers.rows(slice(0, bounds[1]))
            self._workers.insert(
                0, InlineWorker(SubEnvGroup([self.factory] * bounds[1], self.env_spec, own, 0, self.name))
            )
        for worker in self._workers:
            worker.drain()

    def _start(self, count: int) -> list[WorkerProcess]:
        """Start so many more processes."""
        # the kernel's signal follows the thread that made the worker, and only the main one lasts
        lasting = threading.current_thread() is threading.main_thread()
        started: list[WorkerProcess] = []
        total = len(self._workers) + count
        if count > MANY_PER_CPU * cpu_count():
            note(f"starting {count} worker processes on {cpu_count()} CPUs: this takes a while")
        for _ in range(count):
            try:
                worker = WorkerProcess(self.name, self._memory_fd, self.failure_policy, die_with_parent=lasting)
            except OSError as error:
                raise UserError(
                    f"worker process {len(self._workers) + 1} of {total} can't be started: {error.strerror}; use fewer "
                    f"(vector.workers), or raise the limits of open files and processes (ulimit -n, ulimit -u)"
                ) from error
            self._workers.append(worker)
            started.append(worker)
        return started

    def _setup(self, first: int, last: int) -> WorkerSetup:
        return WorkerSetup(
            self._factory_bytes,
            self.name,
            self.env_spec,
            self.num_envs,
            first,
            last,
            self._size,
            self._action_log_offset,
            self.failure_policy.replace,
            self._spin_seconds,
        )

    def reset(self, *, seed: int | None = None, options: State | None = None) -> tuple[Tree, Info]:
        seeds = self._seeds(seed)
        for worker in self._workers:
            worker.drain()
            with suppress(EnvCrashError):  # if it is gone, the answer tells
                worker.start_call("reset", (seeds[worker.first : worker.last], options))
        for worker in tuple(self._workers):
            try:
                worker.receive()
            except EnvCrashError as crash:
                self._save_crash_report(crash, self.factory)
                if self._snapshot is None or not worker.lost or options is not None:
                    raise
                self._replace(worker, self._snapshot, seeds[worker.first : worker.last])
        return reset_result(self.buffers)

    def step(self, actions: Array) -> Result:
        self._refuse_busy(self._workers)
        self.buffers.action[...] = actions
        if self._snapshot is not None:
            self._snapshot.take()
        for worker in self._workers:
            worker.start_step()
        return step_result(self.buffers, self._ended(self._workers))

    def send(self, actions: Array, ids: Array) -> None:
        wanted = set(sorted_ids(ids).tolist())
        workers = [worker for worker in self._workers if worker.first in wanted]
        if wanted != {index for worker in workers for index in range(worker.first, worker.last)}:
            raise ValueError(f"send ids as recv gave them: {sorted(wanted)} are not the environments of whole workers")
        self._refuse_busy(workers)
        self.buffers.action[ids] = actions
        if self._snapshot is not None:
            self._snapshot.take(sorted_ids(ids))  # others may be at a step and write
        for worker in workers:
            worker.start_step()

    def recv(self, min_ready: int = 1) -> tuple[Array, Tree, Array, Array, Array, Info]:
        busy = [worker for worker in self._workers if worker.busy]
        sent = sum(worker.last - worker.first for worker in busy)
        if sent < min_ready:
            raise ValueError(f"recv waits for {min_ready} environments, but only {sent} were sent actions")
        ids: list[int] = []
        ended: dict[int, ScalarInfo] = {}
        while len(ids) < min_ready:
            waiting = [worker for worker in busy if worker.busy]
            seconds = [left for worker in waiting if (left := worker.seconds_to_wait) is not None]
            ready = set(wait([fd for worker in waiting for fd in worker.fds], min(seconds, default=None)))
            for worker in waiting:
                if not ready.isdisjoint(worker.fds) or worker.ready_without_data:
                    ended.update(self._ended([worker]))
                    ids += range(worker.first, worker.last)
        return recv_result(self.buffers, ended, sorted_ids(ids))

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
        parts = [state["envs"][worker.first : worker.last] for worker in self._workers]
        # steps that a task may have to repeat
        steps = [sum(len(sub_env["actions"]) for sub_env in part if sub_env["actions"] is not None) for part in parts]
        inexact = self._call("load", [(part,) for part in parts], steps)
        self.inexact = list(itertools.chain(*inexact))
        self.num_env_restarts = sum(sub_env["num_restarts"] for sub_env in state["envs"])
        return reset_result(self.buffers)

    def render(self, index: int = 0) -> np.ndarray[Any, Any]:  # type: ignore[override]
        worker = next(worker for worker in self._workers if worker.first <= index < worker.last)
        worker.drain()
        worker.start_call("render", (index,))
        return worker.receive()

    def goal_functions(self) -> list[str]:
        return list(self._call_first("goal_functions"))

    def compute(self, name: str, achieved: Array, desired: Array, info: State) -> Array:
        """Call a goal function of the first environment; `info` must be empty."""
        return np.asarray(self._call_first("compute", name, achieved, desired))

    def _call_first(self, method: str, *arguments: Any) -> Any:
        worker = self._workers[0]
        worker.drain()
        worker.start_call(method, arguments)
        return worker.receive()

    def close_extras(self) -> None:
        for worker in self._workers:
            worker.close_pipes()
        deadline = time.monotonic() + CLOSE_SECONDS + CLOSE_SECONDS_PER_WORKER * len(self._workers)
        for worker in self._workers:
            worker.end(max(0.0, deadline - time.monotonic()))
        kill_marked([worker.mark for worker in self._workers if isinstance(worker, WorkerProcess)])
        os.close(self._memory_fd)

    def start_recorded_episode(self, seed: int | None, origin: State) -> None:
        """Begin the episode of the only environment as one began that is to be repeated."""
        self._call("start_recorded_episode", [(seed, origin)])

    def _call(self, method: str, arguments: list[Any], steps: list[int] | None = None) -> list[Any]:
        """Let all workers do it at the same time."""
        try:
            for worker in self._workers:
                worker.drain()
            for worker, own, count in zip(self._workers, arguments, steps or [0] * self.workers, strict=True):
                worker.start_call(method, own, count)
            return [worker.receive() for worker in self._workers]
        except EnvCrashError as crash:
            self._save_crash_report(crash, self.factory)
            raise

    def _ended(self, workers: list[Worker]) -> dict[int, ScalarInfo]:
        """Wait for neighbours to end their steps; gives the last numbers of the episodes that ended, by index."""
        ended: dict[int, ScalarInfo] = {}
        # the last to begin is mostly the last to end: to wait for it first takes one sleep instead of several
        for worker in (workers[0], *reversed(workers[1:])):
            told = self._told(worker)
            if told is not None:
                ended.update(told)
        # who had no numbers to tell said nothing: asked of all at once, for most steps end no episode
        first, last = workers[0].first, workers[-1].last
        flags = self.buffers.terminated[first:last] | self.buffers.truncated[first:last]
        if 1 in flags.tobytes():
            for row in flags.nonzero()[0].tolist():
                ended.setdefault(first + row, {})
        for worker in workers:
            if worker.consecutive_failures and any(
                INTERRUPTED not in ended.get(index, _GOES_ON) for index in range(worker.first, worker.last)
            ):
                worker.consecutive_failures = 0
        return ended

    def _told(self, worker: Worker) -> dict[int, ScalarInfo] | None:
        try:
            told = worker.receive()
        except EnvCrashError as crash:
            self._save_crash_report(crash, self.factory)
            if self._snapshot is None or not worker.lost or worker.consecutive_failures >= MAX_CONSECUTIVE_FAILURES:
                raise
            return self._replace(worker, self._snapshot)
        if told is None:
            return None
        ended, crashes = told
        for survived in crashes:
            self._save_crash_report(survived, self.factory)
            self.num_env_restarts += 1
        return ended

    def _replace(
        self, worker: Worker, snapshot: Snapshot, seeds: list[int | None] | None = None
    ) -> dict[int, ScalarInfo]:
        """Start a new process for one that is gone: the episodes of all its environments are over. `seeds` are those of
        the reset in which it was lost, if it was one."""
        indices = range(worker.first, worker.last)
        action_log = [self._action_log.read(index) or {"seed": None, "num_restarts": 0} for index in indices]
        if seeds is not None:
            action_log = [{**tape, "seed": seed} for tape, seed in zip(action_log, seeds, strict=True)]
        while True:
            position, consecutive_failures = self._workers.index(worker), worker.consecutive_failures + 1
            worker.close_pipes()
            worker.end(0.0)
            (new,) = self._start(1)
            self._workers.remove(new)
            self._workers[position] = worker = new
            new.consecutive_failures = consecutive_failures
            self.num_env_restarts += len(indices)
            try:
                new.drain()
                new.start_open(self._setup(indices.start, indices.stop), self._action_log)
                new.receive()
                new.call("restart", [(tape["seed"], tape["num_restarts"] + 1) for tape in action_log])
            except EnvCrashError as crash:
                self._save_crash_report(crash, self.factory)
                if not new.lost or consecutive_failures >= MAX_CONSECUTIVE_FAILURES:
                    raise
                action_log = [{**tape, "num_restarts": tape["num_restarts"] + 1} for tape in action_log]
                continue
            snapshot.end(slice(indices.start, indices.stop))
            return {index: {INTERRUPTED: True} for index in indices}

    def _refuse_busy(self, workers: list[Worker]) -> None:
        for worker in workers:
            if worker.busy:
                raise RuntimeError(f"environments {worker.range} are still at a step: recv first")


def _pickled(factory: EnvFn, name: str) -> bytes:
    try:
        return bytes(cloudpickle.dumps(factory))  # takes what __main__ defines, too
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"{name} can't be sent to worker processes: {type(error).__name__}: {error}; make it inside of a function, "
            f"or use backend serial"
        ) from error


def _unnamed_file() -> int:
    """Memory to share that has no name, so that it goes with its last user, however that one ends."""
    if sys.platform == "linux":
        return os.memfd_create("zhixing")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())

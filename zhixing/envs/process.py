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
from multiprocessing.connection import wait
from typing import Any

import numpy as np

from zhixing.envs.arrays import Array, Twin, allocate, shared_bytes
from zhixing.envs.choice import cpu_count
from zhixing.envs.faults import IN_A_ROW, INTERRUPTED, Faults
from zhixing.envs.layout import Layout
from zhixing.envs.own_share import OwnShare
from zhixing.envs.serial import Factory, layout_of, name_of
from zhixing.envs.slots import Numbers, Slots, State
from zhixing.envs.tapes import Tapes, tape_bytes
from zhixing.envs.vector import Info, Result, VectorEnv, as_ids, partial_result, result, shown
from zhixing.envs.worker import WATCH_SECONDS, Setup
from zhixing.envs.worker_process import CLOSE_SECONDS, WorkerProcess
from zhixing.errors import EnvCrashError, UserError
from zhixing.tree import Tree

Worker = WorkerProcess | OwnShare
_GOES_ON: Numbers = {INTERRUPTED: True}  # of an episode that hasn't ended, for who asks whether one ended by itself


class ProcessVectorEnv(VectorEnv):
    def __init__(
        self,
        factory: Factory,
        num: int,
        workers: int,
        layout: Layout | None = None,
        faults: Faults | None = None,
        *,
        mixed: bool = False,
    ) -> None:
        if not 1 <= workers <= num:
            raise UserError(f"the number of workers is {workers}; it must be from 1 to the {num} environments")
        self.factory, self.faults = factory, faults or Faults()
        name = name_of(factory)
        self.layout = layout = layout or layout_of(factory)
        self.tells, self.max_episode_steps = layout.tells, layout.max_episode_steps
        super().__init__(name, layout.spaces, num, "mixed" if mixed else "process", workers)
        # where each has a CPU to itself, nobody has to be woken who has just worked
        self._watch_seconds = WATCH_SECONDS if mixed and workers <= cpu_count() else 0.0
        self._tapes_at = shared_bytes(layout.spaces, num)
        self._size = self._tapes_at + tape_bytes(layout.spaces, num)
        bounds = [-(-num * i // workers) for i in range(workers + 1)]  # the first have one more, where they differ
        self._workers: list[Worker] = []
        self._memory_fd = _unnamed_file(self._size)
        self.closed = False
        try:
            memory = mmap.mmap(self._memory_fd, self._size)
            self.arrays = allocate(layout.spaces, num, memory)
            self._tapes = Tapes(layout.spaces, num, memory, self._tapes_at)
            self._twin = Twin(self.arrays) if self.faults.replace else None
            for first, last in itertools.pairwise(bounds[mixed:]):
                self._workers.append(self._worker(first, last))
            if mixed:  # while the others start
                own = self.arrays.rows(slice(0, bounds[1]))
                self._workers.insert(0, OwnShare(Slots([factory] * bounds[1], layout, own, 0, name)))
            for worker in self._workers:
                worker.answer()
        except BaseException:
            self.close()
            raise

    def _worker(self, first: int, last: int) -> WorkerProcess:
        # the kernel's signal follows the thread that made the worker, and only the main one lasts
        lasting = threading.current_thread() is threading.main_thread()
        setup = Setup(
            self.factory,
            self.name,
            self.layout,
            self.num_envs,
            first,
            last,
            self._size,
            self._tapes_at,
            self.faults.replace,
            lasting,
            self._watch_seconds,
        )
        return WorkerProcess(setup, self._memory_fd, self._tapes, self.faults.step_seconds)

    def reset(self, *, seed: int | None = None, options: State | None = None) -> tuple[Tree, Info]:
        seeds = self._seeds(seed)
        self._call("reset", [(seeds[worker.first : worker.last], options) for worker in self._workers])
        return shown(self.arrays)

    def step(self, actions: Array) -> Result:
        self._refuse_busy(self._workers)
        self.arrays.action[...] = actions
        if self._twin is not None:
            self._twin.take()
        for worker in self._workers:
            worker.start_step()
        return result(self.arrays, self._ended(self._workers))

    def send(self, actions: Array, ids: Array) -> None:
        wanted = set(as_ids(ids).tolist())
        workers = [worker for worker in self._workers if worker.first in wanted]
        if wanted != {index for worker in workers for index in range(worker.first, worker.last)}:
            raise ValueError(f"send ids as recv gave them: {sorted(wanted)} are not the environments of whole workers")
        self._refuse_busy(workers)
        self.arrays.action[ids] = actions
        if self._twin is not None:
            self._twin.take(as_ids(ids))  # others may be at a step and write
        for worker in workers:
            worker.start_step()

    def recv(self, min_ready: int = 1) -> tuple[Array, Tree, Array, Array, Array, Info]:
        busy = [worker for worker in self._workers if worker.busy]
        sent = sum(worker.last - worker.first for worker in busy)
        if sent < min_ready:
            raise ValueError(f"recv waits for {min_ready} environments, but only {sent} were sent actions")
        ids: list[int] = []
        ended: dict[int, Numbers] = {}
        while len(ids) < min_ready:
            waiting = [worker for worker in busy if worker.busy]
            seconds = [worker.seconds_left for worker in waiting if worker.seconds_left is not None]
            pipes = [worker.answers for worker in waiting if worker.answers is not None]
            ready = wait(pipes, 0.0 if len(pipes) < len(waiting) else min(seconds, default=None))
            for worker in waiting:
                if worker.answers is None or worker.answers in ready or worker.seconds_left == 0.0:
                    ended.update(self._ended([worker]))
                    ids += range(worker.first, worker.last)
        return partial_result(self.arrays, ended, as_ids(ids))

    def state_dict(self) -> State:
        states = self._call("state", [()] * self.workers)
        return {"kind": "slots", "name": self.name, "num": self.num_envs, "envs": list(itertools.chain(*states))}

    def load_state_dict(self, state: State) -> tuple[Tree, Info]:
        self._check_state(state, "slots")
        inexact = self._call("load", [(state["envs"][worker.first : worker.last],) for worker in self._workers])
        self.inexact = list(itertools.chain(*inexact))
        self.replaced = sum(slot.get("replaced", 0) for slot in state["envs"])
        return shown(self.arrays)

    def render(self, index: int = 0) -> np.ndarray[Any, Any]:  # type: ignore[override]
        worker = next(worker for worker in self._workers if worker.first <= index < worker.last)
        worker.settle()
        worker.start_call("render", (index,))
        return worker.answer()

    def close_extras(self) -> None:
        for worker in self._workers:
            worker.hang_up()
        deadline = time.monotonic() + CLOSE_SECONDS
        for worker in self._workers:
            worker.exit_code(max(0.0, deadline - time.monotonic()))
        os.close(self._memory_fd)

    def rehearse(self, seed: int | None, origin: State) -> None:
        """Begin the episode of the only environment as one began that is to be repeated."""
        self._call("rehearse", [(seed, origin)])

    def _call(self, method: str, arguments: list[Any]) -> list[Any]:
        """Let all workers do it at the same time."""
        try:
            for worker in self._workers:
                worker.settle()
            for worker, own in zip(self._workers, arguments, strict=True):
                worker.start_call(method, own)
            return [worker.answer() for worker in self._workers]
        except EnvCrashError as crash:
            self._keep(crash, self.factory)
            raise

    def _ended(self, workers: list[Worker]) -> dict[int, Numbers]:
        """Wait for neighbours to end their steps; gives the last numbers of the episodes that ended, by index."""
        ended: dict[int, Numbers] = {}
        # the last to begin is mostly the last to end: to wait for it first takes one sleep instead of several
        for worker in (workers[0], *reversed(workers[1:])):
            told = self._told(worker)
            if told is not None:
                ended.update(told)
        # who had no numbers to tell said nothing: asked of all at once, for most steps end no episode
        first, last = workers[0].first, workers[-1].last
        flags = self.arrays.terminated[first:last] | self.arrays.truncated[first:last]
        if 1 in flags.tobytes():
            for row in flags.nonzero()[0].tolist():
                ended.setdefault(first + row, {})
        for worker in workers:
            if worker.strikes and any(
                INTERRUPTED not in ended.get(index, _GOES_ON) for index in range(worker.first, worker.last)
            ):
                worker.strikes = 0
        return ended

    def _told(self, worker: Worker) -> dict[int, Numbers] | None:
        try:
            told = worker.answer()
        except EnvCrashError as crash:
            self._keep(crash, self.factory)
            if self._twin is None or not worker.lost or worker.strikes >= IN_A_ROW:
                raise
            return self._replace(worker, self._twin)
        if told is None:
            return None
        ended, crashes = told
        for survived in crashes:
            self._keep(survived, self.factory)
            self.replaced += 1
        return ended

    def _replace(self, worker: Worker, twin: Twin) -> dict[int, Numbers]:
        """A new process for one that is gone: the episodes of all its environments are over."""
        indices = range(worker.first, worker.last)
        tapes = [self._tapes.read(index) or {"seed": None, "replaced": 0} for index in indices]
        worker.hang_up()
        worker.busy = False
        new = self._worker(worker.first, worker.last)
        new.strikes = worker.strikes + 1
        self._workers[self._workers.index(worker)] = new
        new.answer()
        new.start_call("revive", ([(tape["seed"], tape["replaced"] + 1) for tape in tapes],))
        new.answer()
        twin.end(slice(worker.first, worker.last))
        self.replaced += len(indices)
        return {index: {INTERRUPTED: True} for index in indices}

    def _refuse_busy(self, workers: list[Worker]) -> None:
        for worker in workers:
            if worker.busy:
                raise RuntimeError(f"environments {worker.range} are still at a step: recv first")


def _unnamed_file(size: int) -> int:
    """Memory to share that has no name, so that it goes with its last user, however that one ends."""
    if sys.platform == "linux":
        fd = os.memfd_create("zhixing")
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.ftruncate(fd, size)
    return fd

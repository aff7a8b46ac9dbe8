"""Environments in worker processes, several per worker; observations, actions, rewards and flags in shared memory.

A step costs one byte to each worker and one back. Workers are fresh interpreters: safe beside threads, free of torch,
and a script needs no `if __name__ == "__main__"`.
"""

from __future__ import annotations

import itertools
import mmap
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from multiprocessing.connection import Connection, wait
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import numpy as np

from zhixing.envs.arrays import Array, allocate, shared_bytes
from zhixing.envs.layout import Layout
from zhixing.envs.serial import Factory, layout_of, name_of
from zhixing.envs.slots import Numbers, State
from zhixing.envs.vector import Info, Result, VectorEnv, as_ids, partial_result, result, shown
from zhixing.envs.worker import CALL, DONE, ENDED, ERROR, STEP, VALUE, Setup
from zhixing.errors import EnvCrashError, UserError
from zhixing.tree import Tree

CLOSE_SECONDS = 5.0  # how long close() waits for a step under way
# SIGINT is ignored before the slow imports, or Ctrl-C during the start would print a traceback per worker
PROGRAM = """
import signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
from zhixing.envs.worker import main
main(int(sys.argv[1]), int(sys.argv[2]))
"""


class ProcessVectorEnv(VectorEnv):
    def __init__(self, factory: Factory, num: int, workers: int, layout: Layout | None = None) -> None:
        if not 1 <= workers <= num:
            raise UserError(f"the number of workers is {workers}; it must be from 1 to the {num} environments")
        name = name_of(factory)
        layout = layout or layout_of(factory)
        self.tells = layout.tells
        super().__init__(name, layout.spaces, num, "process", workers)
        size = shared_bytes(layout.spaces, num)
        bounds = np.linspace(0, num, workers + 1).astype(int).tolist()
        self._workers: list[_Worker] = []
        self.closed = False
        memory_fd = _unnamed_file(size)
        try:
            self.arrays = allocate(layout.spaces, num, mmap.mmap(memory_fd, size))
            for first, last in itertools.pairwise(bounds):
                # the kernel's signal follows the thread that made the worker, and only the main one lasts
                lasting = threading.current_thread() is threading.main_thread()
                setup = Setup(factory, name, layout, num, first, last, size, lasting)
                self._workers.append(_Worker(setup, memory_fd))
            for worker in self._workers:
                worker.answer()
        except BaseException:
            self.close()
            raise
        finally:
            os.close(memory_fd)

    def reset(self, *, seed: int | None = None, options: State | None = None) -> tuple[Tree, Info]:
        seeds = self._seeds(seed)
        self._call("reset", [(seeds[worker.first : worker.last], options) for worker in self._workers])
        return shown(self.arrays)

    def step(self, actions: Array) -> Result:
        self._refuse_busy(self._workers)
        self.arrays.action[...] = actions
        for worker in self._workers:
            worker.start_step()
        ended: dict[int, Numbers] = {}
        for worker in self._workers:
            ended.update(self._ended(worker))
        return result(self.arrays, ended)

    def send(self, actions: Array, ids: Array) -> None:
        wanted = set(as_ids(ids).tolist())
        workers = [worker for worker in self._workers if worker.first in wanted]
        if wanted != {index for worker in workers for index in range(worker.first, worker.last)}:
            raise ValueError(f"send ids as recv gave them: {sorted(wanted)} are not the environments of whole workers")
        self._refuse_busy(workers)
        self.arrays.action[ids] = actions
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
            ready = wait([worker.connection for worker in busy if worker.busy])
            for worker in busy:
                if worker.connection in ready:
                    ended.update(self._ended(worker))
                    ids += range(worker.first, worker.last)
        return partial_result(self.arrays, ended, as_ids(ids))

    def state_dict(self) -> State:
        states = self._call("state", [()] * self.workers)
        return {"kind": "slots", "name": self.name, "num": self.num_envs, "envs": list(itertools.chain(*states))}

    def load_state_dict(self, state: State) -> tuple[Tree, Info]:
        self._check_state(state, "slots")
        inexact = self._call("load", [(state["envs"][worker.first : worker.last],) for worker in self._workers])
        self.inexact = list(itertools.chain(*inexact))
        return shown(self.arrays)

    def render(self, index: int = 0) -> np.ndarray[Any, Any]:  # type: ignore[override]
        worker = next(worker for worker in self._workers if worker.first <= index < worker.last)
        worker.settle()
        worker.start_call("render", (index,))
        return worker.answer()

    def close_extras(self) -> None:
        for worker in self._workers:
            worker.connection.close()  # the end of the file tells the worker to go
        deadline = time.monotonic() + CLOSE_SECONDS
        for worker in self._workers:
            worker.exit_code(max(0.0, deadline - time.monotonic()))

    def _call(self, method: str, arguments: list[Any]) -> list[Any]:
        """Let all workers do it at the same time."""
        for worker in self._workers:
            worker.settle()
        for worker, own in zip(self._workers, arguments, strict=True):
            worker.start_call(method, own)
        return [worker.answer() for worker in self._workers]

    def _ended(self, worker: _Worker) -> dict[int, Numbers]:
        numbers: dict[int, Numbers] | None = worker.answer()
        if numbers is not None:
            return numbers
        own = slice(worker.first, worker.last)
        ended = self.arrays.terminated[own] | self.arrays.truncated[own]
        return {worker.first + row: {} for row in ended.nonzero()[0].tolist()}

    def _refuse_busy(self, workers: list[_Worker]) -> None:
        for worker in workers:
            if worker.busy:
                raise RuntimeError(f"environments {worker.range} are still at a step: recv first")


class _Worker:
    """The parent's end of one worker process."""

    def __init__(self, setup: Setup, memory_fd: int) -> None:
        self.name, self.first, self.last = setup.name, setup.first, setup.last
        ours, theirs = socket.socketpair()
        search = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, str(theirs.fileno()), str(memory_fd)],
                pass_fds=(theirs.fileno(), memory_fd),
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": search},  # what can be imported here can be imported there
            )
        self.connection = Connection(ours.detach())
        self.fd = self.connection.fileno()
        self.busy = True
        self._tell(lambda: self.connection.send_bytes(cloudpickle.dumps(setup)))  # takes what __main__ defines, too

    def start_step(self) -> None:
        self.busy = True
        try:
            os.write(self.fd, STEP)
        except OSError:
            raise self._death() from None

    def start_call(self, method: str, arguments: Any) -> None:
        self.busy = True
        self._tell(lambda: os.write(self.fd, CALL))
        self._tell(lambda: self.connection.send_bytes(pickle.dumps((method, arguments))))

    def answer(self) -> Any:
        """Wait for it. None for a step in which no episode ended with numbers to tell."""
        try:
            kind = os.read(self.fd, 1)
            value: Any = None if kind == DONE else pickle.loads(self.connection.recv_bytes())
        except (OSError, EOFError):
            raise self._death() from None
        self.busy = False
        if kind == ERROR:
            raise value
        assert kind in (DONE, ENDED, VALUE)
        return value

    def settle(self) -> None:
        """Take an answer that nobody waited for, as after an interrupted step."""
        if self.busy:
            self.answer()

    @property
    def range(self) -> str:
        return str(self.first) if self.last == self.first + 1 else f"{self.first} to {self.last - 1}"

    def exit_code(self, seconds: float) -> int:
        """Of a worker that is going; one that isn't gone after `seconds` is killed."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()

    def _tell(self, write: Any) -> None:
        try:
            write()
        except OSError:
            raise self._death() from None

    def _death(self) -> EnvCrashError:
        code = self.exit_code(CLOSE_SECONDS)
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return EnvCrashError(f"the worker process of {self.name} (index {self.range}) {how}")


def _unnamed_file(size: int) -> int:
    """Memory to share that has no name, so that it goes with its last user, however that one ends."""
    if sys.platform == "linux":
        fd = os.memfd_create("zhixing")
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.ftruncate(fd, size)
    return fd

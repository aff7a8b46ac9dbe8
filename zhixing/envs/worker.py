"""The process at the other end of a ProcessVectorEnv: some environments, their rows in shared memory, two pipes.

Each command and each answer is one byte. `CALL`, `VALUE`, `ENDED` and `ERROR` are followed by a pickle; steps are not,
unless an episode ended with numbers in its last info or an environment was replaced. The end of the file means that the
parent is gone.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import pickle
import select
import signal
import sys
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from zhixing.envs.arrays import allocate
from zhixing.envs.layout import Layout
from zhixing.envs.slots import Slots
from zhixing.envs.tapes import Tapes
from zhixing.errors import EnvCrashError, UserError

STEP, CALL = b"s", b"c"  # commands
DONE, ENDED, VALUE, ERROR = b"d", b"n", b"v", b"e"  # answers
PR_SET_PDEATHSIG = 1
# A CPU that halted takes 50 us and more to wake, as long as a step of many tasks takes. Between two steps a small
# policy takes 100 to 150 us to act, a larger one some more.
WATCH_SECONDS = 500e-6


@dataclass(frozen=True)
class Setup:
    """What a worker must know to begin."""

    factory: Any
    name: str
    layout: Layout
    num: int  # environments in the whole vector
    first: int
    last: int  # one past this worker's last environment
    memory_bytes: int
    tapes_at: int  # where in the memory
    replace: bool  # environments that fail
    die_with_parent: bool
    watch_seconds: float  # how long to look for the next byte before sleeping until it comes


def main(commands_fd: int, answers_fd: int, memory_fd: int) -> None:
    # Ctrl-C, or the end of a whole group of processes, is the parent's business: it saves a checkpoint first
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    commands, answers = Connection(commands_fd, writable=False), Connection(answers_fd, readable=False)
    try:
        setup: Setup = pickle.loads(commands.recv_bytes())
        if setup.die_with_parent and sys.platform == "linux":
            # the end of the file is seen between steps only; the kernel ends a worker in the middle of one, too
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        memory = mmap.mmap(memory_fd, setup.memory_bytes)
        os.close(memory_fd)
        arrays = allocate(setup.layout.spaces, setup.num, memory).rows(slice(setup.first, setup.last))
        tapes = Tapes(setup.layout.spaces, setup.num, memory, setup.tapes_at)
        slots = _attempt(answers, lambda: _make(setup, arrays, tapes))
        if slots is not None:
            try:
                _serve(commands, answers, slots, setup.watch_seconds)
            finally:
                slots.close()
    except (EOFError, ConnectionError):  # the parent is gone
        pass


def _make(setup: Setup, arrays: Any, tapes: Tapes) -> tuple[bytes, Any]:
    makers = [setup.factory] * (setup.last - setup.first)
    slots = Slots(makers, setup.layout, arrays, setup.first, setup.name, replace=setup.replace, tapes=tapes)
    return DONE, slots


def watch(pipe: Any, seconds: float) -> None:
    """Return as soon as there is something to read, but no later; others may have the CPU meanwhile."""
    until = time.perf_counter() + seconds
    while not pipe.poll(0) and time.perf_counter() < until:
        os.sched_yield()


def _serve(commands: Connection, answers: Connection, slots: Slots, watch_seconds: float) -> None:
    fd = commands.fileno()
    coming = select.poll()
    coming.register(fd, select.POLLIN)
    while True:
        if watch_seconds:
            watch(coming, watch_seconds)
        command = os.read(fd, 1)
        if not command:
            break
        if command == STEP:
            _attempt(answers, lambda: _step(slots))
        else:
            method, arguments = pickle.loads(commands.recv_bytes())
            _attempt(answers, lambda: (VALUE, getattr(slots, method)(*arguments)))  # noqa: B023


def _step(slots: Slots) -> tuple[bytes, Any]:
    ended = slots.step()
    crashes, slots.crashes = slots.crashes, []
    return (ENDED if crashes or any(ended.values()) else DONE), (ended, crashes)


def _attempt(answers: Connection, work: Any) -> Any:
    """Do it and tell the parent how it went."""
    try:
        kind, value = work()
    except (EnvCrashError, UserError) as error:
        kind, value = ERROR, error
    except Exception as error:
        kind, value = ERROR, EnvCrashError(f"{type(error).__name__}: {error}")
    os.write(answers.fileno(), kind)
    if kind != DONE:
        answers.send_bytes(pickle.dumps(value))
    return None if kind == ERROR else value

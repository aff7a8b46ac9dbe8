"""The program of a worker process: some environments, their rows in shared memory, two pipes to the parent.

Each command and each answer is one byte. `CALL`, `VALUE`, `ENDED` and `ERROR` are followed by a pickle and its length;
steps are not, unless an episode ended with numbers in its last info or an environment was replaced. End of file on the
command pipe means that the parent is gone. The first answer is sent when all imports are done.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import mmap
import os
import pickle
import select
import signal
import struct
import sys
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from zhixing.envs.env_spec import EnvSpec, describe
from zhixing.envs.vector.action_log import ActionLog
from zhixing.envs.vector.backend_choice import Timing, time_steps
from zhixing.envs.vector.step_buffers import StepBuffers, allocate
from zhixing.envs.vector.sub_env_group import SubEnvGroup
from zhixing.errors import EnvCrashError, UserError
from zhixing.utils import importing

STEP, CALL = b"s", b"c"  # commands
DONE, ENDED, VALUE, ERROR = b"d", b"n", b"v", b"e"  # answers
LENGTH = struct.Struct("!Q")  # of the pickle that follows
PR_SET_PDEATHSIG = 1
# A CPU that halted takes 50 us and more to wake, as long as a step of many tasks takes. Between two steps a small
# policy takes 100 to 150 us to act, a larger one some more.
SPIN_SECONDS = 500e-6


@dataclass(frozen=True)
class WorkerSetup:
    """What a worker must know to make its environments."""

    factory: bytes  # by cloudpickle
    name: str
    env_spec: EnvSpec
    num: int  # environments in the whole vector
    first: int
    last: int  # one past this worker's last environment
    memory_bytes: int
    action_log_offset: int  # where in the memory
    replace: bool  # environments that fail
    spin_seconds: float  # how long to look for the next byte before sleeping until it comes


class WorkerServer:
    """What the parent may call in a worker before its environments are there. Later calls go to `group`."""

    def __init__(self, memory_fd: int) -> None:
        self.memory_fd = memory_fd
        self.group: SubEnvGroup | None = None
        self.spin_seconds = 0.0
        self._trial: Any = None
        self._name = ""

    def make_trial(self, factory: bytes, name: str) -> set[str]:
        """Make the copy on which the layout is found, and which is thrown away. Gives the code that was imported."""
        self._trial, self._name = _made(factory, name), name
        return importing.approved

    def describe_trial(self) -> EnvSpec:
        return describe(self._trial, self._name)

    def time_trial(self, setup: WorkerSetup) -> Timing:
        buffers, action_log = self._memory(setup)
        return time_steps(self._trial, setup.env_spec, self._name, buffers, action_log)

    def close_trial(self) -> None:
        trial, self._trial = self._trial, None
        trial.close()

    def open(self, setup: WorkerSetup) -> None:
        buffers, action_log = self._memory(setup)
        makers = [lambda: _made(setup.factory, setup.name)] * (setup.last - setup.first)
        group = SubEnvGroup(
            makers, setup.env_spec, buffers, setup.first, setup.name, replace=setup.replace, action_log=action_log
        )
        self.group, self.spin_seconds = group, setup.spin_seconds

    def _memory(self, setup: WorkerSetup) -> tuple[StepBuffers, ActionLog]:
        memory = mmap.mmap(self.memory_fd, setup.memory_bytes)
        buffers = allocate(setup.env_spec.spaces, setup.num, memory).rows(slice(setup.first, setup.last))
        return buffers, ActionLog(setup.env_spec.spaces, setup.num, memory, setup.action_log_offset)

    def call(self, method: str, arguments: Any) -> Any:
        return getattr(self if self.group is None else self.group, method)(*arguments)

    def close(self) -> None:
        if self._trial is not None:
            self._trial.close()
        if self.group is not None:
            self.group.close()


def _made(factory: bytes, name: str) -> Any:
    try:
        return pickle.loads(factory)()
    except UserError:
        raise
    except Exception as error:
        raise EnvCrashError(f"environment {name} crashed in its constructor:\n{traceback.format_exc()}") from error


def main(commands: int, answers: int, memory_fd: int, die_with_parent: int) -> None:
    # Ctrl-C, a closed terminal and the end of a whole group of processes are the parent's business: it saves first
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if die_with_parent and sys.platform == "linux":
        # the end of the file is seen between steps only; the kernel ends a worker in the middle of one, too
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    for fd in (commands, answers, memory_fd):
        os.set_inheritable(fd, False)  # programs that an environment starts have no use for them
    faulthandler.enable()  # a segmentation fault shows where in the environment it happened
    host = WorkerServer(memory_fd)
    code = 1
    try:
        os.write(answers, DONE)
        _serve(commands, answers, host)
        host.close()
        atexit._run_exitfuncs()
        code = 0
    except (EOFError, ConnectionError):  # the parent is gone
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        os._exit(code)  # threads that an environment left behind would keep the interpreter from ending


def spin_until_readable(pipe: Any, seconds: float) -> None:
    """Return as soon as there is something to read, but no later; others may have the CPU meanwhile."""
    until = time.perf_counter() + seconds
    while not pipe.poll(0) and time.perf_counter() < until:
        os.sched_yield()


def _serve(commands: int, answers: int, host: WorkerServer) -> None:
    coming = select.poll()
    coming.register(commands, select.POLLIN)
    while True:
        if host.spin_seconds:
            spin_until_readable(coming, host.spin_seconds)
        command = os.read(commands, 1)
        if not command:
            break
        group = host.group
        if command == STEP:
            assert group is not None
            _attempt(answers, lambda: _step(group))  # noqa: B023
        else:
            (length,) = LENGTH.unpack(_read(commands, LENGTH.size))
            method, arguments = pickle.loads(_read(commands, length))
            _attempt(answers, lambda: (VALUE, host.call(method, arguments)))  # noqa: B023


def _step(group: SubEnvGroup) -> tuple[bytes, Any]:
    ended = group.step()
    crashes, group.crashes = group.crashes, []
    return (ENDED if crashes or any(ended.values()) else DONE), (ended, crashes)


def _attempt(answers: int, work: Any) -> None:
    """Do it and report the result, or the error, to the parent."""
    text = b""
    try:
        kind, value = work()
        if kind != DONE:
            text = pickle.dumps(value)
    except (EnvCrashError, UserError) as error:
        kind, text = ERROR, pickle.dumps(error)
    except Exception as error:
        kind, text = ERROR, pickle.dumps(EnvCrashError(f"{type(error).__name__}: {error}"))
    os.write(answers, kind)
    if kind != DONE:
        _write(answers, LENGTH.pack(len(text)) + text)


def _read(fd: int, count: int) -> bytes:
    parts = []
    while count:
        part = os.read(fd, min(count, 2**20))
        if not part:
            raise EOFError
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]

"""The program of a worker process: some environments, their rows in shared memory, two pipes to the parent.

Each command and each reply starts with one byte. `CALL`, `VALUE`, `ENDED` and `ERROR` are followed by the length of a
pickle and the pickle. The reply to a step is the single byte `DONE`, unless an episode ended with numbers in its last
info or an environment was replaced. End of file on the command pipe means that the parent is gone. The worker sends its
first reply after all imports.
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

from zhixing.envs.env_spec import EnvSpec, inspect_env
from zhixing.envs.vector.action_log import ActionLog
from zhixing.envs.vector.backend_choice import Timing, time_steps
from zhixing.envs.vector.step_buffers import StepBuffers, allocate
from zhixing.envs.vector.sub_env_group import SubEnvGroup
from zhixing.errors import EnvCrashError, UserError
from zhixing.utils import importing

STEP, CALL = b"s", b"c"  # commands
DONE, ENDED, VALUE, ERROR = b"d", b"n", b"v", b"e"  # replies
LENGTH = struct.Struct("!Q")  # of the pickle that follows
PR_SET_PDEATHSIG = 1
# An idle CPU takes 50 us and more to wake up, as long as a step of many environments. Between two steps, a small policy
# takes 100 to 150 us to act, a larger one somewhat longer.
SPIN_SECONDS = 500e-6


@dataclass(frozen=True)
class WorkerSetup:
    """Everything a worker needs to make its environments."""

    env_fn: bytes  # pickled by cloudpickle
    name: str
    env_spec: EnvSpec
    num_envs: int  # in the whole vector
    first: int
    last: int  # one past this worker's last environment
    memory_bytes: int
    action_log_offset: int  # in the shared memory
    replace: bool  # environments that fail
    spin_seconds: float  # how long to poll for the next command before sleeping


class WorkerServer:
    """Receives the calls of the parent: its own methods until `open`, then those of `group`.

    The probe environment serves to infer the `EnvSpec` and to time steps. It is closed before `open`.
    """

    def __init__(self, memory_fd: int) -> None:
        self.memory_fd = memory_fd
        self.group: SubEnvGroup | None = None
        self.spin_seconds = 0.0
        self._probe_env: Any = None
        self._name = ""

    def make_probe_env(self, env_fn: bytes, name: str) -> set[str]:
        """Make the probe environment. Return the names of the code that was approved for import."""
        self._probe_env, self._name = _make_env(env_fn, name), name
        return importing.approved

    def describe_probe_env(self) -> EnvSpec:
        return inspect_env(self._probe_env, self._name)

    def time_probe_env(self, setup: WorkerSetup) -> Timing:
        buffers, action_log = self._map_memory(setup)
        return time_steps(self._probe_env, setup.env_spec, self._name, buffers, action_log)

    def close_probe_env(self) -> None:
        env, self._probe_env = self._probe_env, None
        env.close()

    def open(self, setup: WorkerSetup) -> None:
        """Make this worker's environments."""
        buffers, action_log = self._map_memory(setup)
        env_fns = [lambda: _make_env(setup.env_fn, setup.name)] * (setup.last - setup.first)
        self.group = SubEnvGroup(
            env_fns,
            setup.env_spec,
            buffers,
            setup.first,
            setup.name,
            replace=setup.replace,
            action_log=action_log,
        )
        self.spin_seconds = setup.spin_seconds

    def _map_memory(self, setup: WorkerSetup) -> tuple[StepBuffers, ActionLog]:
        memory = mmap.mmap(self.memory_fd, setup.memory_bytes)
        spaces, num_envs = setup.env_spec.spaces, setup.num_envs
        buffers = allocate(spaces, num_envs, memory).rows(slice(setup.first, setup.last))
        return buffers, ActionLog(spaces, num_envs, memory, setup.action_log_offset)

    def call(self, method: str, arguments: Any) -> Any:
        return getattr(self if self.group is None else self.group, method)(*arguments)

    def close(self) -> None:
        if self._probe_env is not None:
            self._probe_env.close()
        if self.group is not None:
            self.group.close()


def _make_env(env_fn: bytes, name: str) -> Any:
    try:
        return pickle.loads(env_fn)()
    except UserError:
        raise
    except Exception as error:
        raise EnvCrashError(f"environment {name} crashed in its constructor:\n{traceback.format_exc()}") from error


def main(commands: int, replies: int, memory_fd: int, die_with_parent: int) -> None:
    # the parent handles Ctrl-C, a closed terminal and signals to the whole process group: it saves a checkpoint first
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if die_with_parent and sys.platform == "linux":
        # end of file is noticed only between steps; this signal also kills a worker during a step
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    for fd in (commands, replies, memory_fd):
        os.set_inheritable(fd, False)  # programs that an environment starts don't need them
    faulthandler.enable()  # prints the Python stack on a segmentation fault
    server = WorkerServer(memory_fd)
    code = 1
    try:
        os.write(replies, DONE)
        _serve(commands, replies, server)
        server.close()
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
        os._exit(code)  # threads that an environment left running would keep the interpreter alive


def spin_until_readable(pipe: Any, seconds: float) -> None:
    """Poll until there is something to read, for at most so many seconds, yielding the CPU to other processes."""
    deadline = time.perf_counter() + seconds
    while not pipe.poll(0) and time.perf_counter() < deadline:
        os.sched_yield()


def _serve(commands: int, replies: int, server: WorkerServer) -> None:
    poll = select.poll()
    poll.register(commands, select.POLLIN)
    while True:
        if server.spin_seconds:
            spin_until_readable(poll, server.spin_seconds)
        command = os.read(commands, 1)
        if not command:
            break
        group = server.group
        if command == STEP:
            assert group is not None
            _run_and_reply(replies, lambda: _step(group))  # noqa: B023
        else:
            (length,) = LENGTH.unpack(_read(commands, LENGTH.size))
            method, arguments = pickle.loads(_read(commands, length))
            _run_and_reply(replies, lambda: (VALUE, server.call(method, arguments)))  # noqa: B023


def _step(group: SubEnvGroup) -> tuple[bytes, Any]:
    ended = group.step()
    crashes, group.crashes = group.crashes, []
    return (ENDED if crashes or any(ended.values()) else DONE), (ended, crashes)


def _run_and_reply(replies: int, function: Any) -> None:
    """Call the function and send its result, or its error, to the parent."""
    data = b""
    try:
        kind, value = function()
        if kind != DONE:
            data = pickle.dumps(value)
    except (EnvCrashError, UserError) as error:
        kind, data = ERROR, pickle.dumps(error)
    except Exception as error:
        kind, data = ERROR, pickle.dumps(EnvCrashError(f"{type(error).__name__}: {error}"))
    os.write(replies, kind)
    if kind != DONE:
        _write(replies, LENGTH.pack(len(data)) + data)


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

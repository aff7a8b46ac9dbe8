"""The parent's handle of one worker process: starts it, calls it, and reports how it was lost.

The death of a worker is detected at the process itself, not by end of file on its pipe: a child that its environment
forked may keep the pipe open.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from typing import Any

from zhixing.envs.crash.failure_policy import FailurePolicy
from zhixing.envs.vector.action_log import ActionLog
from zhixing.envs.vector.orphans import add_mark, kill_group, kill_marked, new_mark
from zhixing.envs.vector.worker import (
    CALL,
    DONE,
    ENDED,
    ERROR,
    LENGTH,
    STEP,
    VALUE,
    WorkerSetup,
    spin_until_readable,
)
from zhixing.errors import EnvCrashError
from zhixing.utils.importing import child_environment

CLOSE_SECONDS = 5.0  # how long close() waits for a running step
POLL_SECONDS = 0.2  # how often to check whether a worker is alive, on systems that can't wait for its end
# SIGINT is ignored before the slow imports: otherwise Ctrl-C during the start prints a traceback per worker.
# A worker leads a process group, so it can be killed with all processes that it started. It gets no session of its own,
# because the scheduler treats sessions separately.
PROGRAM = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
os.setpgid(0, 0)
from zhixing.envs.vector.worker import main
main(*map(int, sys.argv[1:]))
"""
START = "the start"
CALL_DESCRIPTIONS = {  # of the methods that a worker can be called with, for messages
    "make_probe_env": "the constructor",
    "describe_probe_env": "the first reset",
    "time_probe_env": "the probe steps",
    "close_probe_env": "closing the probe environment",
    "open": "the constructor",
    "reset": "a reset",
    "restart": "a reset",
    "start_recorded_episode": "a reset",
    "state": "state_dict",
    "load": "load_state_dict",
    "render": "render",
    "goal_functions": "the goal functions",
    "compute": "the goal functions",
}


class WorkerProcess:
    """A worker in a fresh interpreter. Call `receive` once before the first call: it waits for the imports."""

    def __init__(self, name: str, memory_fd: int, failure_policy: FailurePolicy, *, die_with_parent: bool) -> None:
        self.name, self.failure_policy = name, failure_policy
        self.first, self.last = 0, 1  # until `start_open`
        self.action_log: ActionLog | None = None
        self.spin_seconds = 0.0
        self.lost = False  # the process died or was killed
        self.consecutive_failures = 0  # how often in a row this worker was replaced
        self.mark = new_mark()
        self._current_call: str | None = START  # None for a step
        self._deadline: float | None = None  # of the current call, if it has a timeout
        # two pipes: a byte passes faster through each than through a socket
        (commands, self._commands), (self._replies, replies) = _make_pipes()
        fds = commands, replies, memory_fd
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, *map(str, fds), str(int(die_with_parent))],
                pass_fds=fds,
                stdin=subprocess.DEVNULL,
                env=add_mark(child_environment(), self.mark),
            )
        except BaseException:
            os.close(self._commands)
            os.close(self._replies)
            raise
        finally:
            os.close(commands)
            os.close(replies)
        os.set_blocking(self._commands, False)
        self.sentinel = _open_sentinel(self.process.pid)  # becomes readable when the process dies
        self._poll, self._writable = select.poll(), select.poll()
        self._poll.register(self._replies, select.POLLIN)
        self._writable.register(self._commands, select.POLLOUT)
        if self.sentinel is not None:
            self._poll.register(self.sentinel, select.POLLIN)
            self._writable.register(self.sentinel, select.POLLIN)
        self.busy = True

    def start_open(self, setup: WorkerSetup, action_log: ActionLog) -> None:
        """Start to make the worker's environments."""
        self.first, self.last = setup.first, setup.last
        self.action_log, self.spin_seconds = action_log, setup.spin_seconds
        action_log.active_env[self.first] = 0  # may be set by a worker that this one replaces
        self.start_call("open", (setup,))

    def close_pipes(self) -> None:
        """Close the pipes. The worker exits when it reads end of file."""
        if self._commands >= 0:
            os.close(self._commands)
            os.close(self._replies)
            self._commands = self._replies = -1

    def start_step(self) -> None:
        self.busy, self._current_call = True, None
        if self.failure_policy.step_timeout is not None:
            self._deadline = time.monotonic() + self.failure_policy.step_timeout * (self.last - self.first)
        with suppress(OSError):  # if the worker is gone, `receive` reports it
            os.write(self._commands, STEP)

    @property
    def seconds_left(self) -> float | None:
        """Time left for the current call; None without a timeout."""
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    @property
    def fds(self) -> tuple[int, ...]:
        """File descriptors that become readable when the worker replies or dies."""
        return (self._replies,) if self.sentinel is None else (self._replies, self.sentinel)

    @property
    def seconds_to_wait(self) -> float | None:
        """How long to wait for `fds` before checking `ready_without_data`; None for no limit."""
        if self.sentinel is not None:
            return self.seconds_left
        return POLL_SECONDS if self.seconds_left is None else min(self.seconds_left, POLL_SECONDS)

    @property
    def ready_without_data(self) -> bool:
        """Whether `receive` returns at once although no reply came: the call has timed out, or the worker is dead."""
        return self.seconds_left == 0.0 or (self.sentinel is None and self.process.poll() is not None)

    def start_call(self, method: str, arguments: Any, num_steps: int = 0) -> None:
        """Start a call of a method that takes up to `num_steps` environment steps, which extends its timeout."""
        self.busy, self._current_call = True, CALL_DESCRIPTIONS[method]
        timeout = self.failure_policy.effective_call_timeout
        if timeout is not None:
            seconds = timeout * (self.last - self.first) + num_steps * (self.failure_policy.step_timeout or timeout)
            self._deadline = time.monotonic() + seconds
        data = pickle.dumps((method, arguments))
        self._write(CALL + LENGTH.pack(len(data)) + data)

    def call(self, method: str, *arguments: Any) -> Any:
        self.start_call(method, arguments)
        return self.receive()

    def receive(self) -> Any:
        """Wait for the reply and return its value: None for a step in which no episode ended with numbers to report."""
        if self.spin_seconds:
            spin_until_readable(self._poll, self.spin_seconds)
        self._wait(self._poll, self._replies)
        kind = os.read(self._replies, 1)
        if not kind:
            raise self._death_error()
        value: Any = None
        if kind != DONE:
            (length,) = LENGTH.unpack(self._read(LENGTH.size))
            value = pickle.loads(self._read(length))
        self.busy, self._deadline = False, None
        if kind == ERROR:
            raise value
        assert kind in (DONE, ENDED, VALUE)
        return value

    def drain(self) -> None:
        """Discard a pending reply, for example after an interrupted step."""
        if self.busy:
            self.receive()

    @property
    def index_range(self) -> str:
        return format_range(self.first, self.last)

    def kill(self) -> None:
        self.process.kill()

    def join(self, timeout: float) -> int:
        """Wait for the worker to exit, then kill what is left of it and of its process group. Return its exit code."""
        code = self._reap(timeout)
        if self.sentinel is not None:
            os.close(self.sentinel)
            self.sentinel = None
        return code

    def _reap(self, timeout: float) -> int:
        if self.process.returncode is None:
            if self.sentinel is None:
                try:
                    self.process.wait(timeout)
                except subprocess.TimeoutExpired:
                    self.process.kill()
            elif not _wait_readable(self.sentinel, timeout):
                self.process.kill()
                _wait_readable(self.sentinel, None)
            kill_group(self.process.pid)  # before wait(), which frees the process id for other processes
        return self.process.wait()

    def _read(self, count: int) -> bytes:
        parts = []
        while count:
            self._wait(self._poll, self._replies)
            part = os.read(self._replies, min(count, 2**20))
            if not part:
                raise self._death_error()
            parts.append(part)
            count -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(self._commands, view) :]
            except BlockingIOError:
                self._wait(self._writable, self._commands)
            except OSError:
                raise self._death_error() from None

    def _wait(self, poll: select.poll, pipe: int) -> None:
        """Wait until the pipe can be read or written. Raise `EnvCrashError` if the worker dies or times out."""
        while True:
            left = None
            if self._deadline is None and self.sentinel is not None:  # the usual case: saves 1 us
                events = poll.poll()
            else:
                left, seconds = self.seconds_left, self.seconds_to_wait
                events = poll.poll(None if seconds is None else 1000 * min(seconds, 1e6))
            for fd, event in events:
                if fd == pipe and event & (select.POLLIN | select.POLLOUT):
                    return
            if events:
                raise self._death_error()
            if left == 0.0:
                raise self._timeout_error()
            if self.sentinel is None and self.process.poll() is not None and not poll.poll(0):
                raise self._death_error()

    def _death_error(self) -> EnvCrashError:
        code = self._reap(CLOSE_SECONDS)
        kill_marked([self.mark])
        reason = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        message = f"the worker process of {self.name} (index {self.index_range}) {reason}"
        when = "" if self._current_call is None else f", at {self._current_call}"
        return self._lost_error(message, when, "ProcessDied", reason)

    def _timeout_error(self) -> EnvCrashError:
        self.process.kill()
        self._reap(CLOSE_SECONDS)
        kill_marked([self.mark])
        policy = self.failure_policy
        if self._current_call is None:
            call, timeout, setting = "a step", policy.step_timeout, "vector.step_timeout"
        else:
            call, timeout, setting = self._current_call, policy.effective_call_timeout, "vector.call_timeout"
        reason = f"took longer than {timeout:g} s ({setting})"
        return self._lost_error(f"{call} of {self.name} (index {self.index_range}) {reason}", "", "Timeout", reason)

    def _lost_error(self, message: str, when: str, kind: str, reason: str) -> EnvCrashError:
        """Return the error for a lost worker, with a crash report if the action log has the episode that it ran.

        The error names the step from the action log, or ends with `when` without one.
        """
        log, episode, index = self.action_log, None, -1
        if log is not None:
            index = log.active_env[self.first] - 1
            episode = log.read(index) if index >= 0 else None
        already_lost, self.lost = self.lost, True
        if log is None or episode is None:  # between steps, or before the first reset
            return EnvCrashError(message + when)
        count = log.counts[index]
        crash = EnvCrashError(f"{message}, at {f'step {count} of an episode' if count else 'a reset'} of index {index}")
        if not already_lost:
            error = {"type": kind, "message": reason, "traceback": ""}
            fields = {name: episode[name] for name in ("seed", "origin", "actions")}
            crash.report = {"index": index, **fields, "error": error}
        return crash


def _make_pipes() -> tuple[tuple[int, int], tuple[int, int]]:
    commands = os.pipe()
    try:
        return commands, os.pipe()
    except OSError:
        os.close(commands[0])
        os.close(commands[1])
        raise


def _open_sentinel(pid: int) -> int | None:
    """Return a file descriptor that becomes readable when the process ends; None where there is none (macOS)."""
    if sys.platform == "linux":
        with suppress(AttributeError, OSError):
            return os.pidfd_open(pid)
    return None


def _wait_readable(fd: int, timeout: float | None) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(None if timeout is None else 1000 * timeout))


def format_range(first: int, last: int) -> str:
    """Return the indices from `first` up to but excluding `last` as text for messages."""
    return str(first) if last == first + 1 else f"{first} to {last - 1}"

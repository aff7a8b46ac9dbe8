"""The parent's end of one worker process: to start it, to call it, and to report how it was lost.

The death of a worker is seen at the process itself, not at the end of its pipe: a child that its environment forked
may keep the pipe open.
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
from zhixing.envs.vector.orphans import kill_group, kill_marked, marked, new_mark
from zhixing.envs.vector.worker import CALL, DONE, ENDED, ERROR, LENGTH, STEP, VALUE, WorkerSetup, spin_until_readable
from zhixing.errors import EnvCrashError
from zhixing.utils.importing import child_environment

CLOSE_SECONDS = 5.0  # how long close() waits for a step under way
POLL_SECONDS = 0.2  # how often to look whether a worker lives, where the system can't wait for its end
# SIGINT is ignored before the slow imports, or Ctrl-C during the start would print a traceback per worker
# A worker leads a process group, to be ended with all that it started; a session of its own would be scheduled apart
PROGRAM = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
os.setpgid(0, 0)
from zhixing.envs.vector.worker import main
main(*map(int, sys.argv[1:]))
"""
START = "the start"
CALL_DESCRIPTIONS = {  # what a worker does in a call, for messages
    "make_trial": "the constructor",
    "describe_trial": "the first reset",
    "time_trial": "the trial steps",
    "close_trial": "the end of a trial",
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
    """A fresh interpreter. `answer` must be called once before the first call: it waits for the imports."""

    def __init__(self, name: str, memory_fd: int, failure_policy: FailurePolicy, *, die_with_parent: bool) -> None:
        self.name, self.failure_policy = name, failure_policy
        self.first, self.last = 0, 1  # until it is given its environments
        self.action_log: ActionLog | None = None
        self.spin_seconds = 0.0
        self.lost = False  # it was killed, by whomever
        self.consecutive_failures = 0  # how often in a row it had to be replaced
        self.mark = new_mark()
        self._doing: str | None = START  # None for a step
        self._until: float | None = None  # when its time for what it does is up, where there is a limit
        # two pipes: a byte through each takes less than through a socket
        (commands, self._commands), (self.answers, answers) = _pipes()
        fds = commands, answers, memory_fd
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, *map(str, fds), str(int(die_with_parent))],
                pass_fds=fds,
                stdin=subprocess.DEVNULL,
                env=marked(child_environment(), self.mark),
            )
        except BaseException:
            os.close(self._commands)
            os.close(self.answers)
            raise
        finally:
            os.close(commands)
            os.close(answers)
        os.set_blocking(self._commands, False)
        self.sentinel = _sentinel(self.process.pid)  # readable when the process is dead
        self._poll, self._writable = select.poll(), select.poll()
        self._poll.register(self.answers, select.POLLIN)
        self._writable.register(self._commands, select.POLLOUT)
        if self.sentinel is not None:
            self._poll.register(self.sentinel, select.POLLIN)
            self._writable.register(self.sentinel, select.POLLIN)
        self.busy = True

    def start_open(self, setup: WorkerSetup, action_log: ActionLog) -> None:
        """Give it its environments."""
        self.first, self.last, self.action_log, self.spin_seconds = (
            setup.first,
            setup.last,
            action_log,
            setup.spin_seconds,
        )
        action_log.under_way[self.first] = 0  # of the worker before, where this one replaces it
        self.start_call("open", (setup,))

    def close_pipes(self) -> None:
        """Close the pipes: the end of the file tells the worker to go."""
        if self._commands >= 0:
            os.close(self._commands)
            os.close(self.answers)
            self._commands = self.answers = -1

    def start_step(self) -> None:
        self.busy, self._doing = True, None
        if self.failure_policy.step_timeout is not None:
            self._until = time.monotonic() + self.failure_policy.step_timeout * (self.last - self.first)
        with suppress(OSError):  # if it is gone, the answer tells
            os.write(self._commands, STEP)

    @property
    def seconds_left(self) -> float | None:
        """For what its environments do now; None without a limit."""
        return None if self._until is None else max(0.0, self._until - time.monotonic())

    @property
    def fds(self) -> tuple[int, ...]:
        """What to wait for: its answer or its death."""
        return (self.answers,) if self.sentinel is None else (self.answers, self.sentinel)

    @property
    def seconds_to_wait(self) -> float | None:
        """How long to wait for one of `fds` before asking `must_answer`; None for as long as it takes."""
        if self.sentinel is not None:
            return self.seconds_left
        return POLL_SECONDS if self.seconds_left is None else min(self.seconds_left, POLL_SECONDS)

    @property
    def ready_without_data(self) -> bool:
        """Whether `answer` can't block although nothing came: its time is up, or it is dead."""
        return self.seconds_left == 0.0 or (self.sentinel is None and self.process.poll() is not None)

    def start_call(self, method: str, arguments: Any, steps: int = 0) -> None:
        """Let it call a method, which may take so many environment steps."""
        self.busy, self._doing = True, CALL_DESCRIPTIONS[method]
        limit = self.failure_policy.effective_call_timeout
        if limit is not None:
            seconds = limit * (self.last - self.first) + steps * (self.failure_policy.step_timeout or limit)
            self._until = time.monotonic() + seconds
        text = pickle.dumps((method, arguments))
        self._write(CALL + LENGTH.pack(len(text)) + text)

    def call(self, method: str, *arguments: Any) -> Any:
        self.start_call(method, arguments)
        return self.receive()

    def receive(self) -> Any:
        """Wait for it. None for a step in which no episode ended with numbers to tell."""
        if self.spin_seconds:
            spin_until_readable(self._poll, self.spin_seconds)
        self._wait(self._poll, self.answers)
        kind = os.read(self.answers, 1)
        if not kind:
            raise self._death()
        value: Any = None
        if kind != DONE:
            (length,) = LENGTH.unpack(self._read(LENGTH.size))
            value = pickle.loads(self._read(length))
        self.busy, self._until = False, None
        if kind == ERROR:
            raise value
        assert kind in (DONE, ENDED, VALUE)
        return value

    def drain(self) -> None:
        """Take an answer that nobody waited for, as after an interrupted step."""
        if self.busy:
            self.receive()

    @property
    def range(self) -> str:
        return range_of(self.first, self.last)

    def kill(self) -> None:
        self.process.kill()

    def end(self, seconds: float) -> int:
        """Wait for a worker that was told to go, at most so long, then kill it, with its process group; gives its exit
        code. Nothing can be asked of it afterwards."""
        code = self._reap(seconds)
        if self.sentinel is not None:
            os.close(self.sentinel)
            self.sentinel = None
        return code

    def _reap(self, seconds: float) -> int:
        if self.process.returncode is None:
            if self.sentinel is None:
                try:
                    self.process.wait(seconds)
                except subprocess.TimeoutExpired:
                    self.process.kill()
            elif not _readable(self.sentinel, seconds):
                self.process.kill()
                _readable(self.sentinel, None)
            kill_group(self.process.pid)  # before the worker is waited for: until then nobody else gets its number
        return self.process.wait()

    def _read(self, count: int) -> bytes:
        parts = []
        while count:
            self._wait(self._poll, self.answers)
            part = os.read(self.answers, min(count, 2**20))
            if not part:
                raise self._death()
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
                raise self._death() from None

    def _wait(self, poll: select.poll, pipe: int) -> None:
        """Return when the pipe can be read or written. Raise if the worker dies or its time is up."""
        while True:
            left = None
            if self._until is None and self.sentinel is not None:  # at most steps: saves 1 us
                events = poll.poll()
            else:
                left, seconds = self.seconds_left, self.seconds_to_wait
                events = poll.poll(None if seconds is None else 1000 * min(seconds, 1e6))
            for fd, event in events:
                if fd == pipe and event & (select.POLLIN | select.POLLOUT):
                    return
            if events:
                raise self._death()
            if left == 0.0:
                raise self._hung()
            if self.sentinel is None and self.process.poll() is not None and not poll.poll(0):
                raise self._death()

    def _death(self) -> EnvCrashError:
        code = self._reap(CLOSE_SECONDS)
        kill_marked([self.mark])
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        words = f"the worker process of {self.name} (index {self.range}) {how}"
        return self._lose(words, "" if self._doing is None else f", at {self._doing}", "ProcessDied", how)

    def _hung(self) -> EnvCrashError:
        self.process.kill()
        self._reap(CLOSE_SECONDS)
        kill_marked([self.mark])
        if self._doing is None:
            what, limit, setting = "a step", self.failure_policy.step_timeout, "vector.step_timeout"
        else:
            what, limit, setting = self._doing, self.failure_policy.effective_call_timeout, "vector.call_timeout"
        how = f"took longer than {limit:g} s ({setting})"
        return self._lose(f"{what} of {self.name} (index {self.range}) {how}", "", "StepTimeLimit", how)

    def _lose(self, words: str, doing: str, kind: str, how: str) -> EnvCrashError:
        """The error for a worker that is no more, with what it was doing: as far as the tapes tell, else `doing`."""
        index = -1 if self.action_log is None else self.action_log.under_way[self.first] - 1
        tape = self.action_log.read(index) if self.action_log is not None and index >= 0 else None
        if self.action_log is None or tape is None:  # between steps, or before the first of them
            self.lost = True
            return EnvCrashError(words + doing)
        count = self.action_log.counts[index]
        crash = EnvCrashError(f"{words}, at {f'step {count} of an episode' if count else 'a reset'} of index {index}")
        if not self.lost:
            error = {"type": kind, "message": how, "traceback": ""}
            story = {name: tape[name] for name in ("seed", "origin", "actions")}
            crash.report = {"index": index, **story, "error": error}
        self.lost = True
        return crash


def _pipes() -> tuple[tuple[int, int], tuple[int, int]]:
    commands = os.pipe()
    try:
        return commands, os.pipe()
    except OSError:
        os.close(commands[0])
        os.close(commands[1])
        raise


def _sentinel(pid: int) -> int | None:
    """Return a file descriptor that becomes readable when the process ends; None where the system has none (macOS)."""
    if sys.platform == "linux":
        with suppress(AttributeError, OSError):
            return os.pidfd_open(pid)
    return None


def _readable(fd: int, seconds: float | None) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(None if seconds is None else 1000 * seconds))


def range_of(first: int, last: int) -> str:
    """The indices of a worker's environments, for people; `last` is one past them."""
    return str(first) if last == first + 1 else f"{first} to {last - 1}"

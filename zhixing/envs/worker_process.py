"""The parent's end of one worker process: to start it, to ask it, and to tell how it was lost."""

from __future__ import annotations

import os
import pickle
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle  # type: ignore[import-untyped]

from zhixing.envs.tapes import Tapes
from zhixing.envs.worker import CALL, DONE, ENDED, ERROR, STEP, VALUE, Setup, watch
from zhixing.errors import EnvCrashError
from zhixing.importing import child_environment

CLOSE_SECONDS = 5.0  # how long close() waits for a step under way
# SIGINT is ignored before the slow imports, or Ctrl-C during the start would print a traceback per worker
PROGRAM = """
import signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
from zhixing.envs.worker import main
main(*map(int, sys.argv[1:]))
"""


class WorkerProcess:
    def __init__(self, setup: Setup, memory_fd: int, tapes: Tapes, step_seconds: float | None) -> None:
        self.name, self.first, self.last, self.tapes = setup.name, setup.first, setup.last, tapes
        self.step_seconds, self.watch_seconds = step_seconds, setup.watch_seconds
        self.lost = False  # it was killed, by whomever
        self.strikes = 0  # how often in a row it had to be replaced
        self._since: float | None = None  # when the step under way began, where there is a limit
        # two pipes: a byte through each takes less than through a socket
        (commands, self._commands), (self._answers, answers) = os.pipe(), os.pipe()
        self.commands, self.answers = Connection(self._commands, readable=False), Connection(self._answers)
        fds = commands, answers, memory_fd
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, *map(str, fds)],
                pass_fds=fds,
                stdin=subprocess.DEVNULL,
                env=child_environment(),
            )
        finally:
            os.close(commands)
            os.close(answers)
        self._poll = select.poll()
        self._poll.register(self._answers, select.POLLIN)
        self.busy = True
        self._tell(lambda: self.commands.send_bytes(cloudpickle.dumps(setup)))  # takes what __main__ defines, too

    def hang_up(self) -> None:
        """The end of the file tells it to go."""
        self.commands.close()
        self.answers.close()

    def start_step(self) -> None:
        self.busy = True
        if self.step_seconds is not None:
            self._since = time.monotonic()
        with suppress(OSError):  # if it is gone, the answer tells
            os.write(self._commands, STEP)

    @property
    def seconds_left(self) -> float | None:
        """For the steps under way of all its environments; None without a limit."""
        if self._since is None or self.step_seconds is None:
            return None
        return max(0.0, self._since + self.step_seconds * (self.last - self.first) - time.monotonic())

    def start_call(self, method: str, arguments: Any) -> None:
        self.busy = True
        self._tell(lambda: os.write(self._commands, CALL))
        self._tell(lambda: self.commands.send_bytes(pickle.dumps((method, arguments))))

    def answer(self) -> Any:
        """Wait for it. None for a step in which no episode ended with numbers to tell."""
        seconds = self.seconds_left
        if seconds is not None and not self._poll.poll(1000 * min(seconds, 1e6)):
            raise self._hung()
        if self.watch_seconds:
            watch(self._poll, self.watch_seconds)
        try:
            kind = os.read(self._answers, 1)
            value: Any = None if kind == DONE else pickle.loads(self.answers.recv_bytes())
        except (OSError, EOFError):
            raise self._death() from None
        self.busy, self._since = False, None
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
        return range_of(self.first, self.last)

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
        return self._lose(f"the worker process of {self.name} (index {self.range}) {how}", "ProcessDied", how)

    def _hung(self) -> EnvCrashError:
        self.process.kill()
        self.process.wait()
        how = f"took longer than {self.step_seconds:g} s (vector.step_seconds)"
        return self._lose(f"a step of {self.name} (index {self.range}) {how}", "StepTimeLimit", how)

    def _lose(self, words: str, kind: str, how: str) -> EnvCrashError:
        """The error for a worker that is no more, with what it was doing."""
        index = self.tapes.under_way[self.first] - 1
        tape = self.tapes.read(index) if index >= 0 else None
        if tape is None:  # between steps
            self.lost = True
            return EnvCrashError(words)
        count = self.tapes.counts[index]
        crash = EnvCrashError(f"{words}, at {f'step {count} of an episode' if count else 'a reset'} of index {index}")
        if not self.lost:
            error = {"type": kind, "message": how, "traceback": ""}
            story = {name: tape[name] for name in ("seed", "origin", "actions")}
            crash.capsule = {"index": index, **story, "error": error}
        self.lost = True
        return crash


def range_of(first: int, last: int) -> str:
    """The indices of a worker's environments, for people; `last` is one past them."""
    return str(first) if last == first + 1 else f"{first} to {last - 1}"

"""A run's folder belongs to one process at a time, however that one ends."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import zhixing as zx
from zhixing.experiments.jobs import Job, run_job
from zhixing.training.lock import FolderLock

HOLD = """
import sys, time
from pathlib import Path
from zhixing.training.lock import FolderLock
lock = FolderLock(Path(sys.argv[1]))
print("locked", flush=True)
time.sleep(600)
"""


@pytest.fixture
def holder(tmp_path: Path) -> object:
    """Another process that holds the lock of `tmp_path`."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "locked\n"
    yield process
    process.kill()
    process.communicate()


def test_the_error_names_the_holder_and_a_kill_releases_the_lock(holder: subprocess.Popen[str], tmp_path: Path) -> None:
    named = rf"in use by process {holder.pid} on '{re.escape(socket.gethostname())}' since '\d{{4}}-\d\d-\d\d \d\d:"
    with pytest.raises(zx.UserError, match=named):
        FolderLock(tmp_path)
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    lock = FolderLock(tmp_path)
    lock.release()
    assert list(tmp_path.iterdir()) == []
    lock.release()  # a second time does nothing


def test_a_forked_child_does_not_keep_the_lock(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path)
    ready, told = os.pipe()
    stop, go = os.pipe()
    child = os.fork()
    if not child:
        os.write(told, b"x")
        os.read(stop, 1)
        os._exit(0)
    os.read(ready, 1)
    with pytest.raises(zx.UserError, match=f"process {os.getpid()} "):
        FolderLock(tmp_path)  # the child has closed its copy, which must not unlock ours
    lock.drop()  # as when this process is killed: only descriptors are closed
    FolderLock(tmp_path).release()
    os.write(go, b"x")
    os.waitpid(child, 0)
    for fd in (ready, told, stop, go):
        os.close(fd)


def test_a_file_system_without_locks_is_used_with_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def unsupported(fd: int, how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", unsupported)
    FolderLock(tmp_path).release()
    assert f"note: {tmp_path} can't be locked (No locks available)" in capsys.readouterr().err


def test_a_link_in_the_place_of_the_lock_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("precious")
    (tmp_path / ".lock").symlink_to(tmp_path / "victim")
    with pytest.raises(OSError, match="symbolic links"):
        FolderLock(tmp_path)
    assert (tmp_path / "victim").read_text() == "precious"


class _ResumeMeanwhile(zx.Callback):
    """Try to write to the run from elsewhere in the middle of it."""

    def __init__(self, run: Path) -> None:
        self.run, self.errors = run, set[str]()

    def iteration_end(self, loop: zx.TrainingLoop, metrics: object) -> None:
        job = Job("run", self.run, loop.cfg.model_dump(mode="json"))
        for attempt in (lambda: zx.Session.resume(self.run, quiet=True), lambda: run_job(job, lambda *_: True)):
            try:
                attempt()
            except zx.UserError as error:
                self.errors.add(str(error))
            else:
                self.errors.add("none")


def test_a_run_that_is_running_is_not_resumed(short_config: Callable, tmp_path: Path) -> None:
    """Neither while it is trained for the first time, nor while it is resumed, nor by a sweep."""
    run = tmp_path / "run"
    first = _ResumeMeanwhile(run)
    zx.Session(short_config("ppo", "toy/match"), run, [first], quiet=True).run()
    again = _ResumeMeanwhile(run)
    zx.Session.resume(run, [again], quiet=True, env_steps=1400).run()
    for callback in (first, again):
        (error,) = callback.errors
        assert f"{run} is in use by process {os.getpid()} on" in error
    assert not (run / ".lock").exists()
    assert zx.Session.resume(run, quiet=True).finished


def test_of_two_trainings_in_one_folder_one_begins(short_config: Callable, tmp_path: Path) -> None:
    run = tmp_path / "run"
    late = zx.Session(short_config("ppo", "toy/match"), run, quiet=True)  # nothing is there yet

    class Begin(zx.Callback):
        def train_begin(self, loop: zx.TrainingLoop) -> None:
            with pytest.raises(zx.UserError, match="already holds a run"):
                late.run()

    zx.Session(short_config("ppo", "toy/match"), run, [Begin()], quiet=True).run()

"""Run folders are locked by one process at a time, and unlocked however it ends."""

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


def test_error_names_the_holder_and_killing_it_releases_the_lock(holder: subprocess.Popen[str], tmp_path: Path) -> None:
    message = rf"in use by process {holder.pid} on '{re.escape(socket.gethostname())}' since '\d{{4}}-\d\d-\d\d \d\d:"
    with pytest.raises(zx.UserError, match=message):
        FolderLock(tmp_path)
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    lock = FolderLock(tmp_path)
    lock.release()
    assert list(tmp_path.iterdir()) == []
    lock.release()  # has no effect


def test_forked_child_does_not_keep_the_lock(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path)
    ready_read, ready_write = os.pipe()
    exit_read, exit_write = os.pipe()
    child = os.fork()
    if not child:
        os.write(ready_write, b"x")
        os.read(exit_read, 1)
        os._exit(0)
    os.read(ready_read, 1)
    with pytest.raises(zx.UserError, match=f"process {os.getpid()} "):
        FolderLock(tmp_path)  # the child has closed its descriptor, which must not unlock the folder
    lock.drop()  # like a kill of this process, closes only descriptors
    FolderLock(tmp_path).release()
    os.write(exit_write, b"x")
    os.waitpid(child, 0)
    for fd in (ready_read, ready_write, exit_read, exit_write):
        os.close(fd)


def test_file_system_without_locks_prints_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def unsupported(fd: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", unsupported)
    FolderLock(tmp_path).release()
    assert f"note: {tmp_path} can't be locked (No locks available)" in capsys.readouterr().err


def test_symbolic_link_named_like_the_lock_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("precious")
    (tmp_path / ".lock").symlink_to(tmp_path / "victim")
    with pytest.raises(OSError, match="symbolic links"):
        FolderLock(tmp_path)
    assert (tmp_path / "victim").read_text() == "precious"


class _TryToWrite(zx.Callback):
    """Tries to resume the run, and to run it as a job, during training."""

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


def test_active_run_is_locked(short_config: Callable, tmp_path: Path) -> None:
    """Both during the first training and after a resume."""
    run = tmp_path / "run"
    first = _TryToWrite(run)
    zx.Session(short_config("ppo", "toy/match"), run, [first], quiet=True).run()
    second = _TryToWrite(run)
    zx.Session.resume(run, [second], quiet=True, env_steps=1400).run()
    for callback in (first, second):
        (error,) = callback.errors
        assert f"{run} is in use by process {os.getpid()} on" in error
    assert not (run / ".lock").exists()
    assert zx.Session.resume(run, quiet=True).finished


def test_second_run_in_the_same_folder_is_rejected(short_config: Callable, tmp_path: Path) -> None:
    run = tmp_path / "run"
    second = zx.Session(short_config("ppo", "toy/match"), run, quiet=True)  # the folder is still free

    class RunSecond(zx.Callback):
        def train_begin(self, loop: zx.TrainingLoop) -> None:
            with pytest.raises(zx.UserError, match="already contains a run"):
                second.run()

    zx.Session(short_config("ppo", "toy/match"), run, [RunSecond()], quiet=True).run()

"""Closed terminals, full disks, limits of the system, changed folders: training continues or ends with a message."""

from __future__ import annotations

import errno
import io
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from conftest import Command, differing_tensors, metrics_rows

import zhixing as zx
from zhixing.errors import note, write_stderr
from zhixing.training.callbacks import Progress
from zhixing.training.run_folder import RunFolder

SHORT = ["env_steps=200", "tensorboard=false", "vector.backend=serial", "num_envs=1", "rollout_steps=32"]
SHORT += ["minibatch_size=32", "eval_every=0", "eval_episodes=1"]


def shell(command: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a line of Bash in which $zhixing runs the command line."""
    env = {**os.environ, "zhixing": f"{sys.executable} -m zhixing", "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(["bash", "-c", command], cwd=cwd, env=env, capture_output=True, text=True, errors="replace")


# --- standard output and standard error ---


class _BrokenStream(io.StringIO):
    """Fails to write, like a file on a full disk or a closed terminal."""

    def __init__(self, error: type[Exception] = OSError) -> None:
        super().__init__()
        self.error, self.attempts = error, 0

    def write(self, text: str) -> int:
        self.attempts += 1
        raise self.error("no space left on device")


@pytest.mark.parametrize("error", [OSError, BrokenPipeError, ValueError, RuntimeError])
def test_failing_standard_error_doesnt_stop_training(
    error: type[Exception], short_config: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = _BrokenStream(error)
    monkeypatch.setattr(sys, "stderr", stream)
    note("something")
    result = zx.Session(short_config("ppo", "toy/match"), tmp_path / "run").run()
    assert result["env_steps"] == 1216
    assert stream.attempts >= 2  # the note and the last line of progress


def test_training_works_without_standard_error(
    short_config: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    write_stderr("ignored")
    assert not Progress().live
    assert zx.Session(short_config("ppo", "toy/match"), tmp_path / "run").run()["env_steps"] == 1216
    assert capsys.readouterr().out == ""  # print(file=None) would write there


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_full_disk_of_standard_output_is_one_message(tmp_path: Path) -> None:
    train = f"$zhixing train ppo --env toy/match --out mine {' '.join(SHORT)}"
    completed = shell(f"{train} 2>/dev/full; echo $?; $zhixing list >/dev/full; echo $?", tmp_path)
    assert completed.stdout.splitlines()[0].split() == ["run", "mine"]
    assert completed.stdout.splitlines()[-2:] == ["0", "1"]
    assert completed.stderr == "error: the output: No space left on device; free space on the disk\n"
    assert (tmp_path / "mine" / "result.json").is_file()


def test_ascii_terminal_shows_other_letters_as_escapes(tmp_path: Path) -> None:
    train = f"$zhixing train ppo --env toy/match --out 知行 {' '.join(SHORT)}"
    completed = shell(train, tmp_path, PYTHONIOENCODING="ascii")
    assert completed.returncode == 0, completed.stderr
    assert completed.stdout.splitlines()[0].split() == ["run", "\\u77e5\\u884c"]
    assert (tmp_path / "知行" / "result.json").is_file()


# --- limits of the system ---


@pytest.mark.parametrize(
    "words",
    [
        ["train", "ppo", "--env", "toy/match", "--out", "LONG"],
        ["train", "ppo", "--env", "toy/match", "--init-from", "LONG"],
        ["train", "ppo", "--env", "LONG"],
        ["train", "bc", "--dataset", "LONG"],
        ["eval", "LONG"],
        ["plot", "LONG", "-o", "a.png"],
        ["zoo", "LONG"],
    ],
)
def test_name_that_is_too_long_is_one_message(words: list[str], run_cli: Command) -> None:
    code, _, err = run_cli(*[word.replace("LONG", "x" * 300) for word in words])
    assert code == 2
    assert err.startswith("error: ")
    assert len(err.splitlines()) == 1
    assert "File name too long; choose a shorter name" in err or "unknown environment" in err


def test_default_folder_of_a_long_name_is_short(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from zhixing.training.resolve import default_out

    monkeypatch.chdir(tmp_path)
    cfg = zx.config.load(algorithm="ppo", env="my.module:" + "x" * 300)
    assert len(default_out(cfg).name) < 160


def test_too_many_open_files_are_one_message(tmp_path: Path) -> None:
    settings = "vector.backend=process vector.workers=8 num_envs=8 tensorboard=false env_steps=200"
    completed = shell(f"ulimit -n 16; $zhixing train ppo --env toy/match --out mine {settings}", tmp_path)
    assert completed.returncode in (1, 2)
    assert "error: " in completed.stderr
    assert "oo many open files" in completed.stderr
    assert "ulimit -n" in completed.stderr
    assert "Traceback" not in completed.stderr


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (OSError(errno.EMFILE, "Too many open files"), 1, "the system: Too many open files; raise the limit"),
        (OSError(errno.ENOSPC, "No space left", "a.csv"), 2, "a.csv: No space left; free space on the disk"),
        (OSError(errno.ELOOP, "Too many links", "a.csv"), 2, "a.csv can't be used: Too many links"),
        (OSError(errno.ENAMETOOLONG, "File name too long", "x" * 300), 2, "File name too long; choose a shorter"),
    ],
)
def test_system_error_is_one_message(
    error: OSError, code: int, message: str, run_cli: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr("zhixing.algorithms.names", fail)
    exit_code, out, err = run_cli("list")
    assert (exit_code, out) == (code, "")
    assert err.startswith("error: ")
    assert message in err
    assert len(err) < 200


def test_unexpected_system_error_keeps_its_traceback(run_cli: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise OSError(errno.EBADF, "a bug")

    monkeypatch.setattr("zhixing.algorithms.names", fail)
    with pytest.raises(OSError, match="a bug"):
        run_cli("list")


# --- signals ---


class _HangUp(zx.Callback):
    """Sends SIGHUP to all processes of the run, twice to this one, as closing a terminal does."""

    def __init__(self, env_steps: int) -> None:
        self.env_steps, self.workers = env_steps, list[int]()

    def iteration_begin(self, loop: zx.TrainingLoop) -> None:
        if loop.env_steps >= self.env_steps:
            for process in [*self.workers, os.getpid(), os.getpid()]:
                os.kill(process, signal.SIGHUP)


@pytest.fixture
def hang_up_is_an_error() -> Any:
    """An unhandled SIGHUP fails the test instead of ending the test run."""

    def fail(number: int, frame: FrameType | None) -> None:
        raise AssertionError("SIGHUP wasn't handled")

    before = signal.signal(signal.SIGHUP, fail)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("hang_up_is_an_error")
@pytest.mark.parametrize("backend", ["serial", "process"])
def test_run_stopped_by_a_closed_terminal_resumes_exactly(backend: str, short_config: Callable, tmp_path: Path) -> None:
    cfg = short_config("ppo", "toy/match", vector__backend=backend)
    zx.Session(cfg, tmp_path / "whole", quiet=True).run()
    hang_up = _HangUp(500)
    session = zx.Session(cfg, tmp_path / "parts", [hang_up], quiet=True)
    if backend == "process":
        hang_up.workers = [worker.process.pid for worker in session.env._workers]  # type: ignore[union-attr]
    with pytest.raises(KeyboardInterrupt):
        session.run()
    # nine iterations of 64 steps: the current one is completed
    assert RunFolder.open(tmp_path / "parts").newest_step() == 576
    zx.Session.resume(tmp_path / "parts", quiet=True).run()
    assert differing_tensors(tmp_path / "whole", tmp_path / "parts") == []
    assert metrics_rows(tmp_path / "whole") == metrics_rows(tmp_path / "parts")


def test_nohup_is_respected(short_config: Callable, tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        result = zx.Session(short_config("ppo", "toy/match"), tmp_path / "run", [_HangUp(500)], quiet=True).run()
        assert result["env_steps"] == 1216
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


# --- the current folder ---

WANDERER = """
import os, tempfile
from zhixing.envs.toy import Match

class Wanderer(Match):
    def reset(self, **kwargs):
        os.chdir(tempfile.gettempdir())
        return super().reset(**kwargs)
"""


def test_relative_paths_work_if_an_environment_changes_the_current_folder(
    run_cli: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "wanderer.py").write_text(WANDERER)

    def run(*words: str) -> str:
        monkeypatch.chdir(tmp_path)
        code, out, err = run_cli(*words)
        assert code == 0, err
        return out

    wanderer = ["--env", "wanderer:Wanderer", *SHORT]
    assert run("train", "ppo", "--out", "first", *wanderer).split()[:2] == ["run", "first"]
    run("resume", "first", "env_steps=400")
    run("train", "ppo", "--out", "second", "--init-from", "first", *wanderer)
    run("collect", "first", "-o", "data", "--steps", "50")
    dqn = ["learning_starts=20", "batch_size=8", "replay.start=data", "env_steps=64", "vector.backend=serial"]
    run("train", "dqn", "--env", "wanderer:Wanderer", "--out", "third", "eval_episodes=1", *dqn)
    run("export", "second", "-o", "exported", "--episodes", "2")
    for path in ("first/result.json", "second/result.json", "third/result.json", "exported/agent.json"):
        assert (tmp_path / path).is_file(), path
    monkeypatch.chdir(tmp_path.parent)  # resuming works from any folder
    run("resume", str(tmp_path / "third"), "env_steps=128")

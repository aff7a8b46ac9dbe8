"""Terminals that close, logs that fill up, folders that change: training goes on, or ends with a message."""

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
SHORT += ["minibatch_size=32", "eval_every_steps=0", "eval_episodes=1"]


def shell(command: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a line of Bash in which $zhixing is the command."""
    env = {**os.environ, "zhixing": f"{sys.executable} -m zhixing", "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(["bash", "-c", command], cwd=cwd, env=env, capture_output=True, text=True, errors="replace")


# --- standard output and standard error ---


class _FullDisk(io.StringIO):
    """A stream as of a log file on a full disk, or of a terminal that was closed."""

    def __init__(self, error: type[Exception] = OSError) -> None:
        super().__init__()
        self.error, self.tried = error, 0

    def write(self, text: str) -> int:
        self.tried += 1
        raise self.error("no space left on device")


@pytest.mark.parametrize("error", [OSError, BrokenPipeError, ValueError, RuntimeError])
def test_progress_and_notes_that_cannot_be_written_end_nothing(
    error: type[Exception], short_config: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = _FullDisk(error)
    monkeypatch.setattr(sys, "stderr", stream)
    note("something")
    result = zx.Session(short_config("ppo", "toy/match"), tmp_path / "run").run()
    assert result["env_steps"] == 1216
    assert stream.tried >= 2  # the note and the last line of progress


def test_a_program_without_standard_error_trains(
    short_config: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    write_stderr("to nobody")
    assert not Progress().live
    assert zx.Session(short_config("ppo", "toy/match"), tmp_path / "run").run()["env_steps"] == 1216
    assert capsys.readouterr().out == ""  # print(file=None) would write there


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_behind_the_output_is_one_message(tmp_path: Path) -> None:
    train = f"$zhixing train ppo --env toy/match --out mine {' '.join(SHORT)}"
    answer = shell(f"{train} 2>/dev/full; echo $?; $zhixing list >/dev/full; echo $?", tmp_path)
    assert answer.stdout.splitlines()[0].split() == ["run", "mine"]
    assert answer.stdout.splitlines()[-2:] == ["0", "1"]
    assert answer.stderr == "error: the output: No space left on device; free space on the disk\n"
    assert (tmp_path / "mine" / "result.json").is_file()


def test_an_ascii_terminal_shows_other_letters_as_escapes(tmp_path: Path) -> None:
    train = f"$zhixing train ppo --env toy/match --out 知行 {' '.join(SHORT)}"
    answer = shell(train, tmp_path, PYTHONIOENCODING="ascii")
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.splitlines()[0].split() == ["run", "\\u77e5\\u884c"]
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
def test_a_name_that_is_too_long_is_one_message(words: list[str], run_cli: Command) -> None:
    code, _, err = run_cli(*[word.replace("LONG", "x" * 300) for word in words])
    assert code == 2
    assert err.startswith("error: ")
    assert len(err.splitlines()) == 1
    assert "File name too long; choose a shorter name" in err or "unknown environment" in err


def test_the_default_folder_of_long_names_is_short(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from zhixing.training.resolve import default_out

    monkeypatch.chdir(tmp_path)
    cfg = zx.config.load(algorithm="ppo", env="my.module:" + "x" * 300)
    assert len(default_out(cfg).name) < 160


def test_too_many_open_files_are_one_message(tmp_path: Path) -> None:
    settings = "vector.backend=process vector.workers=8 num_envs=8 tensorboard=false env_steps=200"
    answer = shell(f"ulimit -n 16; $zhixing train ppo --env toy/match --out mine {settings}", tmp_path)
    assert answer.returncode in (1, 2)
    assert "error: " in answer.stderr
    assert "oo many open files" in answer.stderr
    assert "ulimit -n" in answer.stderr
    assert "Traceback" not in answer.stderr


@pytest.mark.parametrize(
    ("error", "code", "told"),
    [
        (OSError(errno.EMFILE, "Too many open files"), 1, "the system: Too many open files; raise the limit"),
        (OSError(errno.ENOSPC, "No space left", "a.csv"), 2, "a.csv: No space left; free space on the disk"),
        (OSError(errno.ELOOP, "Too many links", "a.csv"), 2, "a.csv can't be used: Too many links"),
        (OSError(errno.ENAMETOOLONG, "File name too long", "x" * 300), 2, "File name too long; choose a shorter"),
    ],
)
def test_errors_of_the_system_are_one_message(
    error: OSError, code: int, told: str, run_cli: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr("zhixing.algorithms.names", fail)
    answer = run_cli("list")
    assert answer[:2] == (code, "")
    assert answer[2].startswith("error: ")
    assert told in answer[2]
    assert len(answer[2]) < 200


def test_other_errors_of_the_system_keep_their_traceback(run_cli: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise OSError(errno.EBADF, "a mistake of ours")

    monkeypatch.setattr("zhixing.algorithms.names", fail)
    with pytest.raises(OSError, match="a mistake of ours"):
        run_cli("list")


# --- signals ---


class _HangUp(zx.Callback):
    """Sends what a terminal sends when it is closed: SIGHUP to the whole group of processes, twice."""

    def __init__(self, at: int) -> None:
        self.at, self.workers = at, list[int]()

    def iteration_begin(self, loop: zx.TrainingLoop) -> None:
        if loop.env_steps >= self.at:
            for process in [*self.workers, os.getpid(), os.getpid()]:
                os.kill(process, signal.SIGHUP)


@pytest.fixture
def hang_up_is_an_error() -> Any:
    """If nobody handles SIGHUP it must fail the test, not end the whole run of tests."""

    def fail(number: int, frame: FrameType | None) -> None:
        raise AssertionError("SIGHUP wasn't handled")

    before = signal.signal(signal.SIGHUP, fail)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("hang_up_is_an_error")
@pytest.mark.parametrize("backend", ["serial", "process"])
def test_a_closed_terminal_saves_and_the_resumed_run_ends_like_one_never_stopped(
    backend: str, short_config: Callable, tmp_path: Path
) -> None:
    cfg = short_config("ppo", "toy/match", vector__backend=backend)
    zx.Session(cfg, tmp_path / "whole", quiet=True).run()
    close_pipes = _HangUp(500)
    session = zx.Session(cfg, tmp_path / "parts", [close_pipes], quiet=True)
    if backend == "process":
        close_pipes.workers = [worker.process.pid for worker in session.env._workers]  # type: ignore[union-attr]
    with pytest.raises(KeyboardInterrupt):
        session.run()
    assert (
        RunFolder.open(tmp_path / "parts").newest_step() == 576
    )  # nine iterations of 64 steps: the one under way is finished
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
    def reset(self, **words):
        os.chdir(tempfile.gettempdir())
        return super().reset(**words)
"""


def test_an_environment_that_changes_the_current_folder_breaks_no_relative_path(
    run_cli: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "wanderer.py").write_text(WANDERER)

    def done(*words: str) -> str:
        monkeypatch.chdir(tmp_path)
        code, out, err = run_cli(*words)
        assert code == 0, err
        return out

    wanderer = ["--env", "wanderer:Wanderer", *SHORT]
    assert done("train", "ppo", "--out", "first", *wanderer).split()[:2] == ["run", "first"]
    done("resume", "first", "env_steps=400")
    done("train", "ppo", "--out", "second", "--init-from", "first", *wanderer)
    done("collect", "first", "-o", "data", "--steps", "50")
    dqn = ["learning_starts=20", "batch_size=8", "replay.start=data", "env_steps=64", "vector.backend=serial"]
    done("train", "dqn", "--env", "wanderer:Wanderer", "--out", "third", "eval_episodes=1", *dqn)
    done("export", "second", "-o", "exported", "--episodes", "2")
    for path in ("first/result.json", "second/result.json", "third/result.json", "exported/agent.json"):
        assert (tmp_path / path).is_file(), path
    monkeypatch.chdir(tmp_path.parent)  # nor does resuming from elsewhere
    done("resume", str(tmp_path / "third"), "env_steps=128")

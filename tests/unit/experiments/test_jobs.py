"""Jobs: begin, go on, end early; what they tell, and what is told of those that die."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from conftest import differing_tensors

import zhixing as zx
from zhixing.config import RunConfig
from zhixing.experiments import executors
from zhixing.experiments.executors import LocalProcesses, ProgressBoard, drive, locked
from zhixing.experiments.jobs import Job, JobEvent, main, run_job
from zhixing.utils.cpus import cpu_count

Small = Callable[..., RunConfig]


def job(cfg: RunConfig, folder: Path, name: str = "run", asks: bool = False) -> Job:
    return Job(name, folder / name, cfg.model_dump(mode="json"), asks)


class Ear:
    """Hears evaluations, and says when to end."""

    def __init__(self, end_at: int | None = None, gone_at: int | None = None) -> None:
        self.heard: list[tuple[str, Mapping[str, Any]]] = []
        self.end_at, self.gone_at = end_at, gone_at

    def __call__(self, kind: str, told: Mapping[str, Any]) -> bool:
        self.heard.append((kind, told))
        if self.gone_at is not None and told["steps"] >= self.gone_at:
            raise BrokenPipeError
        return self.end_at is None or told["steps"] < self.end_at


def test_a_job_whose_listener_is_gone_saves_and_goes_on_exactly(short_config: Small, tmp_path: Path) -> None:
    cfg = short_config("ppo", env_steps=640, eval_every_steps=128, checkpoint_every_steps=0)
    whole = run_job(job(cfg, tmp_path, "whole"), Ear())
    with pytest.raises(KeyboardInterrupt):
        run_job(job(cfg, tmp_path, "cut"), Ear(gone_at=256))
    assert [file.name for file in (tmp_path / "cut" / "checkpoints").glob("0*.safetensors")] == [
        "000000000256.safetensors"
    ]
    assert not (tmp_path / "cut" / "result.json").exists()
    ear = Ear()
    assert run_job(job(cfg, tmp_path, "cut"), ear)["final_return"] == whole["final_return"]
    assert ear.heard[0][1]["steps"] > 256  # not from the beginning
    assert differing_tensors(tmp_path / "whole", tmp_path / "cut") == []


def test_a_job_ends_for_good_when_it_is_not_to_go_on(short_config: Small, tmp_path: Path) -> None:
    cfg = short_config("ppo", env_steps=640, eval_every_steps=128)
    ear = Ear(end_at=256)
    result = run_job(job(cfg, tmp_path), ear)
    assert result["env_steps"] == 256
    assert [told["steps"] for kind, told in ear.heard if kind == "evaluation"] == [128, 256]
    assert [told["fraction"] for kind, told in ear.heard if kind == "evaluation"] == [0.2, 0.4]
    assert ear.heard[-1][1]["ret"] == result["final_return"]
    assert (tmp_path / "run" / "result.json").exists()


def test_a_run_killed_before_its_first_checkpoint_begins_anew(short_config: Small, tmp_path: Path) -> None:
    cfg = short_config("ppo", env_steps=128)
    session = zx.Session(cfg, tmp_path / "run", quiet=True)
    session.folder.create(session.cfg)
    session.close()
    (tmp_path / "run" / "metrics.csv").write_text("half a li")
    assert run_job(job(cfg, tmp_path), Ear())["env_steps"] == 128
    assert "half" not in (tmp_path / "run" / "metrics.csv").read_text()


def through_a_socket(mine: Job, answers: list[bool]) -> list[tuple[str, Any]]:
    """What `main` says, in this process."""
    ours, theirs = socket.socketpair()
    listener = Connection(ours.detach())
    listener.send(mine)
    for answer in answers:
        listener.send(answer)
    main(theirs.detach())
    heard = []
    while listener.poll(0):
        try:
            heard.append(listener.recv())
        except EOFError:
            break
    listener.close()
    return heard


def test_main_tells_evaluations_and_the_result_and_hears_answers(short_config: Small, tmp_path: Path) -> None:
    cfg = short_config("ppo", env_steps=640, eval_every_steps=128)
    heard = through_a_socket(job(cfg, tmp_path, asks=True), [True, False])
    assert [kind for kind, _ in heard if kind != "progress"] == ["evaluation", "evaluation", "done"]
    assert heard[-1][1]["env_steps"] == 256


def test_main_tells_what_went_wrong(short_config: Small, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kind, told = through_a_socket(job(short_config("ppo", env="dummy_envs:RaisingEnv"), tmp_path), [])[-1]
    assert kind == "failed"
    assert "the third step is broken" in told["error"]
    assert "ZeroDivisionError" in capsys.readouterr().err
    kind, told = through_a_socket(Job("other", tmp_path / "other", None), [])[-1]  # type: ignore[arg-type]
    assert (kind, told["error"].split(":")[0]) == ("failed", "AttributeError")  # a mistake of ours
    assert "Traceback" in capsys.readouterr().err


# --- in processes of their own ---


def test_an_interrupt_stops_all_with_checkpoints(
    short_config: Small, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # evaluations are told, too, and put off the next word of progress: there must be time between them
    cfg = short_config(
        "ppo", env_steps=10_000_000, eval_every_steps=64_000, log_every_steps=640, vector__backend="serial"
    )
    heard: list[str] = []
    with locked(tmp_path) as lock:
        executor = LocalProcesses(1, lock)

        def on_event(news: JobEvent) -> None:
            heard.append(news.kind)
            if news.kind == "evaluation":
                executor.answer(news.job, True)
            if heard.count("progress") == 1:
                raise KeyboardInterrupt

        todo = iter([job(cfg, tmp_path, "first", asks=True), job(cfg, tmp_path, "second")])
        with pytest.raises(KeyboardInterrupt):
            drive(executor, lambda: next(todo, None), on_event)
    assert heard[-1] == "stopped"
    assert executor.running == []
    assert list((tmp_path / "first" / "checkpoints").glob("0*.safetensors"))
    assert not (tmp_path / "first" / "result.json").exists()
    assert not (tmp_path / "second").exists()
    assert "stopping all runs" in capsys.readouterr().err


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_runs_share_the_cpus(short_config: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that environments of one don't take those of the others."""
    monkeypatch.setenv("PYTHON_CPU_COUNT", "8")
    with locked(tmp_path) as lock:
        executor = LocalProcesses(3, lock)
        executor.start(job(short_config("ppo", env_steps=10_000_000), tmp_path))
        (process, _) = executor._processes["run"]
        environ = Path(f"/proc/{process.pid}/environ")
        while not environ.read_text():  # as long as the program is being loaded
            time.sleep(0.01)
        told = environ.read_text().split("\0")
        executor.close()
    assert "PYTHON_CPU_COUNT=2" in told
    monkeypatch.setenv("PYTHON_CPU_COUNT", "0")  # nonsense is passed over
    assert cpu_count() == len(os.sched_getaffinity(0))


def test_a_killed_process_is_told_and_jobs_hold_the_claim(
    short_config: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with locked(tmp_path) as lock:
        executor = LocalProcesses(1, lock)
        executor.start(job(short_config("ppo", env_steps=10_000_000), tmp_path))
    with pytest.raises(zx.UserError, match="is in use by process"), locked(tmp_path, 0.1):
        pass
    (process, _) = executor._processes["run"]
    os.kill(process.pid, signal.SIGKILL)
    found: list[JobEvent] = []
    deadline = time.monotonic() + 60
    while not found and time.monotonic() < deadline:
        found = [news for news in executor.news(1.0) if news.last]
    assert found == [JobEvent("run", "failed", {"error": "its process was killed by SIGKILL"})]
    with locked(tmp_path, 0.1):
        pass


def test_half_the_cpus_and_at_least_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for cpus, workers in {1: 1, 2: 1, 3: 1, 8: 4}.items():
        monkeypatch.setattr(executors, "cpu_count", lambda cpus=cpus: cpus)
        assert executors.default_workers() == workers


def test_the_board_shows_a_line_in_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    board = ProgressBoard(4, 1)
    board.live = True
    board.on_event(JobEvent("one", "progress", {"fraction": 0.25, "steps": 10, "ret": float("nan")}))
    assert capsys.readouterr().err == "\r\x1b[2K1 of 4 done  one 25%"
    board.on_event(JobEvent("one", "failed", {"error": "broken"}), "broken")
    assert capsys.readouterr().err == "\r\x1b[2Kfailed   one  broken\n"
    board._shown_at = 0.0
    board.on_event(JobEvent("two", "evaluation", {"fraction": 0.5, "steps": 20, "ret": 7.25}))
    assert capsys.readouterr().err == "\r\x1b[2K1 of 4 done, 1 failed  two 50% 7.25"

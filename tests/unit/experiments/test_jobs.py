"""Tests of jobs: start, resume, early stop, the events they send, and processes that die."""

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
from zhixing.experiments.executors import LocalProcesses, ProgressBoard, locked, run_jobs
from zhixing.experiments.jobs import Job, JobEvent, main, run_job
from zhixing.utils.cpus import cpu_count

ShortConfig = Callable[..., RunConfig]


def job(cfg: RunConfig, folder: Path, name: str = "run", prunable: bool = False) -> Job:
    return Job(name, folder / name, cfg.model_dump(mode="json"), prunable)


class Receiver:
    """Record reports, tell the job to stop at `stop_at` steps, or fail like a closed pipe at `gone_at` steps."""

    def __init__(self, stop_at: int | None = None, gone_at: int | None = None) -> None:
        self.reports: list[tuple[str, Mapping[str, Any]]] = []
        self.stop_at, self.gone_at = stop_at, gone_at

    def __call__(self, kind: str, data: Mapping[str, Any]) -> bool:
        self.reports.append((kind, data))
        if self.gone_at is not None and data["steps"] >= self.gone_at:
            raise BrokenPipeError
        return self.stop_at is None or data["steps"] < self.stop_at


def test_job_without_receiver_saves_and_resumes_exactly(short_config: ShortConfig, tmp_path: Path) -> None:
    cfg = short_config("ppo", env_steps=640, eval_every=128, checkpoint_every=0)
    whole = run_job(job(cfg, tmp_path, "whole"), Receiver())
    with pytest.raises(KeyboardInterrupt):
        run_job(job(cfg, tmp_path, "cut"), Receiver(gone_at=256))
    assert [file.name for file in (tmp_path / "cut" / "checkpoints").glob("0*.safetensors")] == [
        "000000000256.safetensors"
    ]
    assert not (tmp_path / "cut" / "result.json").exists()
    receiver = Receiver()
    assert run_job(job(cfg, tmp_path, "cut"), receiver)["final_return"] == whole["final_return"]
    assert receiver.reports[0][1]["steps"] > 256  # not from the start
    assert differing_tensors(tmp_path / "whole", tmp_path / "cut") == []


def test_job_ends_when_the_receiver_stops_it(short_config: ShortConfig, tmp_path: Path) -> None:
    cfg = short_config("ppo", env_steps=640, eval_every=128)
    receiver = Receiver(stop_at=256)
    result = run_job(job(cfg, tmp_path), receiver)
    assert result["env_steps"] == 256
    assert [data["steps"] for kind, data in receiver.reports if kind == "evaluation"] == [128, 256]
    assert [data["fraction"] for kind, data in receiver.reports if kind == "evaluation"] == [0.2, 0.4]
    assert receiver.reports[-1][1]["mean_return"] == result["final_return"]
    assert (tmp_path / "run" / "result.json").exists()


def test_run_killed_before_its_first_checkpoint_restarts(short_config: ShortConfig, tmp_path: Path) -> None:
    cfg = short_config("ppo", env_steps=128)
    session = zx.Session(cfg, tmp_path / "run", quiet=True)
    session.folder.create(session.cfg)
    session.close()
    (tmp_path / "run" / "metrics.csv").write_text("half a li")
    assert run_job(job(cfg, tmp_path), Receiver())["env_steps"] == 128
    assert "half" not in (tmp_path / "run" / "metrics.csv").read_text()


def run_main(job: Job, decisions: list[bool]) -> list[tuple[str, Any]]:
    """Run `main` in this process and return the messages it sends."""
    parent_end, child_end = socket.socketpair()
    parent = Connection(parent_end.detach())
    parent.send(job)
    for decision in decisions:
        parent.send(decision)
    main(child_end.detach())
    messages = []
    while parent.poll(0):
        try:
            messages.append(parent.recv())
        except EOFError:
            break
    parent.close()
    return messages


def test_main_reports_evaluations_and_the_result_and_obeys_decisions(short_config: ShortConfig, tmp_path: Path) -> None:
    cfg = short_config("ppo", env_steps=640, eval_every=128)
    messages = run_main(job(cfg, tmp_path, prunable=True), [True, False])
    assert [kind for kind, _ in messages if kind != "progress"] == ["evaluation", "evaluation", "done"]
    assert messages[-1][1]["env_steps"] == 256


def test_main_reports_errors(short_config: ShortConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kind, data = run_main(job(short_config("ppo", env="dummy_envs:RaisingEnv"), tmp_path), [])[-1]
    assert kind == "failed"
    assert "the third step is broken" in data["error"]
    assert "ZeroDivisionError" in capsys.readouterr().err
    kind, data = run_main(Job("other", tmp_path / "other", None), [])[-1]  # type: ignore[arg-type]
    assert (kind, data["error"].split(":")[0]) == ("failed", "AttributeError")  # a bug, not a UserError
    assert "Traceback" in capsys.readouterr().err


# --- separate processes ---


def test_interrupt_stops_all_jobs_with_checkpoints(
    short_config: ShortConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # an evaluation delays the next progress report, so evaluations must be rare
    cfg = short_config("ppo", env_steps=10_000_000, eval_every=64_000, log_every=640, vector__backend="serial")
    kinds: list[str] = []
    with locked(tmp_path) as lock:
        executor = LocalProcesses(1, lock)

        def on_event(event: JobEvent) -> None:
            kinds.append(event.kind)
            if event.kind == "evaluation":
                executor.decide(event.job, True)
            if kinds.count("progress") == 1:
                raise KeyboardInterrupt

        todo = iter([job(cfg, tmp_path, "first", prunable=True), job(cfg, tmp_path, "second")])
        with pytest.raises(KeyboardInterrupt):
            run_jobs(executor, lambda: next(todo, None), on_event)
    assert kinds[-1] == "stopped"
    assert executor.running == []
    assert list((tmp_path / "first" / "checkpoints").glob("0*.safetensors"))
    assert not (tmp_path / "first" / "result.json").exists()
    assert not (tmp_path / "second").exists()
    assert "stopping all runs" in capsys.readouterr().err


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_jobs_share_the_cpus(short_config: ShortConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each job gets 8 // 3 = 2 CPUs."""
    monkeypatch.setenv("PYTHON_CPU_COUNT", "8")
    with locked(tmp_path) as lock:
        executor = LocalProcesses(3, lock)
        executor.start(job(short_config("ppo", env_steps=10_000_000), tmp_path))
        (process, _) = executor._processes["run"]
        environ = Path(f"/proc/{process.pid}/environ")
        while not environ.read_text():  # the program is still being loaded
            time.sleep(0.01)
        variables = environ.read_text().split("\0")
        executor.close()
    assert "PYTHON_CPU_COUNT=2" in variables
    monkeypatch.setenv("PYTHON_CPU_COUNT", "0")  # invalid values are ignored
    assert cpu_count() == len(os.sched_getaffinity(0))


def test_killed_process_is_reported_and_jobs_hold_the_lock(
    short_config: ShortConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with locked(tmp_path) as lock:
        executor = LocalProcesses(1, lock)
        executor.start(job(short_config("ppo", env_steps=10_000_000), tmp_path))
    with pytest.raises(zx.UserError, match="is in use by process"), locked(tmp_path, 0.1):
        pass
    (process, _) = executor._processes["run"]
    os.kill(process.pid, signal.SIGKILL)
    events: list[JobEvent] = []
    deadline = time.monotonic() + 60
    while not events and time.monotonic() < deadline:
        events = [event for event in executor.poll(1.0) if event.is_final]
    assert events == [JobEvent("run", "failed", {"error": "the process was killed by SIGKILL"})]
    with locked(tmp_path, 0.1):
        pass


def test_default_workers_is_half_the_cpus_and_at_least_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for cpus, workers in {1: 1, 2: 1, 3: 1, 8: 4}.items():
        monkeypatch.setattr(executors, "cpu_count", lambda cpus=cpus: cpus)
        assert executors.default_workers() == workers


def test_progress_board_updates_a_line_in_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    board = ProgressBoard(4, 1)
    board.live = True
    board.on_event(JobEvent("one", "progress", {"fraction": 0.25, "steps": 10, "mean_return": float("nan")}))
    assert capsys.readouterr().err == "\r\x1b[2K1 of 4 done  one 25%"
    board.on_event(JobEvent("one", "failed", {"error": "broken"}), "broken")
    assert capsys.readouterr().err == "\r\x1b[2Kfailed   one  broken\n"
    board._last_update = 0.0
    board.on_event(JobEvent("two", "evaluation", {"fraction": 0.5, "steps": 20, "mean_return": 7.25}))
    assert capsys.readouterr().err == "\r\x1b[2K1 of 4 done, 1 failed  two 50% 7.25"

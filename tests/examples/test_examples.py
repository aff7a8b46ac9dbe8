"""Every file in examples/ runs as it stands and reaches the return that it names as its GOAL."""

from __future__ import annotations

import importlib
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

import zhixing as zx
from zhixing.cli import main

EXAMPLES = Path(__file__).parents[2] / "examples"
NAMES = sorted(file.stem for file in EXAMPLES.glob("*.py"))

Command = Callable[..., tuple[str, str]]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fresh folder to run in, from which the examples can be imported, as from their own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return tmp_path


@pytest.fixture
def run_cli(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """The command line: its output and errors, where it succeeds."""

    def run(*words: str) -> tuple[str, str]:
        monkeypatch.setattr("sys.argv", ["zhixing", *words])
        capsys.readouterr()
        main()
        captured = capsys.readouterr()
        return captured.out, captured.err

    return run


def example(name: str) -> ModuleType:
    return importlib.import_module(name)


@pytest.mark.parametrize("name", NAMES)
def test_example_reaches_its_goal(name: str, folder: Path) -> None:
    module = example(name)
    assert (module.__doc__ or "").strip()
    result = module.main()
    assert result["final_return"] >= module.GOAL
    # an example leaves nothing beside the run, the files it says it writes, and what Python keeps
    assert {file.name for file in folder.iterdir()} <= {"runs", "match.yaml"}
    if result.get("stop_return") is not None:
        assert result["reached"]


def test_patience_ends_training_before_its_budget_and_survives_a_resume(folder: Path) -> None:
    patience = example("own_callback").Patience
    cfg = zx.config.load(algorithm="ppo", env="toy/match", env_steps=100_000, eval_every_steps=256, lr=3e-3)
    session = zx.Session(cfg, "run", [patience(2)], quiet=True)
    assert session.run()["env_steps"] < 100_000
    assert session.loop.stop_reason == "no better for 2 evaluations"
    again = patience(2)
    resumed = zx.Session.resume("run", [again], quiet=True)
    assert (again.best, again.since) == (10.0, 2)
    resumed.close()


def test_memory_is_what_solves_recall(folder: Path) -> None:
    """The same task and budget without memory stays near chance, 1/4."""
    example("own_lstm")
    result = zx.train(
        "ppo", "own_lstm:Recall", out="run", quiet=True, env_steps=6_000, num_envs=32, rollout_steps=15,
        minibatch_size=480, lr=5e-3, vector__backend="serial", eval_episodes=200, eval_every_steps=0, tensorboard=False,
    )  # fmt: skip
    assert result["final_return"] < 0.5


def test_the_room_takes_its_option_and_is_recorded(run_cli: Command, folder: Path) -> None:
    run_cli("train", "ppo", "--env", "own_environment:Room", "env.target=23", "env_steps=256", "--out", "room")
    assert zx.load("room").cfg.env.options == {"target": 23}
    assert "1 episodes" in run_cli("video", "room", "-o", "room.mp4")[0]
    assert (folder / "room.mp4").stat().st_size > 0


def test_own_algorithm_is_trained_evaluated_filmed_and_shown_by_its_name(run_cli: Command, folder: Path) -> None:
    name = "own_algorithm:Reinforce"
    run_cli("train", name, "--env", "toy/match", "stop_return=9", "eval_every_steps=1000", "--out", "run")
    summary = json.loads(run_cli("eval", "run", "--episodes", "50", "--json")[0])
    assert summary["mean_return"] >= 9.0
    assert summary["episodes"] == 50
    run_cli("video", "run", "-o", "run.mp4")
    run_cli("plot", "run", "-o", "run.png")
    assert (folder / "run.mp4").stat().st_size > 0
    assert (folder / "run.png").stat().st_size > 0
    shown = run_cli("show", name)[0]
    assert re.search(r"value_coef +float >= 0 +0\.5 +Weight of the value loss\.", shown)


def test_own_algorithm_resumed_by_the_command_line_ends_like_one_never_stopped(run_cli: Command, folder: Path) -> None:
    words = ["train", "own_algorithm:Reinforce", "--env", "CartPole-v1", "--seed", "2", "eval_every_steps=0"]
    run_cli(*words, "env_steps=2048", "--out", "whole")
    run_cli(*words, "env_steps=1024", "--out", "parts")
    run_cli("resume", "parts", "env_steps=2048")
    whole, parts = (json.loads((folder / run / "result.json").read_text()) for run in ("whole", "parts"))
    assert whole["env_steps"] == parts["env_steps"] == 2048
    assert whole["final_return"] == parts["final_return"]
    mine, theirs = zx.load("whole").policy.state_dict(), zx.load("parts").policy.state_dict()
    assert all(mine[key].equal(theirs[key]) for key in mine)


def test_own_algorithm_works_where_only_its_file_is(
    run_cli: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for somebody who wrote one: a file in the current folder, under a name of their own."""
    shutil.copy(EXAMPLES / "own_algorithm.py", tmp_path / "somebodys.py")
    run_cli("train", "somebodys:Reinforce", "--env", "CartPole-v1", "env_steps=256", "--out", "run")
    assert json.loads(run_cli("eval", "run", "--episodes", "2", "--json")[0])["episodes"] == 2


def test_own_algorithm_meets_the_exact_value_of_a_task_cut_by_a_clock(folder: Path) -> None:
    """One reward of 1 per step for ever, γ = 0.8: V = 1 / (1 - 0.8) = 5, though episodes are cut every 5 steps."""
    import torch

    cfg = zx.config.load(
        algorithm="own_algorithm:Reinforce", env="dummy_envs:TruncatingEnv", gamma=0.8, env_steps=8_000,
        eval_every_steps=0, tensorboard=False, vector__backend="serial",
    )  # fmt: skip
    session = zx.Session(cfg, "run", quiet=True)
    session.run()
    with torch.no_grad():
        assert float(session.learner.value(torch.ones(1, 5))) == pytest.approx(5.0, rel=0.05)

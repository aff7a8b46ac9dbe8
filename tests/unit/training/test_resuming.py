"""Changed settings of a resumed run are applied or rejected, never ignored."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import Command, metrics_rows

import zhixing as zx
from zhixing.errors import UserError
from zhixing.training.resume import CHANGEABLE

SMALL = {"env_steps": 256, "eval_every": 0, "log_every": 64, "vector__backend": "serial", "epochs": 1}


class StopAt(zx.Callback):
    def __init__(self, steps: int) -> None:
        self.steps = steps

    def iteration_end(self, loop: zx.TrainingLoop, metrics: Any) -> None:
        if loop.steps >= self.steps:
            loop.stop("interrupted")


@pytest.fixture
def stopped(short_config: Callable, tmp_path: Path) -> Path:
    """A run of 256 steps, interrupted at 128."""
    with pytest.raises(KeyboardInterrupt):
        zx.Session(short_config("ppo", "toy/match", **SMALL), tmp_path / "run", [StopAt(128)], quiet=True).run()
    return tmp_path / "run"


@pytest.fixture
def finished(short_config: Callable, tmp_path: Path) -> Path:
    zx.Session(short_config("ppo", "toy/match", **SMALL), tmp_path / "run", quiet=True).run()
    return tmp_path / "run"


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("lr", 1e-5),
        ("gamma", 0.5),
        ("epochs", 3),
        ("seed", 9),
        ("rollout_steps", 16),
        ("net__hidden_sizes", [8]),
        ("num_envs", 3),
        ("env", "CartPole-v1"),
        ("env__max_episode_steps", 4),
        ("init_from", "other"),
    ],
)
def test_settings_that_affect_learning_are_rejected(setting: str, value: Any, stopped: Path) -> None:
    before = (stopped / "config.yaml").read_text()
    name = setting.replace("__", ".") if setting != "env" else "env.name"
    with pytest.raises(
        UserError, match=rf"resume can't change .*{name} from .* to .*It can change budgets \(env_steps"
    ):
        zx.Session.resume(stopped, quiet=True, **zx.config.from_keywords({setting: value}))
    assert (stopped / "config.yaml").read_text() == before
    zx.Session.resume(stopped, quiet=True).run()  # the run is intact


def test_rejection_names_the_command_for_a_new_run(run_cli: Command, stopped: Path) -> None:
    code, _, err = run_cli("resume", str(stopped), "lr=1e-5", "env_steps=512")
    assert code == 2
    assert f"zhixing train ppo --env toy/match --init-from {stopped} lr=1e-05" in err


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("env_steps", 320),
        ("episodes", 30),
        ("duration", "1h"),
        ("stop_return", 100.0),
        ("eval_every", 64),
        ("eval_episodes", 3),
        ("eval_max_steps", 5),
        ("log_every", 128),
        ("plot", "return"),
        ("tensorboard", True),
        ("checkpoint_every", 64),
        ("keep_checkpoints", 1),
        ("vector__backend", "process"),
        ("num_threads", 1),
    ],
)
def test_changed_setting_is_applied(setting: str, value: Any, stopped: Path) -> None:
    session = zx.Session.resume(stopped, quiet=True, **zx.config.from_keywords({setting: value}))
    result = session.run()
    saved: Any = yaml.safe_load((stopped / "config.yaml").read_text())
    for part in setting.split("__"):
        saved = saved[part]
    assert saved == value
    assert result["env_steps"] == (320 if setting == "env_steps" else 256)
    rows = [int(float(row[0])) for row in metrics_rows(stopped)[1:]]
    if setting in ("eval_every", "log_every"):
        assert rows == ([64, 128, 256] if setting == "log_every" else [64, 128, 192, 256])
    assert (stopped / "plot.png").exists() == (setting == "plot")
    assert bool(list(stopped.glob("events.*"))) == (setting == "tensorboard")


def test_every_changeable_setting_exists() -> None:
    models = [zx.algorithms.get(algorithm).settings for algorithm in zx.algorithms.names()]
    known = {name for model in models for name in model.model_fields}
    assert {name.partition(".")[0] for names in CHANGEABLE.values() for name in names} <= known


def test_finished_run_rejects_changes_without_effect(run_cli: Command, finished: Path) -> None:
    before = (finished / "config.yaml").read_text()
    for words in (["eval_episodes=7"], ["env_steps=100"], ["log_every=5", "keep_checkpoints=1"]):
        code, _, err = run_cli("resume", str(finished), *words)
        assert code == 2
        assert "has finished at 256 steps, because env_steps=" in err
        assert "to continue, raise env_steps" in err
        assert f"{words[-1].split('=')[0]} has no effect" in err
    assert (finished / "config.yaml").read_text() == before
    assert run_cli("resume", str(finished))[0] == 0  # without changes, this is not an error
    assert run_cli("resume", str(finished), "env_steps=256")[0] == 0  # the value that it already has


def test_run_that_reached_its_return_resumes_only_with_another(
    short_config: Callable, run_cli: Command, tmp_path: Path
) -> None:
    settings = {**SMALL, "env_steps": 2000, "eval_every": 64, "stop_return": 0.0}
    zx.Session(short_config("ppo", "toy/match", **settings), tmp_path / "run", quiet=True).run()
    code, out, _ = run_cli("resume", "run")
    assert code == 0
    assert "has finished at 64 steps, because stop_return=0 was reached" in out
    assert "to continue, raise stop_return, or set stop_return=none" in out
    code, _, err = run_cli("resume", "run", "env_steps=4000")
    assert code == 2
    assert "stop_return=0 was reached" in err
    assert "a change of env_steps has no effect" in err
    code, out, _ = run_cli("resume", "run", "env_steps=128", "stop_return=none")
    assert code == 0
    assert "128 steps" in out

"""Interrupted and resumed runs on Super Mario, with worker processes and with a replay buffer of unstacked frames."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import differing_tensors, metrics_rows

pytest.importorskip("gym_super_mario_bros")
pytest.importorskip("stable_retro")

import zhixing as zx

SETTINGS = {
    "env__size": 42,
    "env__max_episode_steps": 30,
    "env__noops": 8,
    "env__sticky": 0.25,
    "env__shaping": "score",
    "env_steps": 240,
    "eval_every": 120,
    "eval_episodes": 1,
    "checkpoint_every": 64,
    "net__cnn": "simple",
}


class StopAt(zx.Callback):
    def __init__(self, steps: int) -> None:
        self.steps = steps

    def iteration_end(self, loop: zx.TrainingLoop, metrics: object) -> None:
        if loop.steps >= self.steps:
            loop.stop("interrupted")


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("ppo", {"vector__backend": "process", "epochs": 1}),
        ("dqn", {"vector__backend": "serial", "num_envs": 1, "learning_starts": 50}),
    ],
)
def test_resumed_run_equals_uninterrupted_run(
    name: str, settings: dict[str, Any], short_config: Callable, tmp_path: Path
) -> None:
    cfg = short_config(name, "mario/1-1", seed=3, **SETTINGS, **settings)
    zx.Session(cfg, tmp_path / "uninterrupted", quiet=True).run()
    with pytest.raises(KeyboardInterrupt):
        zx.Session(cfg, tmp_path / "resumed", [StopAt(100)], quiet=True).run()
    zx.Session.resume(tmp_path / "resumed", quiet=True).run()
    assert differing_tensors(tmp_path / "uninterrupted", tmp_path / "resumed") == []
    assert metrics_rows(tmp_path / "uninterrupted") == metrics_rows(tmp_path / "resumed")
    assert "x_pos" in (tmp_path / "uninterrupted" / "metrics.csv").read_text().splitlines()[0]

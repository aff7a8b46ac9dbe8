"""Runs on Super Mario that are stopped and go on: with worker processes, and with a replay that keeps pictures once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import differing_tensors, metrics_rows

pytest.importorskip("gym_super_mario_bros")
pytest.importorskip("stable_retro")

import zhixing as zx

TASK = {
    "env__size": 42,
    "env__max_episode_steps": 30,
    "env__noops": 8,
    "env__sticky": 0.25,
    "env__shaping": "usual",
    "env_steps": 240,
    "eval_every_steps": 120,
    "eval_episodes": 1,
    "checkpoint_every_steps": 64,
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
        ("dqn", {"vector__backend": "serial", "num_envs": 1, "learning_starts": 50, "replay__frame_stack": 4}),
    ],
)
def test_resumed_run_ends_like_one_never_stopped(
    name: str, settings: dict[str, Any], short_config: Callable, tmp_path: Path
) -> None:
    cfg = short_config(name, "mario/1-1", seed=3, **TASK, **settings)
    zx.Session(cfg, tmp_path / "whole", quiet=True).run()
    with pytest.raises(KeyboardInterrupt):
        zx.Session(cfg, tmp_path / "parts", [StopAt(100)], quiet=True).run()
    zx.Session.resume(tmp_path / "parts", quiet=True).run()
    assert differing_tensors(tmp_path / "whole", tmp_path / "parts") == []
    assert metrics_rows(tmp_path / "whole") == metrics_rows(tmp_path / "parts")
    assert "x_pos" in (tmp_path / "whole" / "metrics.csv").read_text().splitlines()[0]

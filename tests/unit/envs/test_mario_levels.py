"""The study of all Mario levels continues after an interruption and doesn't repeat what it has measured."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

import zhixing as zx

pytest.importorskip("gym_super_mario_bros")
pytest.importorskip("stable_retro")

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
pytestmark = pytest.mark.skipif(not BENCHMARKS.exists(), reason="only in a checkout")
TINY = {
    "env_steps": 32,
    "num_envs": 2,
    "rollout_steps": 8,
    "minibatch_size": 16,
    "epochs": 1,
    "vector": {"backend": "serial"},
    "env.max_episode_steps": 8,
    "eval_video": False,
    "plot": None,
    "eval_every": 0,
    "checkpoint_every": 16,
}


@pytest.fixture
def study(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    module = importlib.import_module("mario_levels")
    page = tmp_path / "mario.md"
    page.write_text("<!-- levels: begin -->\n<!-- levels: end -->\n")
    settings = {name.replace(".", "__"): value for name, value in TINY.items()}
    for name, value in {
        "RESULTS": tmp_path / "results.json",
        "PAGE": page,
        "EPISODES": 3,
        "OVERRIDES": {"1-2": settings},
    }.items():
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(sys, "argv", ["mario_levels.py", "1-2", "--runs", str(tmp_path / "runs")])
    return module


def test_order_has_every_level_once(study: Any) -> None:
    assert sorted(study.ORDER) == [f"{world}-{stage}" for world in range(1, 9) for stage in range(1, 5)]
    assert study.parse_levels(["8-4", "1-1"]) == ["1-1", "8-4"]
    with pytest.raises(SystemExit, match="unknown levels: 9-1"):
        study.parse_levels(["9-1"])


def test_interrupted_study_continues_and_fills_the_table(
    study: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class StopAfterOneIteration(zx.Callback):
        def iteration_end(self, loop: zx.TrainingLoop, metrics: Any) -> None:
            loop.stop("interrupted")

    cfg = zx.config.load(algorithm="ppo", env="mario/1-2", seed=100, **study.OVERRIDES["1-2"])
    with pytest.raises(KeyboardInterrupt):
        zx.Session(cfg, out=tmp_path / "runs" / "1-2-100", callbacks=StopAfterOneIteration(), quiet=True).run()
    study.main()
    row = json.loads(study.RESULTS.read_text())["1-2"]["100"]
    assert row["env_steps"] == 32
    assert row["episodes"] == 3
    assert row["flag_rate"] == 0.0  # the flag is further than 8 actions away
    assert row["x_pos"] > 0
    assert "| 1-2 | 100 | 0% |" in study.PAGE.read_text()

    monkeypatch.setattr(study, "train", None)  # a second training would fail
    study.main()
    assert json.loads(study.RESULTS.read_text())["1-2"]["100"] == row

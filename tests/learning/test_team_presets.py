"""Presets of coma and idqn: found on their standard tasks, valid, and good enough to learn a little within seconds."""

from __future__ import annotations

from pathlib import Path

import pytest

import zhixing as zx
from zhixing import config

TASKS = ("skirmish/3m", "smac/3m", "smax/3m", "mpe/simple_spread", "lbf/8x8-2p-3f")


@pytest.mark.parametrize("learner", ["coma", "idqn"])
@pytest.mark.parametrize("task", TASKS)
def test_there_is_a_valid_preset(learner: str, task: str) -> None:
    values = config.preset(learner, task)
    assert values
    cfg = config.load(algorithm=learner, env=task)
    assert cfg.env_steps == values["env_steps"]


@pytest.mark.parametrize(("learner", "env_steps"), [("coma", 8_000), ("idqn", 3_000)])
def test_learns_to_fight_a_little(learner: str, env_steps: int, tmp_path: Path) -> None:
    result = zx.train(
        learner,
        env="skirmish/3m",
        seed=2,
        out=tmp_path / "run",
        quiet=True,
        tensorboard=False,
        env_steps=env_steps,
        eval_every_steps=0,
    )
    assert result["final_return"] > 6.0  # random actions earn 1.8

"""Updates in half precision: nearly the same numbers, and what refuses it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import zhixing as zx
from zhixing.config import RunConfig

Small = Callable[..., RunConfig]


@pytest.mark.parametrize(("name", "task"), [("ppo", "toy/match"), ("dqn", "toy/match"), ("sac", "toy/reach")])
def test_half_precision_is_near_and_is_used(short_config: Small, tmp_path: Path, name: str, task: str) -> None:
    """A run of a few updates from the same steps: what is told differs, by no more than three digits allow."""
    told = {}
    for precision in ("fp32", "bf16", "fp16"):
        short = {"rollout_steps": 32, "train_every": 32, "env_steps": 64, "learning_starts": 32}
        cfg = short_config(name, task, precision=precision, **short)
        session = zx.Session(cfg, tmp_path / precision, quiet=True)
        session.run()
        told[precision] = {key: float(value) for key, value in session.loop.metrics.items() if "loss" in key}
        weights = [parameter.dtype for parameter in session.learner.policy.parameters()]
        assert set(weights) == {torch.float32}
        assert session.learner.skipped_steps() == 0
    for precision, off in (("bf16", 0.1), ("fp16", 0.02)):
        assert told[precision] != told["fp32"]
        for key, value in told["fp32"].items():
            assert told[precision][key] == pytest.approx(value, rel=off, abs=off), key


@pytest.mark.parametrize(
    ("name", "settings", "told"),
    [
        ("a3c", {"precision": "bf16"}, "no precision but fp32"),
        ("mcts", {"precision": "bf16"}, "precision=bf16 is for updates, and mcts makes none"),
        ("ppo", {"precision": "fp16", "compile": True}, "compile=true takes no precision=fp16"),
        ("ppo", {"precision": "fp16", "distributed__learners": 2}, "precision=fp16 scales losses in one place"),
    ],
)
def test_what_refuses_it(
    short_config: Small, tmp_path: Path, name: str, settings: dict[str, object], told: str
) -> None:
    with pytest.raises(zx.UserError, match=told):
        zx.Session(short_config(name, **settings), tmp_path / "run", quiet=True)

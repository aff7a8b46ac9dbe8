"""Updates in half precision: close to fp32, and rejected where it isn't supported."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import zhixing as zx
from zhixing.config import RunConfig

Small = Callable[..., RunConfig]


@pytest.mark.parametrize(
    ("name", "env"),
    [("ppo", "toy/match"), ("dqn", "toy/match"), ("sac", "toy/reach"), ("crossq", "toy/reach"), ("tqc", "toy/reach")],
)
def test_half_precision_changes_losses_only_slightly(short_config: Small, tmp_path: Path, name: str, env: str) -> None:
    losses = {}
    for precision in ("fp32", "bf16", "fp16"):
        short = {"rollout_steps": 32, "train_every": 32, "env_steps": 64, "learning_starts": 32}
        cfg = short_config(name, env, precision=precision, **short)
        session = zx.Session(cfg, tmp_path / precision, quiet=True)
        session.run()
        losses[precision] = {key: float(value) for key, value in session.loop.metrics.items() if "loss" in key}
        dtypes = {parameter.dtype for parameter in session.learner.policy.parameters()}
        assert dtypes == {torch.float32}
        assert session.learner.skipped_steps() == 0
    for precision, tolerance in (("bf16", 0.1), ("fp16", 0.02)):
        assert losses[precision] != losses["fp32"]
        for key, value in losses["fp32"].items():
            assert losses[precision][key] == pytest.approx(value, rel=tolerance, abs=tolerance), key


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("a3c", {"precision": "bf16"}, "set compile=false and precision=fp32"),
        ("mcts", {"precision": "bf16"}, "precision=bf16 is for updates, and mcts makes none"),
        ("ppo", {"precision": "fp16", "compile": True}, "compile=true doesn't support precision=fp16"),
        (
            "ppo",
            {"precision": "fp16", "distributed__learners": 2},
            "the loss scale of precision=fp16 is adapted in one place",
        ),
    ],
)
def test_unsupported_precision_is_rejected(
    short_config: Small, tmp_path: Path, name: str, settings: dict[str, object], message: str
) -> None:
    with pytest.raises(zx.UserError, match=message):
        zx.Session(short_config(name, **settings), tmp_path / "run", quiet=True)

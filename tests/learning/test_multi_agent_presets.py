"""Presets of coma and idqn exist for standard environments, are valid, and learn something within seconds."""

from __future__ import annotations

from pathlib import Path

import pytest

import zhixing as zx
from zhixing import config

ENVS = ("skirmish/3m", "smac/3m", "smax/3m", "mpe/simple_spread", "lbf/8x8-2p-3f")


@pytest.mark.parametrize("name", ["coma", "idqn"])
@pytest.mark.parametrize("env", ENVS)
def test_preset_exists_and_is_valid(name: str, env: str) -> None:
    preset = config.preset(name, env)
    assert preset
    assert config.load(algorithm=name, env=env).env_steps == preset["env_steps"]


@pytest.mark.parametrize(("name", "env_steps"), [("coma", 8_000), ("idqn", 3_000)])
def test_return_in_skirmish_improves(name: str, env_steps: int, tmp_path: Path) -> None:
    result = zx.train(
        name,
        env="skirmish/3m",
        seed=2,
        out=tmp_path / "run",
        quiet=True,
        tensorboard=False,
        env_steps=env_steps,
        eval_every=0,
    )
    assert result["final_return"] > 6.0  # random actions get 1.8

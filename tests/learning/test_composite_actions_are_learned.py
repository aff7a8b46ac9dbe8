"""Algorithms learn hybrid actions, which need all parts of an action, and actions of several bits."""

from __future__ import annotations

from pathlib import Path

import pytest

import zhixing as zx
from zhixing.training.collect_data import collect_from_agent

# toy/throw: the best return is 10. A policy that ignores the basket gets 2.5, one that ignores the distance 5.
THROW = 8.0
# dummy_envs:SwitchesEnv: the best return is 10, random actions get 10 / 16
SWITCHES = 8.0
SETTINGS = {"eval_every": 1_000, "seed": 1, "quiet": True, "tensorboard": False}


@pytest.fixture(scope="module")
def expert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of a trained agent, which is next to a folder `data` with a dataset of its steps."""
    run = tmp_path_factory.mktemp("expert") / "run"
    result = zx.train("ppo", env="toy/throw", env_steps=60_000, stop_return=THROW, lr=3e-3, out=run, **SETTINGS)
    assert result["reached"]
    collect_from_agent(run, str(run.parent / "data"), 3_000, noise=0.1)
    return run


@pytest.mark.parametrize("name", ["pg", "ac", "a2c", "a3c", "impala", "ppg", "trpo"])
def test_both_parts_of_hybrid_actions_are_learned(name: str, tmp_path: Path) -> None:
    settings = {"env_steps": 100_000, "stop_return": THROW, **SETTINGS}
    if name not in ("pg", "trpo"):
        settings["lr"] = 3e-3
    assert zx.train(name, env="toy/throw", out=tmp_path / "run", **settings)["reached"]


@pytest.mark.parametrize("name", ["bc", "gail", "dagger"])
def test_hybrid_actions_are_imitated(name: str, expert: Path, tmp_path: Path) -> None:
    settings = {"env_steps": 30_000, "stop_return": 7.5, **SETTINGS}
    if name == "dagger":
        settings |= {"expert": str(expert), "train_every": 4, "updates_per_step": 0.25, "learning_starts": 500}
    else:
        settings["dataset"] = str(expert.parent / "data")
    if name == "bc":
        settings |= {"offline_updates": 6_000, "eval_every": 500}
    if name != "gail":
        settings |= {"net__hidden_sizes": [64, 64], "batch_size": 64, "lr": 1e-3}
    assert zx.train(name, env="toy/throw", out=tmp_path / "run", **settings)["reached"]


def test_bits_are_learned(tmp_path: Path) -> None:
    settings = {"env_steps": 30_000, "stop_return": SWITCHES, "lr": 3e-3, **SETTINGS}
    assert zx.train("ppo", env="dummy_envs:SwitchesEnv", out=tmp_path / "run", **settings)["reached"]

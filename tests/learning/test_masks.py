"""A forbidden action is never taken, over a whole training: the task raises if it is."""

from __future__ import annotations

from pathlib import Path

import pytest

import zhixing as zx

# random play of toy tasks:Masked earns 5 of 10, the best 10; of two agents, who earn for five and ten steps, 7.5


def test_no_forbidden_action_in_100_000_steps(tmp_path: Path) -> None:
    settings = {"env_steps": 100_000, "vector__num": 32, "vector__backend": "serial", "steps_per_iteration": 64}
    settings |= {"minibatch_size": 512, "epochs": 2, "lr": 1e-3, "eval_every_steps": 0, "tensorboard": False}
    cfg = zx.config.load(algorithm="ppo", env="tasks:Masked", threads=1, **settings)
    result = zx.Session(cfg, tmp_path / "run", quiet=True).run()
    assert result["env_steps"] >= 100_000
    assert result["final_return"] > 9.5  # and what is allowed is learned


@pytest.mark.parametrize("name", ["qmix", "mappo"])
def test_no_agent_of_a_team_takes_a_forbidden_action(name: str, tmp_path: Path) -> None:
    settings = {"env_steps": 20_000, "vector__num": 16, "vector__backend": "serial", "eval_every_steps": 0}
    if name == "qmix":
        settings |= {"updates_per_step": 0.03, "steps_per_iteration": 10, "lr": 2e-3, "net__recurrent": "none"}
    cfg = zx.config.load(algorithm=name, env="tasks:Masked", env__agents=2, threads=1, tensorboard=False, **settings)
    result = zx.Session(cfg, tmp_path / "run", quiet=True).run()
    assert result["final_return"] > 6.5

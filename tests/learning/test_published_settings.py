"""The settings that papers were written with, on their tasks: a few updates of each, from the preset as it is.

To learn takes hours, for Dreamer from pictures on an accelerator; these tests show that they run."""

from __future__ import annotations

from pathlib import Path

import pytest

import zhixing as zx
from zhixing import algorithms
from zhixing.collect.actor import Actor
from zhixing.core.policy import Phase
from zhixing.training.collect_data import collect_from_actor

pytest.importorskip("mujoco")


def recorded(task: str, out: Path) -> str:
    """What chance does on a task."""
    env = zx.envs.make_vector(task, 2, backend="serial")
    policy = algorithms.get("sac").make(zx.config.load(algorithm="sac", env=task), env.spaces).policy
    collect_from_actor(Actor(policy, env), str(out), 600, env=task, note="chance", phase=Phase.RANDOM)
    env.close()
    return str(out)


@pytest.mark.parametrize(("learner", "task"), [("awac", "Ant-v5"), ("iql", "Walker2d-v5"), ("cql", "Hopper-v5")])
def test_from_data(learner: str, task: str, tmp_path: Path) -> None:
    short = {"offline_updates": 5, "eval_every_steps": 0}
    data = recorded(task, tmp_path / "data")
    result = zx.train(learner, dataset=data, env=task, out=tmp_path / "run", quiet=True, **short)
    assert result["updates"] == 5
    assert zx.evaluate(tmp_path / "run", 1).mean_return != 0


def test_ddpg_on_halfcheetah(tmp_path: Path) -> None:
    short = {"env_steps": 320, "learning_starts": 300, "eval_every_steps": 0}
    result = zx.train("ddpg", env="HalfCheetah-v5", out=tmp_path / "run", quiet=True, **short)
    assert result["updates"] == 20


def test_gail_on_halfcheetah(tmp_path: Path) -> None:
    short = {"env_steps": 512, "rollout_steps": 64, "eval_every_steps": 0, "vector__backend": "serial"}
    data = recorded("HalfCheetah-v5", tmp_path / "data")
    result = zx.train(
        "gail", env="HalfCheetah-v5", out=tmp_path / "run", quiet=True, dataset=data, demonstrations=2, **short
    )
    assert result["updates"] > 0


def test_dreamer_on_pictures_of_walker_walk(tmp_path: Path) -> None:
    pytest.importorskip("dm_control")
    short = {"env_steps": 200, "learning_starts": 196, "num_envs": 1, "batch_size": 1}
    short |= {"eval_every_steps": 0, "eval_episodes": 1, "env__time_limit": 5}  # the evaluation at the end draws, too
    try:
        result = zx.train("dreamer", env="dmc/walker-walk", out=tmp_path / "run", quiet=True, **short)
    except zx.UserError as error:
        if "libegl1" not in str(error):
            raise
        pytest.skip(str(error))
    assert result["updates"] == 2

"""Presets with published settings run for a few updates on the environments of the papers.

Whether they learn isn't tested: it takes hours, for Dreamer from images on an accelerator.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import zhixing as zx
from zhixing import algorithms
from zhixing.training.collect_data import collect_from_actor

pytest.importorskip("mujoco")


def collect_random(env: str, out: Path) -> str:
    """Write a dataset of 600 random steps. Return its folder."""
    vector = zx.envs.make_vector(env, 2, backend="serial")
    policy = algorithms.get("sac").make(zx.config.load(algorithm="sac", env=env), vector.spaces).policy
    collect_from_actor(zx.Actor(policy, vector), str(out), 600, env=env, note="random", phase=zx.Phase.RANDOM)
    vector.close()
    return str(out)


@pytest.mark.parametrize(("name", "env"), [("awac", "Ant-v5"), ("iql", "Walker2d-v5"), ("cql", "Hopper-v5")])
def test_offline_algorithms(name: str, env: str, tmp_path: Path) -> None:
    short = {"offline_updates": 5, "eval_every": 0}
    data = collect_random(env, tmp_path / "data")
    result = zx.train(name, dataset=data, env=env, out=tmp_path / "run", quiet=True, **short)
    assert result["updates"] == 5
    assert zx.evaluate(tmp_path / "run", 1).mean_return != 0


def test_ddpg_on_halfcheetah(tmp_path: Path) -> None:
    short = {"env_steps": 320, "learning_starts": 300, "eval_every": 0}
    result = zx.train("ddpg", env="HalfCheetah-v5", out=tmp_path / "run", quiet=True, **short)
    assert result["updates"] == 20


@pytest.mark.parametrize(("name", "env"), [("crossq", "Ant-v5"), ("tqc", "Hopper-v5"), ("droq", "Walker2d-v5")])
def test_sample_efficient_algorithms(name: str, env: str, tmp_path: Path) -> None:
    settings = zx.config.load(algorithm=name, env=env)
    short = {"env_steps": 302, "learning_starts": 300, "eval_every": 0, "eval_episodes": 1}
    result = zx.train(name, env=env, out=tmp_path / "run", quiet=True, **short)
    assert result["updates"] == 2 * settings.updates_per_step  # type: ignore[attr-defined]


def test_gail_on_halfcheetah(tmp_path: Path) -> None:
    short = {"env_steps": 512, "rollout_steps": 64, "eval_every": 0, "vector__backend": "serial"}
    data = collect_random("HalfCheetah-v5", tmp_path / "data")
    result = zx.train(
        "gail", env="HalfCheetah-v5", out=tmp_path / "run", quiet=True, dataset=data, demonstrations=2, **short
    )
    assert result["updates"] > 0


def test_dreamer_on_images_of_walker_walk(tmp_path: Path) -> None:
    pytest.importorskip("dm_control")
    short = {"env_steps": 200, "learning_starts": 196, "num_envs": 1, "batch_size": 1}
    short |= {"eval_every": 0, "eval_episodes": 1, "env__time_limit": 5}  # the final evaluation renders too
    try:
        result = zx.train("dreamer", env="dmc/walker-walk", out=tmp_path / "run", quiet=True, **short)
    except zx.UserError as error:
        if "libegl1" not in str(error):
            raise
        pytest.skip(str(error))
    assert result["updates"] == 2

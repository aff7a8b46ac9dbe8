"""The back end envpool: Gymnasium's steps, ends in the same step, back into mid-episode, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from conftest import differing_tensors

import zhixing as zx
from zhixing.envs import make_vector

pytest.importorskip("envpool", reason="needs the extra 'envpool': pip install 'zhixing[envpool]'")


def test_cartpole_does_what_gymnasiums_does() -> None:
    """From EnvPool's first states, step for step, until it ends: within single precision."""
    from gymnasium.envs.classic_control import CartPoleEnv

    env, other = make_vector("CartPole-v1", 4, "envpool"), CartPoleEnv()
    obs, _ = env.reset(seed=3)
    states, ends = obs.copy(), 0
    rng = np.random.default_rng(0)
    for _ in range(60):
        actions = rng.integers(2, size=4)
        obs, reward, terminated, truncated, info = env.step(actions)
        assert not truncated.any()
        for i in range(4):
            other.reset()
            other.state = states[i].astype(np.float64)
            expected, _, ended, _, _ = other.step(int(actions[i]))
            assert terminated[i] == ended
            np.testing.assert_allclose(info["final_obs"][i] if ended else obs[i], expected, atol=1e-5)
            assert not ended or (np.abs(obs[i]) <= 0.05).all()  # it has begun anew
            ends += ended
        assert (reward == 1.0).all()
        states = obs.copy()
    assert ends > 3
    env.close()


def test_time_limit_truncates() -> None:
    env = make_vector("CartPole-v1", 2, "envpool", options={"max_episode_steps": 4})
    env.reset(seed=0)
    for step in range(1, 9):
        _, _, terminated, truncated, _ = env.step(np.array([step % 2, 1 - step % 2]))
        assert not terminated.any()
        assert truncated.tolist() == [step % 4 == 0] * 2
    env.close()


@pytest.mark.parametrize(("algorithm_name", "task"), [("ppo", "CartPole-v1"), ("sac", "Pendulum-v1")])
def test_runs_resume_exactly(algorithm_name: str, task: str, tmp_path: Path) -> None:
    settings = {
        "env": task,
        "vector__backend": "envpool",
        "num_envs": 2,
        "tensorboard": False,
        "eval_every_steps": 0,
    }
    if algorithm_name == "sac":
        settings |= {"learning_starts": 50, "net__hidden_sizes": [8]}
    else:
        settings |= {"rollout_steps": 25, "minibatch_size": 50, "anneal_lr": False}
    zx.train(algorithm_name, out=tmp_path / "whole", quiet=True, env_steps=300, **settings)
    zx.train(algorithm_name, out=tmp_path / "half", quiet=True, env_steps=150, **settings)
    zx.Session.resume(tmp_path / "half", quiet=True, env_steps=300).run()
    assert differing_tensors(tmp_path / "whole", tmp_path / "half") == []


@pytest.mark.parametrize(
    ("task", "options", "told"),
    [
        ("toy/match", {}, "EnvPool has no task toy/match"),
        ("CartPole-v1", {"sutton_barto_reward": True}, "has other options than sutton_barto_reward"),
    ],
)
def test_what_it_refuses(task: str, options: dict[str, object], told: str) -> None:
    with pytest.raises(zx.UserError, match=told):
        make_vector(task, 2, "envpool", options=options)

"""The back end envpool: equality with Gymnasium, same-step autoreset, exact resume, and unsupported environments."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from conftest import differing_tensors

import zhixing as zx
from zhixing.envs import make_vector

pytest.importorskip("envpool", reason="needs the extra 'envpool': pip install 'zhixing[envpool]'")


def test_cartpole_equals_gymnasium() -> None:
    """Each step from EnvPool's states gives the same result, up to single precision."""
    from gymnasium.envs.classic_control import CartPoleEnv

    env, other = make_vector("CartPole-v1", 4, "envpool"), CartPoleEnv()
    obs, _ = env.reset(seed=3)
    states, num_ended = obs.copy(), 0
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
            assert not ended or (np.abs(obs[i]) <= 0.05).all()  # the first state of the next episode
            num_ended += ended
        assert (reward == 1.0).all()
        states = obs.copy()
    assert num_ended > 3
    env.close()


def test_time_limit_truncates() -> None:
    env = make_vector("CartPole-v1", 2, "envpool", options={"max_episode_steps": 4})
    env.reset(seed=0)
    for step in range(1, 9):
        _, _, terminated, truncated, _ = env.step(np.array([step % 2, 1 - step % 2]))
        assert not terminated.any()
        assert truncated.tolist() == [step % 4 == 0] * 2
    env.close()


@pytest.mark.parametrize(("algorithm_name", "env"), [("ppo", "CartPole-v1"), ("sac", "Pendulum-v1")])
def test_runs_resume_exactly(algorithm_name: str, env: str, tmp_path: Path) -> None:
    settings = {
        "env": env,
        "vector__backend": "envpool",
        "num_envs": 2,
        "tensorboard": False,
        "eval_every": 0,
    }
    if algorithm_name == "sac":
        settings |= {"learning_starts": 50, "net__hidden_sizes": [8]}
    else:
        settings |= {"rollout_steps": 25, "minibatch_size": 50, "lr_schedule": "constant"}
    zx.train(algorithm_name, out=tmp_path / "whole", quiet=True, env_steps=300, **settings)
    zx.train(algorithm_name, out=tmp_path / "half", quiet=True, env_steps=150, **settings)
    zx.Session.resume(tmp_path / "half", quiet=True, env_steps=300).run()
    assert differing_tensors(tmp_path / "whole", tmp_path / "half") == []


@pytest.mark.parametrize(
    ("env", "options", "message"),
    [
        ("toy/match", {}, "EnvPool has no environment toy/match"),
        ("CartPole-v1", {"sutton_barto_reward": True}, "doesn't accept the options sutton_barto_reward"),
    ],
)
def test_unsupported_env_or_option_is_rejected(env: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(zx.UserError, match=message):
        make_vector(env, 2, "envpool", options=options)

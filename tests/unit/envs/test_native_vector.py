"""The native back end, and the torch back end where both behave alike."""

from __future__ import annotations

import numpy as np
import pytest

from zhixing.envs import make_vector
from zhixing.errors import UserError


def test_native_cartpole_equals_gymnasium() -> None:
    native, serial = make_vector("CartPole-v1", 5, "native"), make_vector("CartPole-v1", 5, "serial")
    native.reset(seed=0)
    serial.reset(seed=1)
    rng = np.random.default_rng(0)
    num_terminated = 0
    for _ in range(400):
        for sub_env, state in zip(serial.group.sub_envs, native.native_env.env.state.T, strict=True):
            sub_env.env.unwrapped.state = state.copy()
            sub_env.env.unwrapped.steps_beyond_terminated = None
        actions = rng.integers(0, 2, 5)
        obs, reward, terminated, _, info = native.step(actions)
        other, other_reward, other_terminated, _, other_info = serial.step(actions)
        np.testing.assert_array_equal(terminated, other_terminated)
        np.testing.assert_array_equal(reward, other_reward)
        alive = ~terminated
        np.testing.assert_array_equal(obs[alive], other[alive])
        if terminated.any():
            num_terminated += terminated.sum()
            np.testing.assert_array_equal(info["final_obs"][~alive], other_info["final_obs"][~alive])
            assert (np.abs(obs[~alive]) <= 0.05).all()
    assert num_terminated > 20


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_time_limit_truncates_in_the_same_step(backend: str) -> None:
    env = make_vector("CartPole-v1", 2, backend, options={"max_episode_steps": 4})
    env.reset(seed=0)
    for step in range(1, 9):
        obs, _, terminated, truncated, info = env.step(np.array([0, 1]))
        assert not terminated.any()
        assert truncated.tolist() == [step % 4 == 0] * 2
        assert ("final_obs" in info) == (step % 4 == 0)
        if step % 4 == 0:
            assert (np.abs(obs) <= 0.05).all()
            assert (np.abs(info["final_obs"]) > 0.05).any()


def test_native_env_repeats_with_seed() -> None:
    env = make_vector("CartPole-v1", 3, "native")
    first = env.reset(seed=4)[0].copy()
    assert not np.array_equal(first, env.reset()[0])
    np.testing.assert_array_equal(first, env.reset(seed=4)[0])


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_all_envs_must_be_sent_at_once(backend: str) -> None:
    env = make_vector("CartPole-v1", 2, backend)
    env.reset(seed=0)
    with pytest.raises(ValueError, match="send all 2"):
        env.send(np.array([1]), np.array([0]))
    env.send(np.array([1, 0]), np.array([1, 0]))  # environment 1 is pushed right, 0 left
    ids, obs, *_ = env.recv()
    assert ids.tolist() == [0, 1]
    assert obs[0, 1] < 0 < obs[1, 1]


def test_env_without_native_version_is_rejected() -> None:
    with pytest.raises(UserError, match="Pendulum-v1 has no native version"):
        make_vector("Pendulum-v1", 2, "native")

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from zhixing.envs.adapters.mpe_spread import NativeSpread
from zhixing.errors import UserError


def copy_start(env: NativeSpread, row: int, world: Any) -> None:
    """Copy the positions of an mpe2 world."""
    for agent in range(env.num_agents):
        env.pos[row, agent] = world.agents[agent].state.p_pos
        env.vel[row, agent] = world.agents[agent].state.p_vel
        env.landmarks[row, agent] = world.landmarks[agent].state.p_pos


def sample_actions(rng: np.random.Generator, env: NativeSpread) -> np.ndarray:
    if env.continuous_actions:
        return rng.uniform(-0.2, 1.2, (env.num, env.num_agents, 5)).astype(np.float32)  # mpe2 also clips
    return rng.integers(0, 5, (env.num, env.num_agents))


@pytest.mark.parametrize("continuous", [False, True])
@pytest.mark.parametrize(("agents", "ratio"), [(2, 0.0), (3, 0.5), (6, 1.0)])
@pytest.mark.filterwarnings("ignore::UserWarning")  # mpe2 warns that it clips
def test_observations_and_rewards_equal_mpe2(agents: int, ratio: float, continuous: bool) -> None:
    mpe = pytest.importorskip("mpe2.simple_spread_v3")
    options: dict[str, Any] = {"N": agents, "local_ratio": ratio, "max_cycles": 25, "continuous_actions": continuous}
    env = NativeSpread(4, **options)
    env.reset(0)
    references = [mpe.parallel_env(**options) for _ in range(4)]
    for row, reference in enumerate(references):
        reference.reset(seed=row)
        world = reference.unwrapped.world
        world.agents[1].state.p_pos = world.agents[0].state.p_pos + 0.1  # they collide from the start
        copy_start(env, row, world)
    obs, _ = env.load_state_dict(env.state_dict())
    for row, reference in enumerate(references):
        expected_obs = [reference.unwrapped.observe(agent) for agent in reference.agents]
        np.testing.assert_allclose(obs[row], expected_obs, atol=1e-6)
    rng = np.random.default_rng(1)
    num_collisions = 0
    for step in range(25):
        actions = sample_actions(rng, env)
        obs, reward, terminated, truncated, info = env.step(actions)
        assert not terminated.any()
        assert truncated.tolist() == [step == 24] * 4
        next_obs = info["final_obs"] if step == 24 else obs
        for row, reference in enumerate(references):
            row_actions = actions[row] if continuous else actions[row].tolist()
            reference_step = reference.step(dict(zip(reference.agents, row_actions, strict=True)))
            expected_obs, expected_reward, *_ = reference_step
            np.testing.assert_allclose(next_obs[row], list(expected_obs.values()), rtol=0, atol=1e-6)
            np.testing.assert_allclose(reward[row], list(expected_reward.values()), rtol=0, atol=1e-6)
        num_collisions += int((env.agent_distance < 0.3).sum()) if step < 24 else 0
    assert num_collisions >= 4  # so contacts are compared too


def test_rewards_and_moves_match_hand_computed_values() -> None:
    env = NativeSpread(1, N=2, local_ratio=0.25)
    env.reset(0)
    env.pos[0], env.landmarks[0], env.vel[0] = [[0.0, 0.0], [0.0, 1.0]], [[3.0, 4.0], [0.0, 1.5]], 0.0
    env.load_state_dict(env.state_dict())
    # landmark (3, 4) is 5 from agent 0 and sqrt(9 + 9) from agent 1; the other landmark is 0.5 from agent 1
    _, reward, *_ = env.step(np.zeros((1, 2), np.int64))
    np.testing.assert_allclose(reward[0], -0.75 * (np.sqrt(18.0) + 0.5), rtol=1e-6)
    # moving right: the velocity after the step is 5 * 0.1 and moves the agent in the next step
    obs, *_ = env.step(np.array([[2, 0]]))
    np.testing.assert_allclose(obs[0, 0, :4], [0.5, 0.0, 0.0, 0.0], atol=1e-6)
    obs, *_ = env.step(np.array([[0, 0]]))
    np.testing.assert_allclose(obs[0, 0, :4], [0.375, 0.0, 0.05, 0.0], atol=1e-6)
    # both agents at the same y, 0.2 apart: they collide
    env.pos[0], env.vel[0] = [[0.0, 1.5], [0.2, 1.5]], 0.0
    env.load_state_dict(env.state_dict())
    _, reward, *_ = env.step(np.zeros((1, 2), np.int64))
    distance = np.sqrt(2.8**2 + 2.5**2)
    np.testing.assert_allclose(reward[0], -0.75 * (distance + 0.0) - 0.25, rtol=1e-6)


def test_worlds_are_reset_in_the_same_step() -> None:
    env = NativeSpread(3, max_cycles=4)
    first, info = env.reset(0)
    assert first.shape == (3, 3, 18)
    assert info == {}
    env.steps[1] = 2  # this world ends two steps before the others
    actions = np.full((3, 3), 4)
    for step in range(1, 5):
        obs, reward, terminated, truncated, info = env.step(actions)
        assert (obs.dtype, reward.dtype, reward.shape) == (np.float32, np.float32, (3, 3))
        assert truncated.tolist() == [step == 4, step == 2, step == 4]
        assert not terminated.any()
        if step == 2:
            assert info["final_info"] == {1: {}}
            assert (obs[1, :, :2] == 0).all()  # velocities are zero at the start
            assert (info["final_obs"][1, :, 1] > 0.5).all()
            np.testing.assert_array_equal(obs[[0, 2]], info["final_obs"][[0, 2]])
    assert sorted(info["final_info"]) == [0, 2]


def test_covering_all_landmarks_terminates_if_requested() -> None:
    for terminate in (False, True):
        env = NativeSpread(2, terminate_on_success=terminate)
        env.reset(0)
        env.pos[0] = env.landmarks[0] = [[-0.9, 0.0], [0.0, 0.0], [0.9, 0.0]]
        env.pos[1] = 5.0 + env.landmarks[0]
        env.load_state_dict(env.state_dict())
        _, _, terminated, truncated, info = env.step(np.zeros((2, 3), np.int64))
        assert terminated.tolist() == [terminate, False]
        assert not truncated.any()
        assert list(info.get("final_info", {})) == [0] * terminate


def test_state_is_restored_exactly() -> None:
    first, second = NativeSpread(3, max_cycles=7), NativeSpread(3, max_cycles=7)
    first.reset(3)
    rng = np.random.default_rng(0)
    for _ in range(5):
        expected_obs, *_ = first.step(sample_actions(rng, first))
    obs, _ = second.load_state_dict(first.state_dict())
    np.testing.assert_array_equal(obs, expected_obs)
    for _ in range(20):  # past the ends of two episodes
        actions = sample_actions(rng, first)
        for expected, actual in zip(first.step(actions)[:4], second.step(actions)[:4], strict=True):
            np.testing.assert_array_equal(actual, expected)


def test_same_seed_same_start() -> None:
    env = NativeSpread(2)
    first = env.reset(4)[0]
    assert not np.array_equal(first, env.reset(None)[0])
    np.testing.assert_array_equal(first, env.reset(4)[0])


def test_one_agent_has_no_agent_dimension() -> None:
    env = NativeSpread(5, N=1)
    obs, _ = env.reset(0)
    assert obs.shape == (5, 6)
    obs, reward, *_ = env.step(np.ones(5, np.int64))
    assert (obs.shape, reward.shape) == ((5, 6), (5,))


def test_invalid_options_are_rejected() -> None:
    with pytest.raises(UserError, match=r"env.local_ratio=1\.5: must be between 0 and 1"):
        NativeSpread(1, local_ratio=1.5)
    with pytest.raises(UserError, match=r"env.N=0: must be at least 1"):
        NativeSpread(1, N=0)

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from zhixing.envs.adapters.mpe_spread import NativeSpread
from zhixing.errors import UserError


def copy_start(task: NativeSpread, row: int, world: Any) -> None:
    for agent in range(task.agents):
        task.pos[row, agent] = world.agents[agent].state.p_pos
        task.vel[row, agent] = world.agents[agent].state.p_vel
        task.landmarks[row, agent] = world.landmarks[agent].state.p_pos


def draw(rng: np.random.Generator, task: NativeSpread) -> np.ndarray:
    if task.continuous:
        return rng.uniform(-0.2, 1.2, (task.num, task.agents, 5)).astype(np.float32)  # mpe2 clips, too
    return rng.integers(0, 5, (task.num, task.agents))


@pytest.mark.parametrize("continuous", [False, True])
@pytest.mark.parametrize(("agents", "ratio"), [(2, 0.0), (3, 0.5), (6, 1.0)])
@pytest.mark.filterwarnings("ignore::UserWarning")  # mpe2 tells that it clips
def test_moves_and_pays_as_mpe2(agents: int, ratio: float, continuous: bool) -> None:
    mpe = pytest.importorskip("mpe2.simple_spread_v3")
    options: dict[str, Any] = {"N": agents, "local_ratio": ratio, "max_cycles": 25, "continuous_actions": continuous}
    task = NativeSpread(4, **options)
    task.reset(0)
    theirs = [mpe.parallel_env(**options) for _ in range(4)]
    for row, env in enumerate(theirs):
        env.reset(seed=row)
        world = env.unwrapped.world
        world.agents[1].state.p_pos = world.agents[0].state.p_pos + 0.1  # they touch from the start
        copy_start(task, row, world)
    obs, _ = task.load_state_dict(task.state_dict())
    for row, env in enumerate(theirs):
        np.testing.assert_allclose(obs[row], [env.unwrapped.observe(a) for a in env.agents], atol=1e-6)
    rng = np.random.default_rng(1)
    touched = 0
    for step in range(25):
        actions = draw(rng, task)
        obs, reward, terminated, truncated, info = task.step(actions)
        assert not terminated.any()
        assert truncated.tolist() == [step == 24] * 4
        last = info["final_obs"] if step == 24 else obs
        for row, env in enumerate(theirs):
            acts = {name: actions[row, i] if continuous else int(actions[row, i]) for i, name in enumerate(env.agents)}
            other, other_reward, *_ = env.step(acts)
            np.testing.assert_allclose(last[row], list(other.values()), rtol=0, atol=1e-6)
            np.testing.assert_allclose(reward[row], list(other_reward.values()), rtol=0, atol=1e-6)
        touched += int((task.far < 0.3).sum()) if step < 24 else 0
    assert touched >= 4  # else contacts were not compared


def test_reward_is_worked_out_by_hand() -> None:
    task = NativeSpread(1, N=2, local_ratio=0.25)
    task.reset(0)
    task.pos[0], task.landmarks[0], task.vel[0] = [[0.0, 0.0], [0.0, 1.0]], [[3.0, 4.0], [0.0, 1.5]], 0.0
    task.load_state_dict(task.state_dict())
    # agent 0: (3, 4) is 5 away, agent 1: sqrt(9 + 9); the other landmark is 0.5 from agent 1. Nobody touches
    _, reward, *_ = task.step(np.zeros((1, 2), np.int64))
    np.testing.assert_allclose(reward[0], -0.75 * (np.sqrt(18.0) + 0.5), rtol=1e-6)
    # a push to the right: 5 * 0.1 is the speed after the step, which moves the agent at the next one
    obs, *_ = task.step(np.array([[2, 0]]))
    np.testing.assert_allclose(obs[0, 0, :4], [0.5, 0.0, 0.0, 0.0], atol=1e-6)
    obs, *_ = task.step(np.array([[0, 0]]))
    np.testing.assert_allclose(obs[0, 0, :4], [0.375, 0.0, 0.05, 0.0], atol=1e-6)
    # both at one height, 0.2 apart: each touches one other
    task.pos[0], task.vel[0] = [[0.0, 1.5], [0.2, 1.5]], 0.0
    task.load_state_dict(task.state_dict())
    _, reward, *_ = task.step(np.zeros((1, 2), np.int64))
    far = np.sqrt(2.8**2 + 2.5**2)
    np.testing.assert_allclose(reward[0], -0.75 * (far + 0.0) - 0.25, rtol=1e-6)


def test_ended_worlds_begin_anew_in_the_same_step() -> None:
    task = NativeSpread(3, max_cycles=4)
    first, info = task.reset(0)
    assert first.shape == (3, 3, 18)
    assert info == {}
    task.steps[1] = 2  # ends two steps before the others
    actions = np.full((3, 3), 4)
    for step in range(1, 5):
        obs, reward, terminated, truncated, info = task.step(actions)
        assert (obs.dtype, reward.dtype, reward.shape) == (np.float32, np.float32, (3, 3))
        assert truncated.tolist() == [step == 4, step == 2, step == 4]
        assert not terminated.any()
        if step == 2:
            assert info["final_info"] == {1: {}}
            assert (obs[1, :, :2] == 0).all()  # nothing moves at the start
            assert (info["final_obs"][1, :, 1] > 0.5).all()
            np.testing.assert_array_equal(obs[[0, 2]], info["final_obs"][[0, 2]])
    assert sorted(info["final_info"]) == [0, 2]


def test_covering_all_landmarks_terminates_where_asked() -> None:
    for stops in (False, True):
        task = NativeSpread(2, terminate_on_success=stops)
        task.reset(0)
        task.pos[0] = task.landmarks[0] = [[-0.9, 0.0], [0.0, 0.0], [0.9, 0.0]]
        task.pos[1] = 5.0 + task.landmarks[0]
        task.load_state_dict(task.state_dict())
        _, _, terminated, truncated, info = task.step(np.zeros((2, 3), np.int64))
        assert terminated.tolist() == [stops, False]
        assert not truncated.any()
        assert list(info.get("final_info", {})) == [0] * stops


def test_state_is_restored_exactly() -> None:
    task, other = NativeSpread(3, max_cycles=7), NativeSpread(3, max_cycles=7)
    task.reset(3)
    rng = np.random.default_rng(0)
    for _ in range(5):
        seen, *_ = task.step(draw(rng, task))
    obs, _ = other.load_state_dict(task.state_dict())
    np.testing.assert_array_equal(obs, seen)
    for _ in range(20):  # over two ends of episodes
        actions = draw(rng, task)
        for mine, its in zip(task.step(actions)[:4], other.step(actions)[:4], strict=True):
            np.testing.assert_array_equal(mine, its)


def test_seeds_repeat() -> None:
    task = NativeSpread(2)
    first = task.reset(4)[0]
    assert not np.array_equal(first, task.reset(None)[0])
    np.testing.assert_array_equal(first, task.reset(4)[0])


def test_one_agent_has_no_dimension_of_agents() -> None:
    task = NativeSpread(5, N=1)
    obs, _ = task.reset(0)
    assert obs.shape == (5, 6)
    obs, reward, *_ = task.step(np.ones(5, np.int64))
    assert (obs.shape, reward.shape) == ((5, 6), (5,))


def test_wrong_options_are_told() -> None:
    with pytest.raises(UserError, match=r"local_ratio=1\.5; it must lie between 0 and 1"):
        NativeSpread(1, local_ratio=1.5)
    with pytest.raises(UserError, match="N=0 agents"):
        NativeSpread(1, N=0)

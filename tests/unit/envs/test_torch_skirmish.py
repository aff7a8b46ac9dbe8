"""The torch version of Skirmish matches the NumPy version bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from zhixing.envs import make_vector
from zhixing.envs.adapters.skirmish import MAPS, Battles, focus_fire, random_play
from zhixing.envs.adapters.skirmish.battles import ATTACK, EAST, JITTER, NOOP, STOP
from zhixing.envs.torch_native import TorchVectorEnv
from zhixing.envs.torch_native.skirmish import Skirmish
from zhixing.envs.vector.native import NativeVectorEnv
from zhixing.errors import UserError


def make_torch_env(map_name: str, num_envs: int, **options: object) -> TorchVectorEnv:
    env = make_vector(f"skirmish/{map_name}", num_envs, "torch", options=options)
    assert isinstance(env, TorchVectorEnv)
    return env


def to_state(battles: Battles) -> torch.Tensor:
    """Return the state `[k,N]` of the NumPy battles."""
    position = np.moveaxis(battles.position, -1, 0)
    parts = [*position, battles.health, battles.shield, battles.cooldown_left, battles.last_actions]
    return torch.from_numpy(np.concatenate([part.T for part in parts]).astype(np.float64))


def assert_same(actual: Any, expected: Any) -> None:
    """Compare dtype, shape and values."""
    assert actual.dtype == expected.dtype
    np.testing.assert_array_equal(actual, expected, strict=True)


def assert_same_info(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        if name == "final_info":
            assert actual[name] == value
        else:
            assert_same(actual[name], value)


@pytest.mark.parametrize(("map_name", "limit"), [*((name, None) for name in MAPS), ("3m", 11)])
def test_battles_match_numpy_bit_for_bit(map_name: str, limit: int | None) -> None:
    """40 battles over 150 steps of random and scripted play, so both teams hit, die, win and run out of time. The two
    versions have different random streams, so new episodes copy the initial positions of the NumPy version."""
    options: dict[str, Any] = {} if limit is None else {"episode_limit": limit}
    env, native = (
        make_torch_env(map_name, 40, **options),
        make_vector(f"skirmish/{map_name}", 40, "native", options=options),
    )
    assert isinstance(native, NativeVectorEnv)
    assert (env.logged_info_keys, env.max_episode_steps) == (
        native.logged_info_keys,
        limit or MAPS[map_name].episode_limit,
    )
    battles: Battles = native.native_env.battles  # type: ignore[attr-defined]
    native.reset(seed=0)
    env.reset(seed=0)
    env._state = to_state(battles)
    rng = np.random.default_rng(0)
    counts = {"ended": 0, "truncated": 0, "won": 0, "lost": 0}
    for step in range(150):
        scripted = rng.random(battles.last_actions.shape) < (0.0 if step < 50 else 0.8)
        actions = np.where(scripted, focus_fire(battles), random_play(battles, rng))
        obs, reward, terminated, truncated, info = env.step(actions)
        expected_obs, *expected_rest, expected_info = native.step(actions)
        for actual, expected in zip((reward, terminated, truncated), expected_rest, strict=True):
            assert_same(actual, expected)
        ended = terminated | truncated
        assert_same(obs[~ended], expected_obs[~ended])
        assert_same_info(*({k: v for k, v in d.items() if "final" in k} for d in (info, expected_info)))
        for final_info in info.get("final_info", {}).values():
            counts["won"] += final_info["won"]
            counts["lost"] += final_info["dead_allies"] == battles.num_allies
        counts["ended"] += ended.sum()
        counts["truncated"] += truncated.sum()
        env._state = torch.where(torch.from_numpy(ended), to_state(battles), env._state)
        obs, info = env.load_state_dict(env.state_dict())
        assert_same(obs, expected_obs)
        assert_same_info(info, {k: v for k, v in expected_info.items() if "final" not in k})
    assert counts["ended"] > 40
    assert (counts["won"] > 0) == (map_name in ("3m", "8m", "2s3z") and limit is None)  # maps that focus fire can win
    assert counts["lost"] > 0 or limit is not None
    assert counts["truncated"] > 200 or limit is None


def test_unavailable_actions_have_no_effect() -> None:
    """Attacks out of range, no-op of a living unit, action numbers that don't exist, moves off the map."""
    env = make_torch_env("3m", 2)
    env.reset(seed=0)
    env._state[0, 1] = 31.0  # x of battle 1's first ally: at the east edge
    before = env._state.clone()
    moved = env.env.transition(before, torch.tensor([[ATTACK, NOOP, 99], [EAST, STOP, -3]])).state
    stopped = env.env.transition(before, torch.full((2, 3), STOP)).state
    assert torch.equal(moved[:-3], stopped[:-3])
    assert torch.equal(moved[:3], before[:3])
    assert moved[-3:].T.tolist() == [[0, 0, 0], [0, STOP, 0]]


def test_termination_at_the_time_limit_is_not_truncation() -> None:
    """Battle 0 is won in its last step, battle 1 is truncated, battle 2 continues."""
    env = make_torch_env("2m_vs_1z", 3)
    env.reset(seed=0)
    env._elapsed[:] = torch.tensor([149, 149, 3])
    env._state[:3] = env._state[2] - 2.0  # x of all units: both marines, and the zealot...
    env._state[2] += 4.0  # ... 4 from them: beyond its range of 2, within theirs of 5.5
    env._state[3:6] = 16.0  # y
    env._state[8, 0], env._state[11, 0] = 10.0, 0.0  # health and shield of battle 0's zealot: two shots of 6 kill it
    _, reward, terminated, truncated, info = env.step(np.array([[ATTACK, ATTACK], [ATTACK, STOP], [STOP, STOP]]))
    assert terminated.tolist() == [True, False, False]
    assert truncated.tolist() == [False, True, False]
    # (10 lost + 10 for the kill + 200 for the win) 20 / (150 + 10 + 200); 6 lost; none
    np.testing.assert_allclose(reward, np.repeat([[220 / 18], [6 / 18], [0.0]], 2, 1), rtol=1e-6)
    assert info["final_info"] == {
        0: {"won": True, "dead_allies": 0, "dead_enemies": 1},
        1: {"won": False, "dead_allies": 0, "dead_enemies": 0},
    }


def test_initial_states_match_numpy() -> None:
    """Uniform around two lines: extremes of 4,000 samples are within 1 %, except with probability e^-20 each."""
    env, battles = make_torch_env("2s3z", 4_000), Battles(4_000, "2s3z")
    env.reset(seed=0)
    assert env._state.dtype == torch.float64  # as in NumPy
    x, y, *rest = env._state.split(env.env.rows)  # type: ignore[attr-defined]
    offset = torch.stack((x, y), -1) - torch.from_numpy(battles.start_positions).unsqueeze(1)
    assert offset.abs().max() <= JITTER
    assert torch.minimum(offset.amax(1), -offset.amin(1)).min() >= 0.99 * JITTER
    assert offset.mean(1).abs().max() < 0.05  # their std is 1 / sqrt(3), that of the mean of 4,000 is 0.009
    battles.reset(np.arange(4_000))
    for actual, expected in zip(rest, to_state(battles).split(env.env.rows)[2:], strict=True):  # type: ignore[attr-defined]
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("map_name", ["3m", "2m_vs_1z"])
def test_seeding_and_restoring_are_exact(map_name: str) -> None:
    env, other = (make_torch_env(map_name, 6, episode_limit=9) for _ in range(2))
    obs, info = env.reset(seed=3)
    assert_same(obs, other.reset(seed=3)[0])
    rng = np.random.default_rng(1)
    for step in range(30):
        if step == 13:  # a third env continues from the second one's state
            saved = other.state_dict()
            other = make_torch_env(map_name, 6, episode_limit=9)
            restored, restored_info = other.load_state_dict(saved)
            assert_same(restored, obs)
            assert_same_info(restored_info, {name: value for name, value in info.items() if "final" not in name})
        actions = np.where(info["action_mask"], rng.random(info["action_mask"].shape), -1.0).argmax(-1)
        obs, *rest, info = env.step(actions)
        *expected_rest, expected_info = other.step(actions)
        for actual, expected in zip((obs, *rest), expected_rest, strict=True):
            assert_same(actual, expected)
        assert_same_info(info, expected_info)


@pytest.mark.parametrize("map_name", MAPS)
def test_no_step_synchronizes_with_the_device(map_name: str) -> None:
    """Meta tensors have no values, so reading one raises an error. On a real device it would synchronize."""
    meta = torch.device("meta")
    env = make_torch_env(map_name, 1).env.to(meta)
    assert isinstance(env, Skirmish)
    state = torch.empty(sum(env.rows), 7, device=meta)
    moved = env.transition(state, torch.empty(7, env.allies, dtype=torch.int64, device=meta))
    assert moved.reward.shape == (7, env.allies)
    assert {name: tensor.shape[0] for name, tensor in env.observe(moved.state).items()} == dict.fromkeys(
        ("obs", "mask", "state", "alive"), 7
    )
    assert env.info(moved.state)["won"].shape == (7,)


def test_options() -> None:
    assert make_torch_env("3m", 2, episode_limit=7).max_episode_steps == 7
    with pytest.raises(UserError, match="at least 1 step"):
        make_torch_env("3m", 2, episode_limit=0)
    with pytest.raises(UserError, match="no option render_mode"):
        make_vector("skirmish/3m", 2, "torch", render_mode="rgb_array")
    assert make_torch_env("3m", 2, max_episode_steps=7).max_episode_steps == 7

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


def in_torch(map_name: str, num: int, **options: object) -> TorchVectorEnv:
    env = make_vector(f"skirmish/{map_name}", num, "torch", options=options)
    assert isinstance(env, TorchVectorEnv)
    return env


def rows_of(battles: Battles) -> torch.Tensor:
    """The same battles as a state `[k,N]`."""
    place = np.moveaxis(battles.position, -1, 0)
    parts = [*place, battles.health, battles.shield, battles.cooldown_left, battles.last_actions]
    return torch.from_numpy(np.concatenate([part.T for part in parts]).astype(np.float64))


def same(mine: Any, theirs: Any) -> None:
    """Of equal type, shape and value."""
    assert mine.dtype == theirs.dtype
    np.testing.assert_array_equal(mine, theirs, strict=True)


def same_info(mine: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert mine.keys() == theirs.keys()
    for name, value in theirs.items():
        if name == "final_info":
            assert mine[name] == value
        else:
            same(mine[name], value)


@pytest.mark.parametrize(("map_name", "limit"), [*((name, None) for name in MAPS), ("3m", 11)])
def test_battles_go_as_in_numpy_from_the_same_starts(map_name: str, limit: int | None) -> None:
    """To the bit: 40 battles over 150 steps of random and clever play, so that both teams hit, fall, win and run out
    of time. Each has its own luck, so those that begin anew are given the places of the other's."""
    options: dict[str, Any] = {} if limit is None else {"episode_limit": limit}
    env, native = in_torch(map_name, 40, **options), make_vector(f"skirmish/{map_name}", 40, "native", options=options)
    assert isinstance(native, NativeVectorEnv)
    assert (env.logged_info_keys, env.limit) == (native.logged_info_keys, limit or MAPS[map_name].episode_limit)
    battles: Battles = native.task.battles  # type: ignore[attr-defined]
    native.reset(seed=0)
    env.reset(seed=0)
    env._state = rows_of(battles)
    rng = np.random.default_rng(0)
    seen = {"ends": 0, "cut": 0, "won": 0, "fell": 0}
    for step in range(150):
        clever = rng.random(battles.last_actions.shape) < (0.0 if step < 50 else 0.8)
        actions = np.where(clever, focus_fire(battles), random_play(battles, rng))
        obs, reward, terminated, truncated, info = env.step(actions)
        other_obs, *others, other_info = native.step(actions)
        for mine, theirs in zip((reward, terminated, truncated), others, strict=True):
            same(mine, theirs)
        ended = terminated | truncated
        same(obs[~ended], other_obs[~ended])
        same_info(*({k: v for k, v in told.items() if "final" in k} for told in (info, other_info)))
        for told in info.get("final_info", {}).values():
            seen["won"] += told["won"]
            seen["fell"] += told["dead_allies"] == battles.num_allies
        seen["ends"] += ended.sum()
        seen["cut"] += truncated.sum()
        env._state = torch.where(torch.from_numpy(ended), rows_of(battles), env._state)
        obs, info = env.load_state_dict(env.state_dict())
        same(obs, other_obs)
        same_info(info, {k: v for k, v in other_info.items() if "final" not in k})
    assert seen["ends"] > 40
    assert (seen["won"] > 0) == (map_name in ("3m", "8m", "2s3z") and limit is None)  # what focus fire is enough for
    assert seen["fell"] > 0 or limit is not None
    assert seen["cut"] > 200 or limit is None


def test_what_is_not_available_does_nothing() -> None:
    """Attacks out of range, doing nothing while alive, numbers that there aren't, steps off the map."""
    env = in_torch("3m", 2)
    env.reset(seed=0)
    env._state[0, 1] = 31.0  # x of its first ally: no room in the east
    before = env._state.clone()
    moved = env.task.move(before, torch.tensor([[ATTACK, NOOP, 99], [EAST, STOP, -3]])).state
    stopped = env.task.move(before, torch.full((2, 3), STOP)).state
    assert torch.equal(moved[:-3], stopped[:-3])
    assert torch.equal(moved[:3], before[:3])
    assert moved[-3:].T.tolist() == [[0, 0, 0], [0, STOP, 0]]


def test_who_falls_at_the_time_limit_is_not_cut() -> None:
    """Battle 0 is won in its last step, battle 1 is cut, battle 2 goes on."""
    env = in_torch("2m_vs_1z", 3)
    env.reset(seed=0)
    env._elapsed[:] = torch.tensor([149, 149, 3])
    env._state[:3] = env._state[2] - 2.0  # x of all units: both marines, and the zealot...
    env._state[2] += 4.0  # ... 4 from them: beyond its range of 2, within theirs of 5.5
    env._state[3:6] = 16.0  # y
    env._state[8, 0], env._state[11, 0] = 10.0, 0.0  # health and shield of the first zealot: two shots of 6 are enough
    _, reward, terminated, truncated, info = env.step(np.array([[ATTACK, ATTACK], [ATTACK, STOP], [STOP, STOP]]))
    assert terminated.tolist() == [True, False, False]
    assert truncated.tolist() == [False, True, False]
    # (10 lost + 10 for the kill + 200 for the win) 20 / (150 + 10 + 200); 6 lost; none
    np.testing.assert_allclose(reward, np.repeat([[220 / 18], [6 / 18], [0.0]], 2, 1), rtol=1e-6)
    assert info["final_info"] == {
        0: {"won": True, "dead_allies": 0, "dead_enemies": 1},
        1: {"won": False, "dead_allies": 0, "dead_enemies": 0},
    }


def test_battles_begin_as_in_numpy() -> None:
    """Uniform around two lines: no extreme of 4000 draws is 1 % off, but for a chance of e^-20 each."""
    env, battles = in_torch("2s3z", 4_000), Battles(4_000, "2s3z")
    env.reset(seed=0)
    assert env._state.dtype == torch.float64  # as there
    x, y, *rest = env._state.split(env.task.rows)  # type: ignore[attr-defined]
    off = torch.stack((x, y), -1) - torch.from_numpy(battles.start_positions).unsqueeze(1)
    assert off.abs().max() <= JITTER
    assert torch.minimum(off.amax(1), -off.amin(1)).min() >= 0.99 * JITTER
    assert off.mean(1).abs().max() < 0.05  # their spread is 1 / sqrt(3), that of the mean of 4000 is 0.009
    battles.reset(np.arange(4_000))
    for mine, theirs in zip(rest, rows_of(battles).split(env.task.rows)[2:], strict=True):  # type: ignore[attr-defined]
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("map_name", ["3m", "2m_vs_1z"])
def test_same_seed_same_battles_and_exact_restoring(map_name: str) -> None:
    env, other = (in_torch(map_name, 6, episode_limit=9) for _ in range(2))
    obs, info = env.reset(seed=3)
    same(obs, other.reset(seed=3)[0])
    rng = np.random.default_rng(1)
    for step in range(30):
        if step == 13:  # a third one goes on where the second was
            saved = other.state_dict()
            other = in_torch(map_name, 6, episode_limit=9)
            restored, its_info = other.load_state_dict(saved)
            same(restored, obs)
            same_info(its_info, {name: value for name, value in info.items() if "final" not in name})
        actions = np.where(info["action_mask"], rng.random(info["action_mask"].shape), -1.0).argmax(-1)
        obs, *rest, info = env.step(actions)
        theirs, *others, its_info = other.step(actions)
        for mine, its in zip((obs, *rest), (theirs, *others), strict=True):
            same(mine, its)
        same_info(info, its_info)


@pytest.mark.parametrize("map_name", MAPS)
def test_nothing_looks_at_numbers(map_name: str) -> None:
    """Tensors without numbers refuse whoever wants to know one, which would wait for a device that has them."""
    nowhere = torch.device("meta")
    task = in_torch(map_name, 1).task.to(nowhere)
    assert isinstance(task, Skirmish)
    state = torch.empty(sum(task.rows), 7, device=nowhere)
    moved = task.move(state, torch.empty(7, task.allies, dtype=torch.int64, device=nowhere))
    assert moved.reward.shape == (7, task.allies)
    assert {name: tensor.shape[0] for name, tensor in task.observe(moved.state).items()} == dict.fromkeys(
        ("obs", "mask", "state", "alive"), 7
    )
    assert task.numbers(moved.state)["won"].shape == (7,)


def test_options_are_those_of_others_but_pictures() -> None:
    assert in_torch("3m", 2, episode_limit=7).limit == 7
    with pytest.raises(UserError, match="at least 1 step"):
        in_torch("3m", 2, episode_limit=0)
    with pytest.raises(UserError, match="no option render_mode"):
        make_vector("skirmish/3m", 2, "torch", render_mode="rgb_array")
    assert in_torch("3m", 2, max_episode_steps=7).limit == 7

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

from zhixing.envs.adapters import smax
from zhixing.errors import UserError
from zhixing.utils.extras import install_hint

MAX_STEPS = 12  # short episodes, so that tests reach their ends


def sample_actions(rng: np.random.Generator, mask: Any) -> Any:
    return (rng.random(mask.shape) * mask).argmax(-1)


def attack(obs: Any, mask: Any) -> Any:
    """Shoot the first enemy in range, else walk right, where the enemies come from."""
    shots = mask[:, 5:]
    return np.where(shots.any(1), 5 + shots.argmax(1), np.where(mask[:, 1], 1, 0))


@pytest.fixture(scope="module")
def env() -> Any:
    pytest.importorskip("jaxmarl")
    return smax.make("smax/3m", {})


@pytest.fixture(scope="module")
def native() -> Any:
    pytest.importorskip("jaxmarl")
    return smax.NATIVE["smax/3m"](3, max_steps=MAX_STEPS)


def test_observation_and_info_of_a_battle(env: Any) -> None:
    obs, info = env.reset(seed=0)
    assert env.num_agents == 3
    assert (obs.shape, obs.dtype) == ((3, 75), np.float32)  # 13 features of each other unit, 10 of its own
    assert env.action_space.n == 8  # four moves, stop, three enemies to attack
    assert (info["state"].shape, info["state"].dtype) == ((72,), np.float32)
    assert info["alive"].tolist() == [True] * 3
    assert info["action_mask"].tolist() == [[True] * 5 + [False] * 3] * 3  # the enemies are out of range
    obs[0] = 1.0  # writable, unlike a JAX array


def test_same_seed_same_battle(env: Any) -> None:
    runs = []
    for _ in range(2):
        obs, info = env.reset(seed=4)
        rng, observations = np.random.default_rng(0), [obs]
        for _ in range(10):
            obs, *_, info = env.step(sample_actions(rng, info["action_mask"]))
            observations.append(obs)
        runs.append(np.stack(observations))
    np.testing.assert_array_equal(*runs)
    assert not np.array_equal(env.reset(seed=5)[0], runs[0][0])


def test_dead_units_observe_zeros_and_receive_the_team_reward(env: Any) -> None:
    rng = np.random.default_rng(0)
    _, info = env.reset(seed=0)
    dead_steps, over = 0, False
    while not over:
        obs, reward, terminated, truncated, info = env.step(sample_actions(rng, info["action_mask"]))
        over = terminated or truncated
        dead = ~info["alive"]
        assert (obs[dead] == 0).all()
        assert (info["action_mask"][dead] == [True] + [False] * 7).all()
        assert (reward == reward[0]).all()  # one team
        dead_steps += int(dead.any() and not dead.all())
    assert dead_steps > 0
    assert (terminated, truncated, info["won"]) == (True, False, False)  # random play dies
    assert not info["alive"].any()


def test_won_battles_earn_the_bonus(env: Any) -> None:
    obs, info = env.reset(seed=0)
    wins = 0
    for _ in range(20):
        total, over = 0.0, False
        while not over:
            obs, reward, terminated, truncated, info = env.step(attack(obs, info["action_mask"]))
            total += float(reward[0])
            over = terminated or truncated
        if info["won"]:
            wins += 1
            assert info["alive"].any()
            assert total == pytest.approx(2.0, abs=0.05)  # 1 for all damage and 1 for winning
        obs, info = env.reset()
    assert wins >= 1


def test_render_draws_both_teams(env: Any) -> None:
    env.reset(seed=0)
    image = env.render()
    assert (image.shape, image.dtype) == ((320, 320, 3), np.uint8)
    columns = {color: np.nonzero((image == color).all(2))[1] for color in (smax.ALLY, smax.ENEMY)}
    assert columns[smax.ALLY].max() < 160 < columns[smax.ENEMY].min()  # the teams start on opposite sides


def test_native_battles_are_reset_in_the_same_step(native: Any) -> None:
    obs, info = native.reset(0)
    assert obs.shape == (3, 3, 75)
    assert native.logged_info_keys == ("won",)
    rng = np.random.default_rng(0)
    num_ends = 0
    for step in range(1, 4 * MAX_STEPS + 1):
        obs, reward, terminated, truncated, info = native.step(sample_actions(rng, info["action_mask"]))
        assert (reward.shape, info["action_mask"].shape, info["state"].shape) == ((3, 3), (3, 3, 8), (3, 72))
        assert not (terminated & truncated).any()
        ended = terminated | truncated
        assert ended.any() == ("final_obs" in info)
        if step == MAX_STEPS + 1:  # JaxMARL checks the limit before it counts the step
            assert truncated.all()
        if ended.any():
            num_ends += int(ended.sum())
            assert sorted(info["final_info"]) == ended.nonzero()[0].tolist()
            assert all(set(final_info) == {"won"} for final_info in info["final_info"].values())
            np.testing.assert_array_equal(info["final_obs"][~ended], obs[~ended])
            assert (info["final_obs"][ended] != obs[ended]).any((1, 2)).all()
            assert info["alive"][ended].all()
            assert not info["action_mask"][ended][..., 5:].any()  # out of range of the enemies again
            assert info["final_alive"].shape == (3, 3)
            assert info["final_mask"].shape == (3, 3, 8)
            assert info["final_state"].shape == (3, 72)
    assert num_ends >= 9


def test_native_battle_equals_a_single_battle(native: Any) -> None:
    """With the same random key and actions."""
    native.reset(7)
    battle = native.battle
    reset, step = (battle.jax.jit(function) for function in (battle.reset, battle.step))
    key = battle.jax.random.split(battle.jax.random.PRNGKey(7), 3)[1]
    key, state, outputs = reset(key)
    np.testing.assert_allclose(native.outputs["obs"][1], outputs["obs"], atol=1e-6)
    rng = np.random.default_rng(0)
    for _ in range(MAX_STEPS - 1):
        actions = sample_actions(rng, np.array(native.outputs["mask"]))
        obs, reward, _, _, info = native.step(actions)
        key, state, outputs, results = step(key, state, actions[1].astype(np.int32))
        np.testing.assert_allclose(obs[1], outputs["obs"], atol=1e-5)
        np.testing.assert_allclose(info["state"][1], outputs["state"], atol=1e-5)
        np.testing.assert_array_equal(info["action_mask"][1], outputs["mask"])
        np.testing.assert_allclose(reward[1], results["reward"], atol=1e-6)


def test_native_state_is_restored_exactly(native: Any) -> None:
    _, info = native.reset(1)
    rng = np.random.default_rng(0)
    for _ in range(5):
        *_, info = native.step(sample_actions(rng, info["action_mask"]))
    saved_state = native.state_dict()
    runs = []
    for _ in range(2):
        obs, info = native.load_state_dict(saved_state)
        rng, observations = np.random.default_rng(1), [obs]
        for _ in range(20):  # past the end of an episode
            obs, *_, info = native.step(sample_actions(rng, info["action_mask"]))
            observations.append(obs)
        runs.append(np.stack(observations))
    np.testing.assert_array_equal(*runs)
    assert native._step_all._cache_size() == 1  # compiled only once


def test_importing_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("jax")
    for name in [name for name in sys.modules if name.startswith("jaxmarl")]:
        del sys.modules[name]
    streams = sys.stdout, sys.stderr
    smax.Battle("smax/3m", {})
    assert (sys.stdout, sys.stderr) == streams
    assert capfd.readouterr().out == ""


def test_invalid_options_are_rejected() -> None:
    pytest.importorskip("jaxmarl")
    with pytest.raises(UserError, match=r"smax/3m has no option 'max_step', allowed: max_steps, .*mean 'max_steps'"):
        smax.make("smax/3m", {"max_step": 3})
    with pytest.raises(UserError, match=r"can't be made with \(observation_type='x'\): ValueError"):
        smax.make("smax/3m", {"observation_type": "x"})


def test_names_need_no_jax() -> None:
    assert {"smax/3m", "smax/2s3z", "smax/5m_vs_6m"} <= set(smax.names())
    assert smax.supports("smax/8m")
    assert not smax.supports("smax/4m")
    assert smax.NATIVE["smax/8m"].name == "smax/8m"
    assert "max_steps" in smax.NATIVE["smax/8m"].options
    assert "render_mode" not in smax.NATIVE["smax/8m"].options


def test_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jaxmarl.environments.smax", None)
    for make in (lambda: smax.make("smax/3m", {}), lambda: smax.NATIVE["smax/3m"](2)):
        with pytest.raises(UserError) as caught:
            make()
        assert str(caught.value) == f"smax/3m needs the extra 'smax': {install_hint('smax')}"

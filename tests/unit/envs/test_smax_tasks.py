from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

from zhixing.envs.adapters import smax
from zhixing.errors import UserError
from zhixing.utils.extras import install_hint

STEPS = 12  # of an episode: soon over, so that ends are seen


def draw(rng: np.random.Generator, mask: Any) -> Any:
    return (rng.random(mask.shape) * mask).argmax(-1)


def attack(obs: Any, mask: Any) -> Any:
    """Shoot the first enemy in reach, else go right, where they come from."""
    shots = mask[:, 5:]
    return np.where(shots.any(1), 5 + shots.argmax(1), np.where(mask[:, 1], 1, 0))


@pytest.fixture(scope="module")
def env() -> Any:
    pytest.importorskip("jaxmarl")
    return smax.make("smax/3m", {})


@pytest.fixture(scope="module")
def native() -> Any:
    pytest.importorskip("jaxmarl")
    return smax.NATIVE["smax/3m"](3, max_steps=STEPS)


def test_what_a_battle_shows(env: Any) -> None:
    obs, info = env.reset(seed=0)
    assert env.num_agents == 3
    assert (obs.shape, obs.dtype) == ((3, 75), np.float32)  # 13 numbers of each other unit, 10 of its own
    assert env.action_space.n == 8  # four ways, stop, three enemies
    assert (info["state"].shape, info["state"].dtype) == ((72,), np.float32)
    assert info["alive"].tolist() == [True] * 3
    assert info["action_mask"].tolist() == [[True] * 5 + [False] * 3] * 3  # the enemy is out of reach
    obs[0] = 1.0  # not JAX's own array


def test_same_seed_same_battle(env: Any) -> None:
    runs = []
    for _ in range(2):
        obs, info = env.reset(seed=4)
        rng, seen = np.random.default_rng(0), [obs]
        for _ in range(10):
            obs, *_, info = env.step(draw(rng, info["action_mask"]))
            seen.append(obs)
        runs.append(np.stack(seen))
    np.testing.assert_array_equal(*runs)
    assert not np.array_equal(env.reset(seed=5)[0], runs[0][0])


def test_the_dead_see_nothing_and_stay_paid(env: Any) -> None:
    rng = np.random.default_rng(0)
    _, info = env.reset(seed=0)
    dead_steps, over = 0, False
    while not over:
        obs, reward, terminated, truncated, info = env.step(draw(rng, info["action_mask"]))
        over = terminated or truncated
        dead = ~info["alive"]
        assert (obs[dead] == 0).all()
        assert (info["action_mask"][dead] == [True] + [False] * 7).all()
        assert (reward == reward[0]).all()  # one team
        dead_steps += int(dead.any() and not dead.all())
    assert dead_steps > 0
    assert (terminated, truncated, info["won"]) == (True, False, False)  # random play dies
    assert not info["alive"].any()


def test_won_battles_pay_the_bonus(env: Any) -> None:
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
            assert total == pytest.approx(2.0, abs=0.05)  # all damage there is, and 1 for winning
        obs, info = env.reset()
    assert wins >= 1


def test_picture_of_a_battle(env: Any) -> None:
    env.reset(seed=0)
    frame = env.render()
    assert (frame.shape, frame.dtype) == ((320, 320, 3), np.uint8)
    columns = {colour: np.nonzero((frame == colour).all(2))[1] for colour in (smax.ALLY, smax.ENEMY)}
    assert columns[smax.ALLY].max() < 160 < columns[smax.ENEMY].min()  # they start on their own sides


def test_native_battles_begin_anew_in_the_same_step(native: Any) -> None:
    obs, info = native.reset(0)
    assert obs.shape == (3, 3, 75)
    assert native.logged_info_keys == ("won",)
    rng = np.random.default_rng(0)
    ends = 0
    for step in range(1, 4 * STEPS + 1):
        obs, reward, terminated, truncated, info = native.step(draw(rng, info["action_mask"]))
        assert (reward.shape, info["action_mask"].shape, info["state"].shape) == ((3, 3), (3, 3, 8), (3, 72))
        assert not (terminated & truncated).any()
        ended = terminated | truncated
        assert ended.any() == ("final_obs" in info)
        if step == STEPS + 1:  # JaxMARL looks at the clock before it counts the step
            assert truncated.all()
        if ended.any():
            ends += int(ended.sum())
            assert sorted(info["final_info"]) == ended.nonzero()[0].tolist()
            assert all(set(numbers) == {"won"} for numbers in info["final_info"].values())
            np.testing.assert_array_equal(info["final_obs"][~ended], obs[~ended])
            assert (info["final_obs"][ended] != obs[ended]).any((1, 2)).all()
            assert info["alive"][ended].all()
            assert not info["action_mask"][ended][..., 5:].any()  # far from the enemy again
            assert info["final_alive"].shape == (3, 3)
            assert info["final_mask"].shape == (3, 3, 8)
            assert info["final_state"].shape == (3, 72)
    assert ends >= 9


def test_native_battle_is_the_single_one(native: Any) -> None:
    """The same keys and actions give the same battle."""
    native.reset(7)
    battle = native.battle
    begin, act = (battle.jax.jit(function) for function in (battle.begin, battle.act))
    key = battle.jax.random.split(battle.jax.random.PRNGKey(7), 3)[1]
    key, state, shown = begin(key)
    np.testing.assert_allclose(native.shown["obs"][1], shown["obs"], atol=1e-6)
    rng = np.random.default_rng(0)
    for _ in range(STEPS - 1):
        actions = draw(rng, np.array(native.shown["mask"]))
        obs, reward, _, _, info = native.step(actions)
        key, state, shown, brought = act(key, state, actions[1].astype(np.int32))
        np.testing.assert_allclose(obs[1], shown["obs"], atol=1e-5)
        np.testing.assert_allclose(info["state"][1], shown["state"], atol=1e-5)
        np.testing.assert_array_equal(info["action_mask"][1], shown["mask"])
        np.testing.assert_allclose(reward[1], brought["reward"], atol=1e-6)


def test_native_state_is_restored_exactly(native: Any) -> None:
    _, info = native.reset(1)
    rng = np.random.default_rng(0)
    for _ in range(5):
        *_, info = native.step(draw(rng, info["action_mask"]))
    saved = native.state_dict()
    runs = []
    for _ in range(2):
        obs, info = native.load_state_dict(saved)
        rng, seen = np.random.default_rng(1), [obs]
        for _ in range(20):  # over an end
            obs, *_, info = native.step(draw(rng, info["action_mask"]))
            seen.append(obs)
        runs.append(np.stack(seen))
    np.testing.assert_array_equal(*runs)
    assert native._act_all._cache_size() == 1  # compiled once, before and after


def test_importing_says_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("jax")
    for name in [name for name in sys.modules if name.startswith("jaxmarl")]:
        del sys.modules[name]
    streams = sys.stdout, sys.stderr
    smax.Battle("smax/3m", {})
    assert (sys.stdout, sys.stderr) == streams
    assert capfd.readouterr().out == ""


def test_wrong_options_and_names_are_told() -> None:
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

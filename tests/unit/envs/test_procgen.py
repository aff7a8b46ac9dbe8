from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from zhixing.envs import make_vector
from zhixing.envs.adapters import procgen_envs
from zhixing.envs.adapters.procgen_envs import NATIVE, envpool_settings, make_pool
from zhixing.envs.registry import find_adapter
from zhixing.envs.vector.resumable_pool import ResumablePool
from zhixing.errors import UserError
from zhixing.utils.extras import install_hint

BIGFISH = "procgen/bigfish"


class FakeEnvPool:
    """Replaces EnvPool. Each environment samples its levels from its seed, and level n ends after n steps.
    Observations encode the level and the sum of its actions. Results arrive in random order."""

    def __init__(self, name: str, num_envs: int, seed: list[int], channel_first: bool, **settings: Any) -> None:
        self.level_rngs = [np.random.default_rng(env_seed) for env_seed in seed]
        self.level, self.steps, self.sums = (np.zeros(num_envs, int) for _ in range(3))
        self.order_rng = np.random.default_rng(0)
        self.sent_rows: Any = None

    def _observe(self, rows: Any) -> Any:
        obs = np.zeros((len(rows), 64, 64, 3), np.uint8)
        obs[..., 0], obs[..., 1] = self.level[rows, None, None], self.sums[rows, None, None]
        obs[..., 2] = np.add.outer(np.arange(64), 2 * np.arange(64))  # encodes the pixel's position
        return obs

    def reset(self, rows: Any) -> tuple[Any, dict[str, Any]]:
        rows = self.order_rng.permutation(rows)
        for row in rows:
            self.level[row], self.steps[row], self.sums[row] = self.level_rngs[row].integers(3, 9), 0, 0
        return self._observe(rows), {"env_id": rows}

    def send(self, actions: Any, rows: Any) -> None:
        self.steps[rows] += 1
        self.sums[rows] += actions
        self.sent_rows = self.order_rng.permutation(rows)

    def recv(self) -> tuple[Any, ...]:
        rows = self.sent_rows
        ended = self.steps[rows] >= self.level[rows]
        truncated = ended & (self.level[rows] == 8)  # the longest level
        return self._observe(rows), self.sums[rows].astype(float), ended & ~truncated, truncated, {"env_id": rows}

    def step(self, actions: Any, rows: Any) -> tuple[Any, ...]:
        self.send(actions, rows)
        return self.recv()

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def fake_envpool(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("envpool")
    module.make_gymnasium = FakeEnvPool  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "envpool", module)


@pytest.mark.usefixtures("fake_envpool")
def test_ended_envs_are_reset_in_the_same_step_and_keep_their_final_obs() -> None:
    env = make_vector(BIGFISH, 4, "native")
    obs, info = env.reset(seed=0)
    assert (obs.shape, obs.dtype, info) == ((4, 64, 64, 3), np.uint8, {})
    rng = np.random.default_rng(0)
    levels, sums, steps = obs[:, 0, 0, 0].copy(), np.zeros(4, int), np.zeros(4, int)
    num_ends = num_truncated = 0
    for _ in range(60):
        actions = rng.integers(0, 15, 4)
        obs, reward, terminated, truncated, info = env.step(actions)
        sums += actions
        steps += 1
        assert (reward.tolist(), reward.dtype) == (sums.tolist(), np.float32)
        ended = steps >= levels
        assert ((terminated | truncated) == ended).all()
        assert (truncated == (ended & (levels == 8))).all()
        assert sorted(info.get("final_info", {})) == np.flatnonzero(ended).tolist()
        if ended.any():
            np.testing.assert_array_equal(info["final_obs"][:, 5, 5, :2], np.stack([levels, sums], 1))
        num_ends, num_truncated = num_ends + int(ended.sum()), num_truncated + int(truncated.sum())
        steps[ended], sums[ended] = 0, 0
        levels[ended] = obs[ended, 0, 0, 0]
        np.testing.assert_array_equal(obs[:, 5, 5, :2], np.stack([levels, sums], 1))
    assert num_ends > 30
    assert num_truncated > 3


@pytest.mark.usefixtures("fake_envpool")
@pytest.mark.parametrize("options", [{}, {"shift": 3}, {"action_repeat": 2}])
@pytest.mark.parametrize("backend", ["native", "serial"])
def test_state_is_restored_by_regenerating_levels_and_replaying_actions(backend: str, options: dict[str, int]) -> None:
    first, second = (make_vector(BIGFISH, 3, backend, options=options) for _ in range(2))
    rng = np.random.default_rng(0)
    first.reset(seed=4)
    second.reset(seed=5)
    for _ in range(41):
        obs = first.step(rng.integers(0, 15, 3))[0]
    restored_obs, _ = second.load_state_dict(first.state_dict())
    np.testing.assert_array_equal(restored_obs, obs)
    assert second.inexact == []
    for _ in range(30):
        actions = rng.integers(0, 15, 3)
        for expected, actual in zip(first.step(actions)[:4], second.step(actions)[:4], strict=True):
            np.testing.assert_array_equal(actual, expected)


@pytest.mark.usefixtures("fake_envpool")
@pytest.mark.parametrize("backend", ["native", "serial"])
def test_action_is_repeated_until_the_end_of_the_episode(backend: str) -> None:
    env = make_vector(BIGFISH, 4, backend, options={"action_repeat": 4})
    obs, _ = env.reset(seed=0)
    levels, steps, num_short = obs[:, 0, 0, 0].copy(), np.zeros(4, int), 0
    for _ in range(40):
        obs, reward, terminated, truncated, info = env.step(np.full(4, 2))
        repeats = np.minimum(levels - steps, 4)  # step k of a level earns 2 k
        expected = [sum(2 * k for k in range(step + 1, step + n + 1)) for step, n in zip(steps, repeats, strict=True)]
        assert reward.tolist() == expected
        steps += repeats
        ended = steps == levels
        assert ((terminated | truncated) == ended).all()
        num_short += int((repeats < 4).sum())
        if ended.any():
            np.testing.assert_array_equal(info["final_obs"][ended, 5, 5, 1], 2 * levels[ended])
        steps[ended] = 0
        levels[ended] = obs[ended, 0, 0, 0]
    assert num_short > 10


@pytest.mark.usefixtures("fake_envpool")
@pytest.mark.parametrize("backend", ["native", "serial"])
def test_observations_are_shifted_randomly_at_every_step(backend: str) -> None:
    env = make_vector(BIGFISH, 2, backend, options={"shift": 3}, render_mode="rgb_array")
    obs, _ = env.reset(seed=0)
    rows = np.arange(64)
    shifts = set()
    for _ in range(200):
        for image in obs[..., 2]:
            # the width of the repeated border is the shift
            down, right = int(np.argmax(np.diff(image[:, 32]) != 0)), int(np.argmax(np.diff(image[32]) != 0))
            down = -down if down else int(np.argmax(np.diff(image[::-1, 32]) != 0))
            right = -right if right else int(np.argmax(np.diff(image[32, ::-1]) != 0))
            expected = np.add.outer(np.clip(rows + down, 0, 63), 2 * np.clip(rows + right, 0, 63))
            np.testing.assert_array_equal(image, expected)
            shifts.add((down, right))
        obs = env.step(np.array([1, 2]))[0]
    assert shifts == {(down, right) for down in range(-3, 4) for right in range(-3, 4)}
    image = env.render(0)  # not shifted
    assert image is not None
    assert image[0, 0, 2] == 0
    assert image[-1, -1, 2] == 3 * 63


@pytest.mark.usefixtures("fake_envpool")
@pytest.mark.parametrize("backend", ["native", "serial"])
def test_envs_that_differ_from_the_saved_obs_start_a_new_episode(backend: str) -> None:
    env = make_vector(BIGFISH, 3, backend)
    env.reset(seed=0)
    env.step(np.array([1, 2, 3]))
    state = env.state_dict()
    saved_obs = state["env_state"]["obs"][1] if backend == "native" else state["envs"][1]["env_state"]["obs"][0]
    saved_obs[0] = 77
    obs, _ = env.load_state_dict(state)
    assert env.inexact == [1]
    assert obs[:, 0, 0, 1].tolist() == [1, 0, 3]


@pytest.mark.usefixtures("fake_envpool")
def test_single_env_repeats_the_levels_of_a_seed() -> None:
    env = procgen_envs.make(BIGFISH, {"render_mode": "rgb_array"})
    levels = []
    for seed in (3, 3, None, None):
        obs, _ = env.reset(seed=seed)
        levels.append(int(obs[0, 0, 0]))
        assert not env.step(2)[2]
    assert levels[0] == levels[1]
    assert env.pool.episodes.tolist() == [3]
    assert env.render().shape == (384, 384, 3)
    env.close()
    assert env.pool.env is None


def test_train_and_test_levels_are_disjoint() -> None:
    assert envpool_settings(BIGFISH)[0] == "BigfishEasy-v0"
    ranges = {}
    for mode in ("easy", "hard"):
        for levels in ("train", "test", "all"):
            envpool_name, settings = envpool_settings(BIGFISH, mode=mode, levels=levels)
            assert envpool_name == f"Bigfish{mode.capitalize()}-v0"
            ranges[mode, levels] = (settings["start_level"], settings["num_levels"])
    assert ranges["easy", "train"] == (0, 200)
    assert ranges["easy", "test"] == (200, 10**9)
    assert ranges["hard", "train"] == (0, 500)
    assert ranges["hard", "test"] == (500, 10**9)
    assert ranges["easy", "all"] == ranges["hard", "all"] == (0, 0)
    settings = envpool_settings(BIGFISH, levels="test", num_levels=50)[1]
    assert (settings["start_level"], settings["num_levels"]) == (200, 50)
    assert envpool_settings(BIGFISH, use_backgrounds=False)[1]["use_backgrounds"] is False


@pytest.mark.usefixtures("fake_envpool")
def test_invalid_options_are_rejected() -> None:
    def error_of(name: str, **options: Any) -> str:
        with pytest.raises(UserError) as caught:
            procgen_envs.make(name, options)
        return str(caught.value)

    assert error_of(BIGFISH, mode="memory") == "procgen/bigfish: env.mode='memory': allowed are easy, hard"
    assert "allowed are easy, hard, memory, exploration" in error_of("procgen/maze", mode="extreme")
    assert error_of(BIGFISH, shift=-1) == "procgen/bigfish: env.shift=-1: must be from 0 to 32 pixels"
    assert error_of(BIGFISH, levels="unseen") == "procgen/bigfish: env.levels='unseen': allowed are train, test, all"
    assert "must be 0 or more, with a sum below 2^31" in error_of(BIGFISH, start_level=2**31)
    assert "has no option 'level', allowed: mode, levels, " in error_of(BIGFISH, level=3)
    assert NATIVE[BIGFISH].options >= {"mode", "levels", "start_level", "num_levels", "render_mode"}


def test_missing_package_and_missing_library_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_adapter(BIGFISH) is procgen_envs
    assert procgen_envs.supports("procgen/starpilot")
    assert not procgen_envs.supports("procgen/starfish")
    monkeypatch.setitem(sys.modules, "envpool", None)
    for create in (lambda: procgen_envs.make(BIGFISH, {}), lambda: NATIVE[BIGFISH](2)):
        with pytest.raises(UserError) as caught:
            create()
        assert str(caught.value) == f"procgen/bigfish needs the extra 'procgen': {install_hint('procgen')}"

    def without_qt(*_: Any, **__: Any) -> None:
        raise ImportError("EnvPool Procgen requires the system Qt 5 runtime")

    module = ModuleType("envpool")
    module.make_gymnasium = without_qt  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "envpool", module)
    with pytest.raises(UserError, match="needs the Qt 5 libraries: apt-get install libqt5core5a libqt5gui5"):
        make_vector(BIGFISH, 2, "native").reset(seed=0)


# --- with envpool ---


def start_pool(name: str, num: int, **options: Any) -> ResumablePool:
    pytest.importorskip("envpool")
    pool = make_pool(name, num, options)
    try:
        pool.start(np.arange(num))
    except UserError as error:
        pytest.skip(str(error))
    return pool


def test_games_and_modes_are_those_of_envpool() -> None:
    envpool = pytest.importorskip("envpool")
    envpool_names = set(envpool.list_all_envs())
    for game in procgen_envs.GAMES:
        for mode in procgen_envs.NUM_TRAIN_LEVELS:
            exists = f"{game.capitalize()}{mode.capitalize()}-v0" in envpool_names
            assert exists == (game in procgen_envs.EXTRA_MODES.get(mode, procgen_envs.GAMES)), (game, mode)


def test_levels_are_in_the_requested_range() -> None:
    for levels, low, high in (("train", 0, 200), ("test", 200, 200 + 10**9)):
        pool = start_pool(BIGFISH, 2, levels=levels)
        seeds = [pool.env.reset(np.arange(2, dtype=np.int32))[1]["level_seed"] for _ in range(40)]
        assert low <= np.min(seeds) < np.max(seeds) < high
        assert (np.max(seeds) > 1000) == (levels == "test")


def test_manual_reset_equals_envpools_autoreset() -> None:
    """The adapter relies on this: EnvPool returns the final observation and resets in the next step."""
    pool, reference = start_pool(BIGFISH, 1), start_pool(BIGFISH, 1)
    action = np.array([4])
    while True:
        step, reference_step = pool.step_without_reset(action), reference.env.step(action)
        np.testing.assert_array_equal(step[0], reference_step[0])
        if step[2][0] or step[3][0]:
            break
    obs, reward, _, _, info = reference.env.step(action)
    np.testing.assert_array_equal(pool.start_episodes(np.arange(1)), obs)
    assert (reward[0], info["elapsed_step"][0]) == (0.0, 0)


@pytest.mark.parametrize(("game", "backend"), [("bigfish", "native"), ("dodgeball", "native"), ("bigfish", "serial")])
def test_state_is_restored_exactly(game: str, backend: str) -> None:
    start_pool(f"procgen/{game}", 1).close()
    first, second = (make_vector(f"procgen/{game}", 3, backend) for _ in range(2))
    rng = np.random.default_rng(0)
    first.reset(seed=1)
    num_ends = 0
    for _ in range(200):
        _, _, terminated, truncated, _ = first.step(rng.integers(0, 15, 3))
        num_ends += int((terminated | truncated).sum())
    assert num_ends >= 2
    second.load_state_dict(first.state_dict())
    assert second.inexact == []
    for _ in range(150):
        actions = rng.integers(0, 15, 3)
        for expected, actual in zip(first.step(actions)[:4], second.step(actions)[:4], strict=True):
            assert actual.tobytes() == expected.tobytes()
    first.close()
    second.close()

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from zhixing.envs import make_vector
from zhixing.envs.adapters import procgen_envs
from zhixing.envs.adapters.procgen_envs import NATIVE, settings
from zhixing.envs.adapters.procgen_envs import pool as make_pool
from zhixing.envs.registry import find_adapter
from zhixing.envs.vector.resumable_pool import ResumablePool
from zhixing.errors import UserError
from zhixing.utils.extras import install_hint

BIGFISH = "procgen/bigfish"


class Dealing:
    """EnvPool in small: each environment draws its levels from its own seed, a level ends after as many steps as its
    number says, and pictures show the level and the sum of actions in it. Answers come in any order."""

    def __init__(self, task: str, num_envs: int, seed: list[int], channel_first: bool, **settings: Any) -> None:
        self.task, self.settings, self.num = task, settings, num_envs
        self.rngs = [np.random.default_rng(own) for own in seed]
        self.level, self.steps, self.sums = (np.zeros(num_envs, int) for _ in range(3))
        self.shuffled = np.random.default_rng(0)
        self.sent: Any = None

    def _show(self, rows: Any) -> Any:
        obs = np.zeros((len(rows), 64, 64, 3), np.uint8)
        obs[..., 0], obs[..., 1] = self.level[rows, None, None], self.sums[rows, None, None]
        obs[..., 2] = np.add.outer(np.arange(64), 2 * np.arange(64))  # tells where a pixel comes from
        return obs

    def reset(self, rows: Any) -> tuple[Any, dict[str, Any]]:
        rows = self.shuffled.permutation(rows)
        for row in rows:
            self.level[row], self.steps[row], self.sums[row] = self.rngs[row].integers(3, 9), 0, 0
        return self._show(rows), {"env_id": rows}

    def send(self, actions: Any, rows: Any) -> None:
        self.steps[rows] += 1
        self.sums[rows] += actions
        self.sent = self.shuffled.permutation(rows)

    def recv(self) -> tuple[Any, ...]:
        rows = self.sent
        over = self.steps[rows] >= self.level[rows]
        late = over & (self.level[rows] == 8)  # the longest are cut off
        return self._show(rows), self.sums[rows].astype(float), over & ~late, late, {"env_id": rows}

    def step(self, actions: Any, rows: Any) -> tuple[Any, ...]:
        self.send(actions, rows)
        return self.recv()

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def dealing(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("envpool")
    module.make_gymnasium = Dealing  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "envpool", module)


@pytest.mark.usefixtures("dealing")
def test_ended_rows_begin_anew_in_the_same_step_and_keep_their_last_picture() -> None:
    env = make_vector(BIGFISH, 4, "native")
    obs, info = env.reset(seed=0)
    assert (obs.shape, obs.dtype, info) == ((4, 64, 64, 3), np.uint8, {})
    rng = np.random.default_rng(0)
    levels, sums, steps = obs[:, 0, 0, 0].copy(), np.zeros(4, int), np.zeros(4, int)
    ends = cuts = 0
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
        ends, cuts = ends + int(ended.sum()), cuts + int(truncated.sum())
        steps[ended], sums[ended] = 0, 0
        levels[ended] = obs[ended, 0, 0, 0]
        np.testing.assert_array_equal(obs[:, 5, 5, :2], np.stack([levels, sums], 1))
    assert ends > 30
    assert cuts > 3


@pytest.mark.usefixtures("dealing")
@pytest.mark.parametrize("options", [{}, {"shift": 3}, {"skip": 2}])
@pytest.mark.parametrize("backend", ["native", "serial"])
def test_levels_are_dealt_again_and_actions_repeated(backend: str, options: dict[str, int]) -> None:
    first, second = (make_vector(BIGFISH, 3, backend, options=options) for _ in range(2))
    rng = np.random.default_rng(0)
    first.reset(seed=4)
    second.reset(seed=5)
    for _ in range(41):
        obs = first.step(rng.integers(0, 15, 3))[0]
    seen, _ = second.load_state_dict(first.state_dict())
    np.testing.assert_array_equal(seen, obs)
    assert second.inexact == []
    for _ in range(30):
        actions = rng.integers(0, 15, 3)
        for mine, its in zip(first.step(actions)[:4], second.step(actions)[:4], strict=True):
            np.testing.assert_array_equal(mine, its)


@pytest.mark.usefixtures("dealing")
@pytest.mark.parametrize("backend", ["native", "serial"])
def test_an_action_is_done_several_times_or_until_the_end(backend: str) -> None:
    env = make_vector(BIGFISH, 4, backend, options={"skip": 4})
    obs, _ = env.reset(seed=0)
    levels, steps, short = obs[:, 0, 0, 0].copy(), np.zeros(4, int), 0
    for _ in range(40):
        obs, reward, terminated, truncated, info = env.step(np.full(4, 2))
        done = np.minimum(levels - steps, 4)  # of the game's steps, which earn 2, 4, 6 and so on within a level
        wanted = [sum(2 * k for k in range(step + 1, step + n + 1)) for step, n in zip(steps, done, strict=True)]
        assert reward.tolist() == wanted
        steps += done
        ended = steps == levels
        assert ((terminated | truncated) == ended).all()
        short += int((done < 4).sum())
        if ended.any():
            np.testing.assert_array_equal(info["final_obs"][ended, 5, 5, 1], 2 * levels[ended])
        steps[ended] = 0
        levels[ended] = obs[ended, 0, 0, 0]
    assert short > 10


@pytest.mark.usefixtures("dealing")
@pytest.mark.parametrize("backend", ["native", "serial"])
def test_pictures_are_moved_by_chance_at_every_step(backend: str) -> None:
    env = make_vector(BIGFISH, 2, backend, options={"shift": 3}, render_mode="rgb_array")
    obs, _ = env.reset(seed=0)
    rows = np.arange(64)
    seen = set()
    for _ in range(200):
        for picture in obs[..., 2]:
            # a border that repeats tells how far the picture was moved
            down, right = int(np.argmax(np.diff(picture[:, 32]) != 0)), int(np.argmax(np.diff(picture[32]) != 0))
            down = -down if down else int(np.argmax(np.diff(picture[::-1, 32]) != 0))
            right = -right if right else int(np.argmax(np.diff(picture[32, ::-1]) != 0))
            wanted = np.add.outer(np.clip(rows + down, 0, 63), 2 * np.clip(rows + right, 0, 63))
            np.testing.assert_array_equal(picture, wanted)
            seen.add((down, right))
        obs = env.step(np.array([1, 2]))[0]
    assert seen == {(down, right) for down in range(-3, 4) for right in range(-3, 4)}
    frame = env.render(0)  # a picture for people stays where it is
    assert frame is not None
    assert frame[0, 0, 2] == 0
    assert frame[-1, -1, 2] == 3 * 63


@pytest.mark.usefixtures("dealing")
@pytest.mark.parametrize(("backend", "lost"), [("native", [1]), ("serial", [1])])
def test_games_that_show_something_else_begin_anew(backend: str, lost: list[int]) -> None:
    env = make_vector(BIGFISH, 3, backend)
    env.reset(seed=0)
    env.step(np.array([1, 2, 3]))
    state = env.state_dict()
    resumable_pool = [state["env_state"]] if backend == "native" else [own["env_state"] for own in state["envs"]]
    (resumable_pool[0]["obs"][1] if backend == "native" else resumable_pool[1]["obs"][0])[0] = 77
    obs, _ = env.load_state_dict(state)
    assert env.inexact == lost
    assert obs[:, 0, 0, 1].tolist() == [1, 0, 3]


@pytest.mark.usefixtures("dealing")
def test_one_copy_and_its_seeds() -> None:
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


def test_levels_to_train_and_to_test_on_are_apart() -> None:
    assert settings(BIGFISH)[0] == "BigfishEasy-v0"
    numbers = {}
    for mode in ("easy", "hard"):
        for levels in ("train", "test", "all"):
            task, chosen = settings(BIGFISH, mode=mode, levels=levels)
            assert task == f"Bigfish{mode.capitalize()}-v0"
            numbers[mode, levels] = (chosen["start_level"], chosen["num_levels"])
    assert numbers["easy", "train"] == (0, 200)
    assert numbers["easy", "test"] == (200, 10**9)
    assert numbers["hard", "train"] == (0, 500)
    assert numbers["hard", "test"] == (500, 10**9)
    assert numbers["easy", "all"] == numbers["hard", "all"] == (0, 0)
    chosen = settings(BIGFISH, levels="test", num_levels=50)[1]
    assert (chosen["start_level"], chosen["num_levels"]) == (200, 50)
    assert settings(BIGFISH, use_backgrounds=False)[1]["use_backgrounds"] is False


@pytest.mark.usefixtures("dealing")
def test_wrong_options_are_told() -> None:
    def refusal(name: str, **options: Any) -> str:
        with pytest.raises(UserError) as caught:
            procgen_envs.make(name, options)
        return str(caught.value)

    assert refusal(BIGFISH, mode="memory") == "procgen/bigfish: mode='memory' is none of easy, hard"
    assert "none of easy, hard, memory, exploration" in refusal("procgen/maze", mode="extreme")
    assert refusal(BIGFISH, skip=0) == "procgen/bigfish: skip=0 must be at least 1"
    assert refusal(BIGFISH, shift=-1) == "procgen/bigfish: shift=-1 must be 0 to 32 pixels"
    assert refusal(BIGFISH, levels="unseen") == "procgen/bigfish: levels='unseen' is none of train, test, all"
    assert "must be 0 or more, together below 2^31" in refusal(BIGFISH, start_level=2**31)
    assert "has no option 'level', allowed: mode, levels, " in refusal(BIGFISH, level=3)
    assert NATIVE[BIGFISH].options >= {"mode", "levels", "start_level", "num_levels", "render_mode"}


def test_missing_package_and_missing_library_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
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
    with pytest.raises(UserError, match="needs libraries of Qt 5: apt-get install libqt5core5a libqt5gui5"):
        make_vector(BIGFISH, 2, "native").reset(seed=0)


# ------------------------------------------------------------------------------------ the games themselves


def pool_of(name: str, num: int, **options: Any) -> ResumablePool:
    pytest.importorskip("envpool")
    pool = make_pool(name, num, options)
    try:
        pool.start(np.arange(num))
    except UserError as error:
        pytest.skip(str(error))
    return pool


def test_every_game_is_there() -> None:
    envpool = pytest.importorskip("envpool")
    known = set(envpool.list_all_envs())
    for game in procgen_envs.GAMES:
        for mode in procgen_envs.MODES:
            there = f"{game.capitalize()}{mode.capitalize()}-v0" in known
            assert there == (game in procgen_envs.FURTHER.get(mode, procgen_envs.GAMES)), (game, mode)


def test_levels_are_those_asked_for() -> None:
    for levels, low, high in (("train", 0, 200), ("test", 200, 200 + 10**9)):
        pool = pool_of(BIGFISH, 2, levels=levels)
        seen = [pool.env.reset(np.arange(2, dtype=np.int32))[1]["level_seed"] for _ in range(40)]
        assert low <= np.min(seen) < np.max(seen) < high
        assert (np.max(seen) > 1000) == (levels == "test")


def test_envpool_would_reset_a_step_later() -> None:
    """What this adapter rests on: the step of an end shows its last picture, and resets by hand take its turn."""
    own, others = pool_of(BIGFISH, 1), pool_of(BIGFISH, 1)
    action = np.array([4])
    while True:
        mine, its = own.step_without_reset(action), others.env.step(action)
        np.testing.assert_array_equal(mine[0], its[0])
        if mine[2][0] or mine[3][0]:
            break
    later = others.env.step(action)
    np.testing.assert_array_equal(own.start_episodes(np.arange(1)), later[0])
    assert (later[1][0], later[4]["elapsed_step"][0]) == (0.0, 0)


@pytest.mark.parametrize(("game", "backend"), [("bigfish", "native"), ("dodgeball", "native"), ("bigfish", "serial")])
def test_exact_continuation_from_a_saved_state(game: str, backend: str) -> None:
    pool_of(f"procgen/{game}", 1).close()
    first, second = (make_vector(f"procgen/{game}", 3, backend) for _ in range(2))
    rng = np.random.default_rng(0)
    first.reset(seed=1)
    ends = 0
    for _ in range(200):
        _, _, terminated, truncated, _ = first.step(rng.integers(0, 15, 3))
        ends += int((terminated | truncated).sum())
    assert ends >= 2
    second.load_state_dict(first.state_dict())
    assert second.inexact == []
    for _ in range(150):
        actions = rng.integers(0, 15, 3)
        for mine, its in zip(first.step(actions)[:4], second.step(actions)[:4], strict=True):
            assert mine.tobytes() == its.tobytes()
    first.close()
    second.close()

"""The rules of Super Mario on memory made by hand, and the task on a console made of paper: needs no emulator."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from zhixing.envs import make, names, registry
from zhixing.envs.adapters import mario
from zhixing.envs.adapters.mario import nes_core, retro_core, rules, scenes, task
from zhixing.envs.adapters.mario.rules import Mark
from zhixing.envs.vector.serial import SerialVectorEnv
from zhixing.errors import UserError
from zhixing.utils.extras import install_hint

NORMAL = 8  # of STATE: Mario can be moved


def memory(**values: Any) -> np.ndarray:
    """Mario stands at the start of 1-1; `values` are bytes by the name of their address, or digits."""
    ram = np.zeros(2048, np.uint8)
    for name, value in {"STATE": NORMAL, "Y_SCREEN": 1, "LIVES": 2, "TIME": 400, "MODE": 1, **values}.items():
        where = getattr(rules, name)
        if isinstance(where, slice) and isinstance(value, int):
            value = [int(digit) for digit in str(value).zfill(where.stop - where.start)]
        ram[where] = value
    return ram


def test_info_by_hand() -> None:
    ram = memory(PAGE=2, X=200, Y=176, SCORE=1250, COINS=7, TIME=389, WORLD=3, STAGE=1, STATUS=1)
    told = {
        "coins": 7,
        "flag_get": False,
        "life": 2,
        "score": 1250,
        "stage": 2,
        "status": "tall",
        "time": 389,
        "world": 4,
        "x_pos": 712,  # 2 · 256 + 200
        "y_pos": 79,  # 255 - 176
    }
    assert rules.info_of(ram) == told
    assert rules.info_of(ram.tobytes()) == told
    assert tuple(told) == rules.NAMES
    assert rules.info_of(memory(Y=250, Y_SCREEN=0))["y_pos"] == 260  # above the screen: 255 + (255 - 250)
    assert [rules.info_of(memory(STATUS=n))["status"] for n in range(4)] == ["small", "tall", "fireball", "fireball"]
    assert rules.read(ram, {"power": 0x756, "page": 0x6D}) == {"power": 1, "page": 2}


@pytest.mark.parametrize(
    ("now", "before", "reward"),
    [
        ({"X": 43}, Mark(40, 400), 3.0),
        ({"X": 38}, Mark(40, 400), -2.0),
        ({"PAGE": 1, "X": 1}, Mark(255, 400), 2.0),
        ({"X": 45}, Mark(40, 400), 5.0),
        ({"X": 46}, Mark(40, 400), 0.0),  # so fast goes only who was put elsewhere
        ({"X": 34}, Mark(40, 400), 0.0),
        ({"X": 42, "TIME": 399}, Mark(40, 400), 1.0),
        ({"X": 42, "TIME": 401}, Mark(40, 400), 2.0),  # the clock is set: no gift
        ({"X": 42, "STATE": rules.DYING}, Mark(40, 400), -15.0),  # 2 - 25, bounded
        ({"X": 40, "STATE": rules.DEAD}, Mark(40, 400), -15.0),
        ({"X": 40, "Y_SCREEN": 2}, Mark(40, 400), -15.0),  # in a hole
        ({"X": 40, "TIME": 0}, Mark(40, 400), -15.0),
    ],
)
def test_reward_by_hand(now: dict[str, int], before: Mark, reward: float) -> None:
    assert rules.reward_of(memory(**now), before)[0] == reward


@pytest.mark.parametrize(
    ("now", "flag", "level_over", "game_over"),
    [
        ({}, False, False, False),
        ({"STATE": rules.DYING}, False, True, False),
        ({"STATE": rules.DEAD}, False, True, False),
        ({"Y_SCREEN": 2}, False, True, False),
        ({"FLOAT_STATE": 3}, False, False, False),  # a vine
        ({"FLOAT_STATE": 3, "ENEMIES": [0, 0, 0, 0, 0x31]}, True, True, False),
        ({"FLOAT_STATE": 3, "ENEMIES": [0x2D, 6, 6, 0, 0]}, True, True, False),
        ({"FLOAT_STATE": 1, "ENEMIES": [0, 0, 0, 0, 0x31]}, False, False, False),
        ({"MODE": 2}, True, True, False),
        ({"MODE": 2, "WORLD": 7}, True, True, True),  # the princess
        ({"LIVES": 255}, False, False, True),
        ({"LIVES": 0}, False, False, False),
    ],
)
def test_endings_by_hand(now: dict[str, Any], flag: bool, level_over: bool, game_over: bool) -> None:
    ram = memory(**now)
    assert (rules.flag(ram), rules.over(ram, (1, 1)), rules.over(ram, None)) == (flag, level_over, game_over)


def test_usual_shaping_by_hand() -> None:
    before = {"score": 100, "flag_get": False}
    shaped = [
        mario.usual_shaping(3.0, {"score": 100, "flag_get": False}, before, False),
        mario.usual_shaping(3.0, {"score": 300, "flag_get": False}, before, False),  # (3 + 200 / 40) / 10
        mario.usual_shaping(-15.0, {"score": 100, "flag_get": False}, before, True),  # (-15 - 50) / 10
        mario.usual_shaping(1.0, {"score": 100, "flag_get": True}, before, True),  # (1 + 50) / 10
        mario.usual_shaping(1.0, {"score": 100, "flag_get": True}, {"score": 100, "flag_get": True}, False),
    ]
    assert shaped == pytest.approx([0.3, 0.8, -6.5, 5.1, 0.1])


def test_stages_after_a_walk_into_a_pipe_lie_one_place_further() -> None:
    found = {world: [rules.area((world, stage)) for stage in range(1, 5)] for world in range(1, 9)}
    pipe, plain = [1, 3, 4, 5], [1, 2, 3, 4]
    assert found == {1: pipe, 2: pipe, 3: plain, 4: pipe, 5: plain, 6: plain, 7: pipe, 8: plain}


class PaperConsole:
    """A game as simple as can be: it begins at the third START, RIGHT walks 2 pixels, DOWN leads into a pipe (5 frames,
    then 300 pixels further), UP ends the world, LEFT kills, A is the flag. The clock ticks every 10 frames."""

    shape = (6, 8, 3)

    def __init__(self, _: Path) -> None:
        self.now = memory(TIME=0, STATE=0, MODE=0, LIVES=0)
        self.starts, self.frames, self.scene, self.pressed = 0, 0, 0, 0

    def advance(self, buttons: int) -> None:
        now, self.frames = self.now, self.frames + 1
        self.starts += buttons == scenes.START and self.pressed != scenes.START
        self.pressed = buttons
        if now[rules.MODE] == 0:
            if self.starts == 3:
                level = {"WORLD": now[rules.WORLD], "STAGE": now[rules.STAGE], "AREA": now[rules.AREA]}
                self.now = memory(X=40, AREA_TIMER=0, **level)
            return
        if self.frames % 10 == 0:
            self._set_time(rules.number(now, rules.TIME) - 1)
        self.scene -= self.scene > 0
        if now[rules.STATE] == rules.DEAD:
            now[rules.LIVES] = (int(now[rules.LIVES]) - 1) % 256
            now[rules.STATE], now[rules.X], now[rules.PAGE] = NORMAL, 40, 0
            self._set_time(400)
        elif self.scene == 1:
            now[rules.STATE] = NORMAL
            self._move(300)
            if now[rules.MODE] == 2:
                now[rules.MODE], self.scene = 1, 0
                now[rules.WORLD] += 1
                self._set_time(400)
        elif self.scene:
            assert now[rules.LEVEL_TIMER] == 0
        elif buttons == task.DOWN:
            now[rules.STATE], now[rules.LEVEL_TIMER], now[rules.AREA_TIMER], self.scene = 3, 9, 9, 5
        elif buttons == task.UP:
            now[rules.MODE], self.scene = 2, 20
        elif buttons == task.LEFT:
            now[rules.STATE] = rules.DYING
        elif buttons == task.A:
            now[rules.FLOAT_STATE], now[rules.ENEMIES.start] = 3, 0x31
        elif buttons & task.RIGHT:
            self._move(2)

    def _set_time(self, time: int) -> None:
        self.now[rules.TIME] = [int(digit) for digit in str(time).zfill(3)]

    def _move(self, way: int) -> None:
        self.now[rules.PAGE], self.now[rules.X] = divmod(rules.mark(self.now).x + way, 256)

    def ram(self) -> bytes:
        return self.now.tobytes()

    def poke(self, address: int, value: int) -> None:
        self.now[address] = value

    def picture(self) -> np.ndarray:
        return np.full(self.shape, self.now[rules.X], np.uint8)

    def begin_here(self) -> None:
        self.kept = (self.now.copy(), self.frames)

    def rewind(self) -> None:
        self.now, self.frames, self.scene, self.pressed = self.kept[0].copy(), self.kept[1], 0, 0

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def _paper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(task.CORES, "paper", PaperConsole)
    monkeypatch.setattr(task, "rom_path", lambda name, rom: Path(task.ROMS[rom]))


FRAMES = {"core": "paper", "actions": "complex", "skip": 1, "stack": 1, "size": None}
WALK, FLAG_JUMP, DIE, PIPE, CASTLE = 1, 5, 6, 10, 11  # of the complex actions


@pytest.mark.usefixtures("_paper")
def test_title_is_left_at_the_wanted_level() -> None:
    for name, level, place in (("mario/1-2", (1, 2), 3), ("mario/8-4", (8, 4), 4), ("mario", (1, 1), 1)):
        env: Any = make(name, **FRAMES)
        _, info = env.reset(seed=0)
        assert (info["world"], info["stage"], info["time"], info["x_pos"]) == (*level, 399, 40)
        assert env.unwrapped.console.now[rules.AREA] + 1 == place
        assert env.action_space.n == 12


@pytest.mark.usefixtures("_paper")
def test_a_walk_pays_and_death_ends_a_level() -> None:
    env = make("mario/1-1", **FRAMES, ram={"where": "0x86", "page": 0x6D})
    env.reset(seed=0)
    walked = [env.step(WALK) for _ in range(10)]
    assert sum(reward for _, reward, *_ in walked) == 10 * 2 - 1  # the clock ticked once
    assert walked[-1][4]["x_pos"] == walked[-1][4]["where"] == 60
    assert walked[-1][0].max() == 60
    _, reward, terminated, truncated, info = env.step(DIE)
    assert (reward, terminated, truncated, info["life"]) == (-15.0, True, False, 2)
    _, info = env.reset()
    assert info["x_pos"] == 40
    assert env.step(WALK)[1] == 2.0  # compared with the new start
    assert env.step(FLAG_JUMP)[2] is True


@pytest.mark.usefixtures("_paper")
def test_scenes_are_run_through() -> None:
    game = make("mario/1-1", **FRAMES)
    game.reset(seed=0)
    before = game.unwrapped.console.frames
    _, reward, terminated, _, info = game.step(PIPE)
    assert (reward, terminated, info["x_pos"]) == (0.0, False, 40)
    assert game.unwrapped.console.frames == before + 5  # this frame and four of the pipe
    assert game.unwrapped.console.now[rules.AREA_TIMER] == 1
    _, reward, _, _, info = game.step(WALK)
    assert (reward, info["x_pos"]) == (0.0, 342)  # the way through the pipe isn't paid, nor is this frame
    assert game.step(WALK)[1] == 2.0


@pytest.mark.usefixtures("_paper")
def test_the_whole_game_goes_on_after_worlds_and_deaths() -> None:
    env = make("mario", **FRAMES)
    env.reset(seed=0)
    _, _, terminated, _, info = env.step(CASTLE)
    assert (terminated, info["flag_get"], info["world"]) == (False, True, 1)
    assert env.step(WALK)[4]["world"] == 2
    lives = []
    for _ in range(3):
        _, reward, terminated, _, info = env.step(DIE)
        assert (reward, terminated) == (-15.0, False)
        lives.append(env.step(WALK)[4]["life"])
    assert lives == [1, 0, 255]
    assert env.step(WALK)[2] is True
    env.reset()
    env.unwrapped.console.poke(rules.WORLD, 7)
    assert env.step(CASTLE)[2] is True


@pytest.mark.usefixtures("_paper")
def test_a_scene_that_never_ends_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scenes, "LONGEST_SCENE", 8)
    env = make("mario", **FRAMES)
    env.reset(seed=0)
    monkeypatch.setattr(PaperConsole, "_set_time", lambda *_: None)
    console = env.unwrapped.console
    monkeypatch.setattr(console, "scene", 10**6)
    console.poke(rules.MODE, rules.WORLD_OVER)
    before = console.frames
    env.step(WALK)
    assert console.frames == before + 1 + 8 + 8


@pytest.mark.usefixtures("_paper")
def test_is_what_gymnasium_calls_an_environment_and_is_replayed() -> None:
    env = make("mario/1-1", core="paper", render_mode="rgb_array")
    assert env.observation_space.shape == (4, 84, 84)
    check_env(env, skip_render_check=True)
    assert env.metadata["render_fps"] == 15
    assert env.metadata["logged_info_keys"] == ("x_pos", "flag_get")
    assert env.render().shape == PaperConsole.shape
    assert make("mario/1-1", core="paper").render() is None
    console = env.unwrapped.console
    env.close()
    env.close()
    assert console.closed

    first, second = (SerialVectorEnv(lambda: make("mario/1-1", core="paper", sticky=0.2), 1) for _ in range(2))
    assert not first.slots.slots[0].has_state  # this console can't save; the wrappers say so, too
    first.reset(seed=0)
    for _ in range(5):
        first.step(np.array([1]))
    second.load_state_dict(first.state_dict())
    assert second.inexact == []


@pytest.mark.usefixtures("_paper")
def test_shaping_by_name() -> None:
    plain, usual, own = (
        make("mario/1-1", core="paper", shaping=shaping) for shaping in ("none", "usual", "test_pixels:doubled")
    )
    for env in (plain, usual, own):
        env.reset(seed=0)
    assert plain.step(WALK)[1] == 8.0
    assert usual.step(WALK)[1] == pytest.approx(0.8)
    assert own.step(WALK)[1] == 16.0  # and the clock as it was


def test_names() -> None:
    known = mario.names()
    assert len(known) == 33
    assert {"mario", "mario/1-1", "mario/8-4"} <= set(known) <= set(names())
    assert all(mario.knows(name) and registry.adapter(name) is mario for name in known)
    assert not any(mario.knows(name) for name in ("mario/", "mario/9-1", "mario/1-5", "mario/1-1-1", "mariokart"))
    with pytest.raises(UserError, match="unknown environment 'mario/9-1': did you mean 'mario/"):
        make("mario/9-1")
    with pytest.raises(UserError, match="unknown environment 'mariokart'"):
        make("mariokart")


@pytest.mark.usefixtures("_paper")
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rom": "big"}, "mario/1-1: env.rom='big': allowed are standard, downsample, pixel, rectangle"),
        ({"actions": "many"}, "env.actions='many': allowed are right, simple, complex, all"),
        ({"core": "snes"}, "env.core='snes': allowed are retro, nes"),
        ({"shaping": "much"}, "env.shaping='much': allowed are none, usual and my.module:function"),
        ({"ram": 7}, r"env.ram=7: must name addresses, such as \{power: 0x756\}"),
        ({"ram": {"power": 2048}}, "env.ram.power=2048: must be an address from 0 to 0x7ff"),
        ({"ram": {"power": "here"}}, "env.ram.power='here': must be an address"),
        ({"ram": {"time": 3}}, "env.ram.time: info has a time already"),
        ({"core": "paper", "pool": "mean"}, "env.pool='mean'"),
        ({"stak": 4}, "mario/1-1 has no option 'stak', allowed: rom, .*; did you mean 'stack'?"),
    ],
)
def test_wrong_options_are_told(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        make("mario/1-1", **options)


@pytest.mark.parametrize("core", ["retro", "nes"])
def test_missing_package_names_the_extra(core: str, monkeypatch: pytest.MonkeyPatch) -> None:
    words = re.escape(f"mario/1-1 needs the extra 'mario': {install_hint('mario')}")
    with monkeypatch.context() as patch:
        patch.setattr(task, "find_spec", lambda name: None)
        with pytest.raises(UserError, match=words):
            make("mario/1-1", core=core)
    monkeypatch.setattr(task, "rom_path", lambda name, rom: Path(task.ROMS[rom]))
    for package in ("stable_retro", "nes_py"):
        monkeypatch.setitem(__import__("sys").modules, package, None)
    with pytest.raises(UserError, match=words):
        make("mario/1-1", core=core)


def test_bits_of_buttons_reach_the_fast_core_in_its_order() -> None:
    # B, none, select, start, up, down, left, right, A
    assert retro_core.MASKS[task.RIGHT | task.A].tolist() == [0, 0, 0, 0, 0, 0, 0, 1, 1]
    assert retro_core.MASKS[task.LEFT | task.B | task.UP].tolist() == [1, 0, 0, 0, 1, 0, 1, 0, 0]
    assert retro_core.MASKS[scenes.START | 0b100 | task.DOWN].tolist() == [0, 0, 1, 1, 0, 1, 0, 0, 0]


def test_sizes_in_a_header_are_counted_without_overflow() -> None:
    class Rom:
        raw_data = np.array([0x4E, 0x45, 0x53, 0x1A, 16, *[0] * 11], np.uint8)

        @property
        def size(self) -> int:
            return 16 * self.header[4]

    module = type("module", (), {"ROM": Rom})
    nes_core._count_in_ints(module)
    nes_core._count_in_ints(module)
    assert module.ROM().size == 256
    assert module.ROM.__mro__.count(nes_core._Sizes) == 1

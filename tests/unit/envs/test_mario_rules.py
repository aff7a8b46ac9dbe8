"""The rules of Super Mario on hand-made memory, and the environment on a fake console. No emulator needed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from zhixing.envs import make, names, registry
from zhixing.envs.adapters import mario
from zhixing.envs.adapters.mario import cutscenes, nes_core, retro_core, rules
from zhixing.envs.adapters.mario import env as mario_env
from zhixing.envs.adapters.mario.rules import Progress
from zhixing.envs.vector.serial import SerialVectorEnv
from zhixing.errors import UserError
from zhixing.utils.extras import install_hint

NORMAL = 8  # STATE: the player controls Mario


def make_ram(**values: Any) -> np.ndarray:
    """Return the RAM of Mario at the start of 1-1, with `values` (bytes or numbers) at addresses named in `rules`."""
    ram = np.zeros(2048, np.uint8)
    for name, value in {"STATE": NORMAL, "Y_SCREEN": 1, "LIVES": 2, "TIME": 400, "MODE": 1, **values}.items():
        address = getattr(rules, name)
        if isinstance(address, slice) and isinstance(value, int):
            value = [int(digit) for digit in str(value).zfill(address.stop - address.start)]
        ram[address] = value
    return ram


def test_info_matches_hand_computed_values() -> None:
    ram = make_ram(PAGE=2, X=200, Y=176, SCORE=1250, COINS=7, TIME=389, WORLD=3, STAGE=1, STATUS=1)
    expected = {
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
    assert rules.read_info(ram) == expected
    assert rules.read_info(ram.tobytes()) == expected
    assert tuple(expected) == rules.INFO_KEYS
    assert rules.read_info(make_ram(Y=250, Y_SCREEN=0))["y_pos"] == 260  # above the screen: 255 + (255 - 250)
    assert [rules.read_info(make_ram(STATUS=n))["status"] for n in range(4)] == [
        "small",
        "tall",
        "fireball",
        "fireball",
    ]
    assert rules.read_bytes(ram, {"power": 0x756, "page": 0x6D}) == {"power": 1, "page": 2}


@pytest.mark.parametrize(
    ("now", "before", "reward"),
    [
        ({"X": 43}, Progress(40, 400), 3.0),
        ({"X": 38}, Progress(40, 400), -2.0),
        ({"PAGE": 1, "X": 1}, Progress(255, 400), 2.0),
        ({"X": 45}, Progress(40, 400), 5.0),
        ({"X": 46}, Progress(40, 400), 0.0),  # faster than Mario runs: a teleport
        ({"X": 34}, Progress(40, 400), 0.0),
        ({"X": 42, "TIME": 399}, Progress(40, 400), 1.0),
        ({"X": 42, "TIME": 401}, Progress(40, 400), 2.0),  # the clock was set forward: no reward
        ({"X": 42, "STATE": rules.DYING}, Progress(40, 400), -15.0),  # 2 - 25, clipped
        ({"X": 40, "STATE": rules.DEAD}, Progress(40, 400), -15.0),
        ({"X": 40, "Y_SCREEN": 2}, Progress(40, 400), -15.0),  # in a hole
        ({"X": 40, "TIME": 0}, Progress(40, 400), -15.0),
    ],
)
def test_reward_matches_hand_computed_values(now: dict[str, int], before: Progress, reward: float) -> None:
    assert rules.compute_reward(make_ram(**now), before)[0] == reward


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
def test_termination_matches_hand_computed_values(
    now: dict[str, Any], flag: bool, level_over: bool, game_over: bool
) -> None:
    ram = make_ram(**now)
    assert (rules.has_reached_flag(ram), rules.is_terminated(ram, (1, 1)), rules.is_terminated(ram, None)) == (
        flag,
        level_over,
        game_over,
    )


def test_score_shaping_matches_hand_computed_values() -> None:
    previous = {"score": 100, "flag_get": False}
    shaped = [
        mario.score_shaping(3.0, {"score": 100, "flag_get": False}, previous, False),
        mario.score_shaping(3.0, {"score": 300, "flag_get": False}, previous, False),  # (3 + 200 / 40) / 10
        mario.score_shaping(-15.0, {"score": 100, "flag_get": False}, previous, True),  # (-15 - 50) / 10
        mario.score_shaping(1.0, {"score": 100, "flag_get": True}, previous, True),  # (1 + 50) / 10
        mario.score_shaping(1.0, {"score": 100, "flag_get": True}, {"score": 100, "flag_get": True}, False),
    ]
    assert shaped == pytest.approx([0.3, 0.8, -6.5, 5.1, 0.1])


def test_area_numbers_count_walks_into_a_pipe() -> None:
    areas = {world: [rules.area_number((world, stage)) for stage in range(1, 5)] for world in range(1, 9)}
    pipe, plain = [1, 3, 4, 5], [1, 2, 3, 4]
    assert areas == {1: pipe, 2: pipe, 3: plain, 4: pipe, 5: plain, 6: plain, 7: pipe, 8: plain}


class FakeConsole:
    """A minimal game. It starts at the third START. RIGHT walks 2 pixels, DOWN enters a pipe (5 frames, 300 pixels
    ahead), UP ends the world, LEFT kills, A reaches the flag. The clock ticks every 10 frames."""

    shape = (6, 8, 3)

    def __init__(self, _: Path) -> None:
        self.memory = make_ram(TIME=0, STATE=0, MODE=0, LIVES=0)
        self.starts, self.frames, self.scene, self.pressed = 0, 0, 0, 0

    def advance(self, buttons: int) -> None:
        memory, self.frames = self.memory, self.frames + 1
        self.starts += buttons == cutscenes.START and self.pressed != cutscenes.START
        self.pressed = buttons
        if memory[rules.MODE] == 0:
            if self.starts == 3:
                level = {"WORLD": memory[rules.WORLD], "STAGE": memory[rules.STAGE], "AREA": memory[rules.AREA]}
                self.memory = make_ram(X=40, AREA_TIMER=0, **level)
            return
        if self.frames % 10 == 0:
            self._set_time(rules.read_number(memory, rules.TIME) - 1)
        self.scene -= self.scene > 0
        if memory[rules.STATE] == rules.DEAD:
            memory[rules.LIVES] = (int(memory[rules.LIVES]) - 1) % 256
            memory[rules.STATE], memory[rules.X], memory[rules.PAGE] = NORMAL, 40, 0
            self._set_time(400)
        elif self.scene == 1:
            memory[rules.STATE] = NORMAL
            self._move(300)
            if memory[rules.MODE] == 2:
                memory[rules.MODE], self.scene = 1, 0
                memory[rules.WORLD] += 1
                self._set_time(400)
        elif self.scene:
            assert memory[rules.LEVEL_TIMER] == 0
        elif buttons == mario_env.DOWN:
            memory[rules.STATE], memory[rules.LEVEL_TIMER], memory[rules.AREA_TIMER], self.scene = 3, 9, 9, 5
        elif buttons == mario_env.UP:
            memory[rules.MODE], self.scene = 2, 20
        elif buttons == mario_env.LEFT:
            memory[rules.STATE] = rules.DYING
        elif buttons == mario_env.A:
            memory[rules.FLOAT_STATE], memory[rules.ENEMIES.start] = 3, 0x31
        elif buttons & mario_env.RIGHT:
            self._move(2)

    def _set_time(self, time: int) -> None:
        self.memory[rules.TIME] = [int(digit) for digit in str(time).zfill(3)]

    def _move(self, distance: int) -> None:
        self.memory[rules.PAGE], self.memory[rules.X] = divmod(rules.read_progress(self.memory).x + distance, 256)

    def ram(self) -> bytes:
        return self.memory.tobytes()

    def poke(self, address: int, value: int) -> None:
        self.memory[address] = value

    def screen(self) -> np.ndarray:
        return np.full(self.shape, self.memory[rules.X], np.uint8)

    def save_start(self) -> None:
        self.start = (self.memory.copy(), self.frames)

    def restore_start(self) -> None:
        self.memory, self.frames, self.scene, self.pressed = self.start[0].copy(), self.start[1], 0, 0

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def _fake_console(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(mario_env.CORES, "fake", FakeConsole)
    monkeypatch.setattr(mario_env, "rom_path", lambda name, rom: Path(mario_env.ROMS[rom]))


FRAMES = {"core": "fake", "actions": "complex", "action_repeat": 1, "stack": 1, "size": None}
WALK, FLAG_JUMP, DIE, PIPE, CASTLE = 1, 5, 6, 10, 11  # indices of the complex actions


@pytest.mark.usefixtures("_fake_console")
def test_env_starts_at_the_requested_level() -> None:
    for name, level, area in (("mario/1-2", (1, 2), 3), ("mario/8-4", (8, 4), 4), ("mario", (1, 1), 1)):
        env: Any = make(name, **FRAMES)
        _, info = env.reset(seed=0)
        assert (info["world"], info["stage"], info["time"], info["x_pos"]) == (*level, 399, 40)
        assert env.unwrapped.console.memory[rules.AREA] + 1 == area
        assert env.action_space.n == 12


@pytest.mark.usefixtures("_fake_console")
def test_walking_is_rewarded_and_death_ends_a_level() -> None:
    env = make("mario/1-1", **FRAMES, ram={"position": "0x86", "page": 0x6D})
    env.reset(seed=0)
    steps = [env.step(WALK) for _ in range(10)]
    assert sum(reward for _, reward, *_ in steps) == 10 * 2 - 1  # the clock ticked once
    assert steps[-1][4]["x_pos"] == steps[-1][4]["position"] == 60
    assert steps[-1][0].max() == 60
    _, reward, terminated, truncated, info = env.step(DIE)
    assert (reward, terminated, truncated, info["life"]) == (-15.0, True, False, 2)
    _, info = env.reset()
    assert info["x_pos"] == 40
    assert env.step(WALK)[1] == 2.0  # relative to the new start
    assert env.step(FLAG_JUMP)[2] is True


@pytest.mark.usefixtures("_fake_console")
def test_cutscenes_are_skipped() -> None:
    env = make("mario/1-1", **FRAMES)
    env.reset(seed=0)
    console = env.unwrapped.console
    frames = console.frames
    _, reward, terminated, _, info = env.step(PIPE)
    assert (reward, terminated, info["x_pos"]) == (0.0, False, 40)
    assert console.frames == frames + 5  # this frame and four in the pipe
    assert console.memory[rules.AREA_TIMER] == 1
    _, reward, _, _, info = env.step(WALK)
    assert (reward, info["x_pos"]) == (0.0, 342)  # the teleport isn't rewarded, nor is this frame
    assert env.step(WALK)[1] == 2.0


@pytest.mark.usefixtures("_fake_console")
def test_whole_game_continues_after_worlds_and_deaths() -> None:
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


@pytest.mark.usefixtures("_fake_console")
def test_skipping_an_endless_cutscene_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cutscenes, "MAX_FRAMES", 8)
    env = make("mario", **FRAMES)
    env.reset(seed=0)
    monkeypatch.setattr(FakeConsole, "_set_time", lambda *_: None)
    console = env.unwrapped.console
    monkeypatch.setattr(console, "scene", 10**6)
    console.poke(rules.MODE, rules.WORLD_OVER)
    frames = console.frames
    env.step(WALK)
    assert console.frames == frames + 1 + 8 + 8


@pytest.mark.usefixtures("_fake_console")
def test_env_passes_gymnasiums_checker_and_is_restored_by_replay() -> None:
    env = make("mario/1-1", core="fake", render_mode="rgb_array")
    assert env.observation_space.shape == (4, 84, 84)
    check_env(env, skip_render_check=True)
    assert env.metadata["render_fps"] == 15
    assert env.metadata["logged_info_keys"] == ("x_pos", "flag_get")
    assert env.render().shape == FakeConsole.shape
    assert make("mario/1-1", core="fake").render() is None
    console = env.unwrapped.console
    env.close()
    env.close()
    assert console.closed

    first, second = (SerialVectorEnv(lambda: make("mario/1-1", core="fake", sticky=0.2), 1) for _ in range(2))
    assert not first.group.sub_envs[0].has_state  # the fake console can't save its state, so neither can the wrappers
    first.reset(seed=0)
    for _ in range(5):
        first.step(np.array([1]))
    second.load_state_dict(first.state_dict())
    assert second.inexact == []


@pytest.mark.usefixtures("_fake_console")
def test_shaping_by_name() -> None:
    plain, score, custom = (
        make("mario/1-1", core="fake", shaping=shaping) for shaping in ("none", "score", "test_pixels:double_reward")
    )
    for env in (plain, score, custom):
        env.reset(seed=0)
    assert plain.step(WALK)[1] == 8.0
    assert score.step(WALK)[1] == pytest.approx(0.8)
    assert custom.step(WALK)[1] == 16.0


def test_names() -> None:
    mario_names = mario.names()
    assert len(mario_names) == 33
    assert {"mario", "mario/1-1", "mario/8-4"} <= set(mario_names) <= set(names())
    assert all(mario.supports(name) and registry.find_adapter(name) is mario for name in mario_names)
    assert not any(mario.supports(name) for name in ("mario/", "mario/9-1", "mario/1-5", "mario/1-1-1", "mariokart"))
    with pytest.raises(UserError, match="unknown environment 'mario/9-1': did you mean 'mario/"):
        make("mario/9-1")
    with pytest.raises(UserError, match="unknown environment 'mariokart'"):
        make("mariokart")


@pytest.mark.usefixtures("_fake_console")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rom": "big"}, "mario/1-1: env.rom='big': allowed are standard, downsample, pixel, rectangle"),
        ({"actions": "many"}, "env.actions='many': allowed are right, simple, complex, all"),
        ({"core": "snes"}, "env.core='snes': allowed are retro, nes"),
        ({"shaping": "much"}, "env.shaping='much': allowed are none, score and my.module:function"),
        ({"ram": 7}, r"env.ram=7: must map names to addresses, such as \{power: 0x756\}"),
        ({"ram": {"power": 2048}}, "env.ram.power=2048: must be an address from 0 to 0x7ff"),
        ({"ram": {"power": "here"}}, "env.ram.power='here': must be an address"),
        ({"ram": {"time": 3}}, "env.ram.time: info already has the key time"),
        ({"core": "fake", "pool": "mean"}, "env.pool='mean'"),
        ({"stak": 4}, "mario/1-1 has no option 'stak', allowed: rom, .*; did you mean 'stack'?"),
    ],
)
def test_invalid_options_are_rejected(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make("mario/1-1", **options)


@pytest.mark.parametrize("core", ["retro", "nes"])
def test_missing_package_names_the_extra(core: str, monkeypatch: pytest.MonkeyPatch) -> None:
    message = re.escape(f"mario/1-1 needs the extra 'mario': {install_hint('mario')}")
    with monkeypatch.context() as patch:
        patch.setattr(mario_env, "find_spec", lambda name: None)
        with pytest.raises(UserError, match=message):
            make("mario/1-1", core=core)
    monkeypatch.setattr(mario_env, "rom_path", lambda name, rom: Path(mario_env.ROMS[rom]))
    for package in ("stable_retro", "nes_py"):
        monkeypatch.setitem(__import__("sys").modules, package, None)
    with pytest.raises(UserError, match=message):
        make("mario/1-1", core=core)


def test_button_bits_are_converted_to_the_retro_cores_order() -> None:
    # B, none, select, start, up, down, left, right, A
    assert retro_core.BUTTON_MASKS[mario_env.RIGHT | mario_env.A].tolist() == [0, 0, 0, 0, 0, 0, 0, 1, 1]
    assert retro_core.BUTTON_MASKS[mario_env.LEFT | mario_env.B | mario_env.UP].tolist() == [1, 0, 0, 0, 1, 0, 1, 0, 0]
    assert retro_core.BUTTON_MASKS[cutscenes.START | 0b100 | mario_env.DOWN].tolist() == [0, 0, 1, 1, 0, 1, 0, 0, 0]


def test_sizes_in_a_rom_header_do_not_overflow() -> None:
    class Rom:
        raw_data = np.array([0x4E, 0x45, 0x53, 0x1A, 16, *[0] * 11], np.uint8)

        @property
        def size(self) -> int:
            return 16 * self.header[4]

    module = type("module", (), {"ROM": Rom})
    nes_core.patch_rom_header(module)
    nes_core.patch_rom_header(module)
    assert module.ROM().size == 256
    assert module.ROM.__mro__.count(nes_core._IntHeader) == 1

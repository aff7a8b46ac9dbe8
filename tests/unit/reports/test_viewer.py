"""Tests of the window without a screen: shown frames, and actions of keys, with real pygame events."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.spaces import Discrete

import zhixing as zx
from zhixing.cli import main
from zhixing.reports.viewer import Window, WindowClosed, choose_action, make_keymap, play, watch

pygame = pytest.importorskip("pygame")


@pytest.fixture(autouse=True)
def no_screen(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    yield
    pygame.quit()


class Corridor(gym.Env):
    """Walk right three times to reach the end. The image shows the position, and `actions` records the actions."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 1000}  # noqa: RUF012
    observation_space, action_space = Discrete(4), Discrete(3)
    actions: list[int] = []  # noqa: RUF012

    def __init__(self, render_mode: str | None = None, keys: bool = False) -> None:
        self.render_mode = render_mode
        if keys:
            self.get_keys_to_action = lambda: {(): 1, (ord("d"),): 2, (ord(" "), ord("a")): 0}

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[int, dict]:
        super().reset(seed=seed)
        self.x = 0
        return 0, {}

    def step(self, action: int) -> tuple[int, float, bool, bool, dict]:
        self.actions.append(int(action))
        self.x = min(max(self.x + int(action) - 1, 0), 3)
        return self.x, float(self.x == 3), self.x == 3, len(self.actions) > 200, {}

    def render(self) -> np.ndarray:
        frame = np.zeros((8, 16, 3), np.uint8)
        frame[:, 4 * self.x : 4 * self.x + 4] = 255
        return frame


@pytest.fixture
def hold_keys(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Pretend that keys are held down. Events still come from pygame."""

    def hold(*codes: int) -> None:
        monkeypatch.setattr(pygame.key, "get_pressed", lambda: PressedKeys(codes))

    return hold


class PressedKeys:
    def __init__(self, codes: tuple[int, ...]) -> None:
        self.codes = codes

    def __getitem__(self, code: int) -> bool:
        return code in self.codes


def test_keys_select_actions_and_returns_are_printed(
    hold_keys: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    Corridor.actions.clear()
    hold_keys(pygame.K_RIGHT)
    assert play("test_viewer:Corridor", episodes=2) == [1.0, 1.0]
    assert Corridor.actions == [2] * 6
    assert capsys.readouterr().out.count("return 1") == 2


def test_keys_of_the_env_have_priority(hold_keys: Callable[..., None]) -> None:
    keymap = make_keymap(Corridor(keys=True), "corridor")
    assert keymap == {(): 1, ("d",): 2, ("right",): 2, ("a", "space"): 0, ("left", "space"): 0}
    Corridor.actions.clear()
    hold_keys(pygame.K_d)
    assert play("test_viewer:Corridor", {"keys": True}, episodes=1) == [1.0]
    assert Corridor.actions == [2, 2, 2]


def test_random_play_depends_only_on_the_seed() -> None:
    games = []
    for seed in (0, 0, 1):
        Corridor.actions.clear()
        play("test_viewer:Corridor", random=True, episodes=1, seed=seed)
        games.append(list(Corridor.actions))
    assert games[0] == games[1] != games[2]


def test_escape_and_closing_the_window_end_the_game(hold_keys: Callable[..., None]) -> None:
    hold_keys()
    for event in (pygame.event.Event(pygame.KEYDOWN, key=pygame.K_ESCAPE), pygame.event.Event(pygame.QUIT)):
        with Window("any", 1000) as window:
            window.show_frame(np.zeros((8, 8, 3), np.uint8))
            assert window.pressed_keys() == ()
            pygame.event.post(event)
            with pytest.raises(WindowClosed):
                window.pressed_keys()


def test_images_are_enlarged_and_upright() -> None:
    with Window("any", 1000) as window:
        frame = np.zeros((2, 4, 3), np.uint8)
        frame[0, 3] = 255, 0, 0
        window.show_frame(frame)
        assert window.screen.get_size() == (480, 240)
        assert window.screen.get_at((479, 0))[:3] == (255, 0, 0)
        assert window.screen.get_at((0, 239))[:3] == (0, 0, 0)
        with pytest.raises(zx.UserError, match="renders no images"):
            window.show_frame(None)


def test_env_without_keys_is_rejected() -> None:
    with pytest.raises(zx.UserError, match="try --random"):
        play("Pendulum-v1", episodes=1)


def test_watch_shows_complete_episodes(
    short_config: Callable, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    zx.Session(short_config("ppo", env__max_episode_steps=20), tmp_path / "run", quiet=True).run()
    returns = watch(tmp_path / "run", episodes=2)
    assert len(returns) == 2
    assert capsys.readouterr().out.count("return") == 2


def test_play_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["zhixing", "play", "test_viewer:Corridor", "--random", "--episodes", "1"])
    main()
    assert "return" in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", ["zhixing", "play", "CartPole-v1", "lr=1"])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    assert "lr" in capsys.readouterr().err


def test_missing_screen_is_reported(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("SDL_VIDEODRIVER", "DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr("sys.argv", ["zhixing", "play", "CartPole-v1"])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    assert "no screen" in capsys.readouterr().err


def test_largest_pressed_combination_wins() -> None:
    keymap = {(): 0, ("right",): 1, ("right", "z"): 2, ("left",): 6}
    for pressed, action in {
        (): 0,
        ("right",): 1,
        ("right", "z"): 2,
        ("q", "right", "z"): 2,  # unknown keys are ignored
        ("z",): 0,
        ("left", "x"): 6,
    }.items():
        assert choose_action(pressed, keymap) == action


def test_arrow_keys_are_added_for_wasd() -> None:
    class WasdEnv(Corridor):
        def get_keys_to_action(self) -> dict[tuple[str, ...], int]:
            return {("w",): 1, ("d", " "): 2}

    keymap = make_keymap(WasdEnv(), "wasd")
    assert keymap == {(): 0, ("w",): 1, ("up",): 1, ("d", "space"): 2, ("right", "space"): 2}


def test_pygame_key_codes_of_gymnasium_are_understood() -> None:
    keymap = make_keymap(gym.make("MountainCar-v0"), "MountainCar-v0")
    assert (keymap[()], keymap[("left",)], keymap[("right",)]) == (1, 0, 2)


def test_no_key_is_the_middle_of_three_actions(capsys: pytest.CaptureFixture[str]) -> None:
    keymap = make_keymap(Corridor(), "corridor")
    assert (keymap[()], keymap[("left",)], keymap[("right",)]) == (1, 0, 2)
    assert "left and right arrow" in capsys.readouterr().out


def test_mario_has_keys_for_every_action_set() -> None:
    from zhixing.envs.adapters.mario import env

    for name, buttons in env.ACTIONS.items():
        mario = env.SuperMarioEnv.__new__(env.SuperMarioEnv)  # its keys need no emulator
        mario.buttons = buttons
        keymap = mario.get_keys_to_action()
        assert buttons[choose_action(("right",), keymap)] == env.RIGHT, name
        assert buttons[choose_action(("right", "space", "x"), keymap)] == env.RIGHT | env.A | env.B, name
        if name != "right":
            assert buttons[choose_action(("left",), keymap)] == env.LEFT, name
            assert buttons[choose_action(("z",), keymap)] == env.A, name
        if name in ("complex", "all"):
            assert buttons[choose_action(("down",), keymap)] == env.DOWN, name
            assert buttons[choose_action(("left", "z"), keymap)] == env.LEFT | env.A, name


def test_atari_has_keys() -> None:
    pytest.importorskip("ale_py")
    env = zx.envs.make("ALE/Breakout-v5", render_mode="rgb_array")
    keymap = make_keymap(env, "ALE/Breakout-v5")  # its actions are NOOP, FIRE, RIGHT, LEFT
    assert [choose_action(pressed, keymap) for pressed in ((), ("space",), ("right",), ("left",))] == [0, 1, 2, 3]
    env.close()


PRESS_RIGHT = """
import subprocess, sys, threading
from zhixing import envs
from zhixing.reports import viewer

make, positions = envs.make, []

def make_recorded_env(name, **options):
    env = make(name, **options)
    step = env.step
    def recorded_step(action):
        result = step(action)
        positions.append(result[4]["x_pos"])
        if len(positions) == 40:
            subprocess.run(["xdotool", "keydown", "Right"], check=True)
        elif len(positions) == 100:
            subprocess.run(["xdotool", "keyup", "Right", "key", "Escape"], check=True)
        return result
    env.step = recorded_step
    return env

envs.make = make_recorded_env
viewer.play("mario/1-1", {"noops": 0, "action_repeat": 1})
print(positions[39], positions[99])
"""


@pytest.mark.skipif(not (shutil.which("xvfb-run") and shutil.which("xdotool")), reason="needs xvfb and xdotool")
def test_mario_runs_right_in_a_real_window() -> None:
    pytest.importorskip("stable_retro")
    environment = {name: value for name, value in os.environ.items() if name != "SDL_VIDEODRIVER"}
    command = ["xvfb-run", "-a", sys.executable, "-c", PRESS_RIGHT]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
    start, end = map(int, process.stdout.split()[-2:])
    assert end > start + 20

"""Windows without a screen: what is drawn and which keys do what, with real events."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.spaces import Discrete

import zhixing as zx
from zhixing.cli import main
from zhixing.window import Window, WindowClosed, keys_of, play, watch

pygame = pytest.importorskip("pygame")


@pytest.fixture(autouse=True)
def no_screen(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    yield
    pygame.quit()


class Corridor(gym.Env):
    """Step right three times; the picture shows how far one is, and what was done is kept."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 1000}  # noqa: RUF012
    observation_space, action_space = Discrete(4), Discrete(3)
    done: list[int] = []  # noqa: RUF012

    def __init__(self, render_mode: str | None = None, keys: bool = False) -> None:
        self.render_mode = render_mode
        if keys:
            self.get_keys_to_action = lambda: {(): 1, (ord("d"),): 2, (ord(" "), ord("a")): 0}

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[int, dict]:
        super().reset(seed=seed)
        self.x = 0
        return 0, {}

    def step(self, action: int) -> tuple[int, float, bool, bool, dict]:
        self.done.append(int(action))
        self.x = min(max(self.x + int(action) - 1, 0), 3)
        return self.x, float(self.x == 3), self.x == 3, len(self.done) > 200, {}

    def render(self) -> np.ndarray:
        frame = np.zeros((8, 16, 3), np.uint8)
        frame[:, 4 * self.x : 4 * self.x + 4] = 255
        return frame


@pytest.fixture
def holding(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Keys as if somebody held them; the events themselves come from pygame."""

    def hold(*codes: int) -> None:
        monkeypatch.setattr(pygame.key, "get_pressed", lambda: _Held(codes))

    return hold


class _Held:
    def __init__(self, codes: tuple[int, ...]) -> None:
        self.codes = codes

    def __getitem__(self, code: int) -> bool:
        return code in self.codes


def test_keys_move_and_returns_are_told(holding: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    Corridor.done.clear()
    holding(pygame.K_RIGHT)
    assert play("test_window:Corridor", episodes=2) == [1.0, 1.0]
    assert Corridor.done == [2] * 6
    assert capsys.readouterr().out.count("return 1") == 2


def test_a_tasks_own_keys_win(holding: Callable[..., None]) -> None:
    keymap = keys_of(Corridor(keys=True), "corridor")
    assert keymap == {(): 1, ("d",): 2, ("a", "space"): 0}
    Corridor.done.clear()
    holding(pygame.K_d)
    assert play("test_window:Corridor", {"keys": True}, episodes=1) == [1.0]
    assert Corridor.done == [2, 2, 2]


def test_chance_plays_the_same_by_seed() -> None:
    games = []
    for seed in (0, 0, 1):
        Corridor.done.clear()
        play("test_window:Corridor", random=True, episodes=1, seed=seed)
        games.append(list(Corridor.done))
    assert games[0] == games[1] != games[2]


def test_escape_and_the_closed_window_end_it(holding: Callable[..., None]) -> None:
    holding()
    for event in (pygame.event.Event(pygame.KEYDOWN, key=pygame.K_ESCAPE), pygame.event.Event(pygame.QUIT)):
        with Window("any", 1000) as window:
            window.show(np.zeros((8, 8, 3), np.uint8))
            assert window.keys() == ()
            pygame.event.post(event)
            with pytest.raises(WindowClosed):
                window.keys()


def test_pictures_are_enlarged_and_drawn_upright() -> None:
    with Window("any", 1000) as window:
        frame = np.zeros((2, 4, 3), np.uint8)
        frame[0, 3] = 255, 0, 0
        window.show(frame)
        assert window.screen.get_size() == (480, 240)
        assert window.screen.get_at((479, 0))[:3] == (255, 0, 0)
        assert window.screen.get_at((0, 239))[:3] == (0, 0, 0)
        with pytest.raises(zx.UserError, match="no pictures"):
            window.show(None)


def test_what_has_no_keys_is_told() -> None:
    with pytest.raises(zx.UserError, match="try --random"):
        play("Pendulum-v1", episodes=1)


def test_watch_shows_whole_episodes(small: Callable, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    zx.Session(small("ppo", env__max_episode_steps=20), tmp_path / "run", quiet=True).run()
    returns = watch(tmp_path / "run", episodes=2)
    assert len(returns) == 2
    assert capsys.readouterr().out.count("return") == 2


def test_on_the_command_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["zhixing", "play", "test_window:Corridor", "--random", "--episodes", "1"])
    main()
    assert "return" in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", ["zhixing", "play", "CartPole-v1", "lr=1"])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    assert "env.NAME=VALUE" in capsys.readouterr().err

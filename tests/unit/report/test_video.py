from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import gymnasium as gym
import imageio_ffmpeg
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete

import zhixing as zx
from zhixing.errors import UserError
from zhixing.report.video import record, without_screen, write_video


class Clock(gym.Env[Any, Any]):
    """Its picture grows brighter at each of five steps: an episode's frames have the greys 0, 40, ... 200."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 5}  # noqa: RUF012
    observation_space = Box(0.0, 9.0, (1,), np.float32)
    action_space = Discrete(2)

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode

    def _see(self) -> Any:
        return np.array([self.t], np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.t = 0
        return self._see(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t += 1
        return self._see(), 2.0, self.t == 5, False, {}

    def render(self) -> Any:
        return np.full((33, 47, 3), 40 * self.t, np.uint8)


class Blind(Clock):
    def __init__(self) -> None:
        super().__init__()


class Flat(Clock):
    def render(self) -> Any:
        return np.zeros((33, 47))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Runs that have hardly trained, by task."""
    folder = tmp_path_factory.mktemp("runs")
    tasks = ("CartPole-v1", "toy/match", *(f"{__name__}:{task}" for task in ("Clock", "Blind", "Flat")))
    settings = {"env_steps": 64, "rollout_steps": 32, "num_envs": 2, "minibatch_size": 64}
    for i, task in enumerate(tasks):
        extra = {"vector__backend": "serial", "eval_episodes": 1, "tensorboard": False}
        zx.train("ppo", env=task, out=folder / str(i), quiet=True, **settings, **extra)
    return {task.removeprefix(f"{__name__}:"): folder / str(i) for i, task in enumerate(tasks)}


def greys(video: Path) -> list[int]:
    """The mean grey of each frame."""
    reader = imageio_ffmpeg.read_frames(str(video))
    next(reader)
    return [round(float(np.frombuffer(frame, np.uint8).mean())) for frame in reader]


def test_cartpole_is_filmed_without_a_screen(
    runs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    returns = record(runs["CartPole-v1"], tmp_path / "new" / "film.mp4", episodes=2, seed=3)
    frames, seconds = imageio_ffmpeg.count_frames_and_secs(str(tmp_path / "new" / "film.mp4"))
    assert frames == sum(returns) + 2  # a reward of 1 per step: each episode has its steps and its start
    assert seconds == pytest.approx(frames / 50, abs=0.05)  # CartPole's own speed
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["film.mp4"]  # nothing aside


def test_every_episode_is_shown_from_its_start_to_its_true_end(runs: dict[str, Path], tmp_path: Path) -> None:
    assert record(runs["Clock"], tmp_path / "film.mp4", episodes=2) == [10.0, 10.0]
    shown = greys(tmp_path / "film.mp4")
    bright = 33 * 47 / (34 * 48)  # one black line and column pad the odd sizes
    expected = [40 * t * bright for t in (0, 1, 2, 3, 4, 5)] * 2
    assert shown == pytest.approx(expected, abs=6)  # the codec is not exact


def test_odd_sizes_are_padded_to_even_ones(runs: dict[str, Path], tmp_path: Path) -> None:
    record(runs["Clock"], tmp_path / "film.mp4")
    assert next(imageio_ffmpeg.read_frames(str(tmp_path / "film.mp4")))["size"] == (48, 34)


def test_same_seed_films_the_same_episode(runs: dict[str, Path], tmp_path: Path) -> None:
    returns = [record(runs["CartPole-v1"], tmp_path / f"{i}.mp4", seed=seed) for i, seed in enumerate((0, 0, 1, 2, 3))]
    assert returns[0] == returns[1]
    assert len({tuple(one) for one in returns}) > 1


def test_wrong_suffix_is_refused(runs: dict[str, Path], tmp_path: Path) -> None:
    for name in ("film.avi", "film", "mp4"):
        with pytest.raises(UserError, match=r"must end in \.mp4 or \.gif"):
            record(runs["toy/match"], tmp_path / name)
    record(runs["toy/match"], tmp_path / "film.MP4")


@pytest.mark.parametrize(
    ("task", "words"), [("Blind", "can't be filmed.*render_mode"), ("Flat", "gives no pictures.*RGB array")]
)
def test_task_without_pictures_is_told(runs: dict[str, Path], tmp_path: Path, task: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        record(runs[task], tmp_path / "film.mp4")
    assert not list(tmp_path.iterdir())


def test_failed_film_leaves_the_one_before(tmp_path: Path) -> None:
    film = tmp_path / "film.mp4"
    film.write_bytes(b"before")

    def breaks() -> Any:
        yield np.zeros((16, 16, 3), np.uint8)
        raise ZeroDivisionError("the camera fell")

    with pytest.raises(ZeroDivisionError):
        write_video(film, breaks(), 10)
    assert film.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [film]


def test_film_that_cannot_be_written_is_told(runs: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="can't be written"):
        record(runs["toy/match"], tmp_path / "file" / "film.mp4")


@pytest.mark.parametrize(("gray", "word"), [(0, "black"), (80, "equal")])
def test_a_video_of_equal_frames_warns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], gray: int, word: str
) -> None:
    frame = np.full((32, 48, 3), gray, np.uint8)
    write_video(tmp_path / "still.mp4", [frame, frame, frame], 5)
    assert f"warning: all 3 frames of {tmp_path / 'still.mp4'} are {word}" in capsys.readouterr().err
    write_video(tmp_path / "moving.mp4", [frame, frame, 255 - frame], 5)
    write_video(tmp_path / "single.mp4", [frame], 5)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("driver", [None, "dummy"])
def test_pygame_draws_offscreen_and_not_with_the_dummy_driver(
    monkeypatch: pytest.MonkeyPatch, driver: str | None
) -> None:
    """highway-env draws nothing with the driver `dummy`."""
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("SDL_VIDEODRIVER", driver or "")  # put back in the end, also where it wasn't set
    for name in ("DISPLAY", "WAYLAND_DISPLAY", *(["SDL_VIDEODRIVER"] if driver is None else [])):
        monkeypatch.delenv(name, raising=False)
    without_screen()
    assert os.environ["SDL_VIDEODRIVER"] == "offscreen"
    monkeypatch.setenv("SDL_VIDEODRIVER", "x11")  # somebody's choice
    without_screen()
    assert os.environ["SDL_VIDEODRIVER"] == "x11"


def test_gif_shows_every_frame_at_its_speed(runs: dict[str, Path], tmp_path: Path) -> None:
    assert record(runs["Clock"], tmp_path / "film.gif", episodes=2) == [10.0, 10.0]
    assert (tmp_path / "film.gif").read_bytes()[:6] == b"GIF89a"
    assert greys(tmp_path / "film.gif")[:6] == pytest.approx([40 * t * 33 * 47 / (34 * 48) for t in range(6)], abs=6)
    assert imageio_ffmpeg.count_frames_and_secs(str(tmp_path / "film.gif"))[1] == pytest.approx(12 / 5, abs=0.3)


def test_episodes_are_cut_where_asked(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    returns = record(runs["Clock"], tmp_path / "film.mp4", episodes=2, max_steps=3)
    assert returns == [6.0, 6.0]  # three steps of 2 each
    assert imageio_ffmpeg.count_frames_and_secs(str(tmp_path / "film.mp4"))[0] == 8  # the start and three steps, twice
    assert "2 of 2 episodes were cut after 3 steps" in capsys.readouterr().err
    assert record(runs["Clock"], tmp_path / "film.mp4", episodes=2, max_steps=5) == [10.0, 10.0]
    assert "cut" not in capsys.readouterr().err

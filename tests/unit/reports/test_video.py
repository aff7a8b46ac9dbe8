"""Tests of recorded videos."""

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
from zhixing.reports.video import record_video, use_offscreen_rendering, write_video


class BrighteningEnv(gym.Env[Any, Any]):
    """The image gets brighter at each of five steps: an episode's frames have the gray levels 0, 40, ... 200."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 5}  # noqa: RUF012
    observation_space = Box(0.0, 9.0, (1,), np.float32)
    action_space = Discrete(2)

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode

    def _obs(self) -> Any:
        return np.array([self.t], np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.t = 0
        return self._obs(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t += 1
        return self._obs(), 2.0, self.t == 5, False, {}

    def render(self) -> Any:
        return np.full((33, 47, 3), 40 * self.t, np.uint8)


class NoRenderEnv(BrighteningEnv):
    def __init__(self) -> None:
        super().__init__()


class FlatImageEnv(BrighteningEnv):
    def render(self) -> Any:
        return np.zeros((33, 47))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Very short runs by environment."""
    folder = tmp_path_factory.mktemp("runs")
    dummies = ("BrighteningEnv", "NoRenderEnv", "FlatImageEnv")
    names = ("CartPole-v1", "toy/match", *(f"{__name__}:{name}" for name in dummies))
    settings = {"env_steps": 64, "rollout_steps": 32, "num_envs": 2, "minibatch_size": 64}
    for i, name in enumerate(names):
        extra = {"vector__backend": "serial", "eval_episodes": 1, "tensorboard": False}
        zx.train("ppo", env=name, out=folder / str(i), quiet=True, **settings, **extra)
    return {name.removeprefix(f"{__name__}:"): folder / str(i) for i, name in enumerate(names)}


def gray_levels(video: Path) -> list[int]:
    """Return the mean gray level of each frame."""
    reader = imageio_ffmpeg.read_frames(str(video))
    next(reader)
    return [round(float(np.frombuffer(frame, np.uint8).mean())) for frame in reader]


def test_cartpole_is_recorded_without_a_screen(
    runs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    returns = record_video(runs["CartPole-v1"], tmp_path / "new" / "video.mp4", episodes=2, seed=3)
    frames, seconds = imageio_ffmpeg.count_frames_and_secs(str(tmp_path / "new" / "video.mp4"))
    assert frames == sum(returns) + 2  # a reward of 1 per step: each episode has its steps and its start
    assert seconds == pytest.approx(frames / 50, abs=0.05)  # at the frame rate of CartPole
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["video.mp4"]  # no temporary file


def test_video_shows_every_episode_from_its_start_to_its_final_frame(runs: dict[str, Path], tmp_path: Path) -> None:
    assert record_video(runs["BrighteningEnv"], tmp_path / "video.mp4", episodes=2) == [10.0, 10.0]
    actual = gray_levels(tmp_path / "video.mp4")
    padding = 33 * 47 / (34 * 48)  # a black row and column pad the odd sizes
    expected = [40 * t * padding for t in (0, 1, 2, 3, 4, 5)] * 2
    assert actual == pytest.approx(expected, abs=6)  # the codec is lossy


def test_odd_sizes_are_padded_to_even_ones(runs: dict[str, Path], tmp_path: Path) -> None:
    record_video(runs["BrighteningEnv"], tmp_path / "video.mp4")
    assert next(imageio_ffmpeg.read_frames(str(tmp_path / "video.mp4")))["size"] == (48, 34)


def test_same_seed_records_the_same_episode(runs: dict[str, Path], tmp_path: Path) -> None:
    returns = [
        record_video(runs["CartPole-v1"], tmp_path / f"{i}.mp4", seed=seed) for i, seed in enumerate((0, 0, 1, 2, 3))
    ]
    assert returns[0] == returns[1]
    assert len({tuple(run) for run in returns}) > 1


def test_unknown_suffix_is_rejected(runs: dict[str, Path], tmp_path: Path) -> None:
    for name in ("video.avi", "video", "mp4"):
        with pytest.raises(UserError, match=r"must end in \.mp4 or \.gif"):
            record_video(runs["toy/match"], tmp_path / name)
    record_video(runs["toy/match"], tmp_path / "video.MP4")


@pytest.mark.parametrize(
    ("env", "message"),
    [("NoRenderEnv", "can't be recorded.*render_mode"), ("FlatImageEnv", "renders no images.*RGB array")],
)
def test_env_without_images_is_rejected(runs: dict[str, Path], tmp_path: Path, env: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        record_video(runs[env], tmp_path / "video.mp4")
    assert not list(tmp_path.iterdir())


def test_failed_recording_keeps_the_previous_video(tmp_path: Path) -> None:
    video = tmp_path / "video.mp4"
    video.write_bytes(b"before")

    def failing_frames() -> Any:
        yield np.zeros((16, 16, 3), np.uint8)
        raise ZeroDivisionError("broken")

    with pytest.raises(ZeroDivisionError):
        write_video(video, failing_frames(), 10)
    assert video.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [video]


def test_unwritable_path_is_reported(runs: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="can't write the video"):
        record_video(runs["toy/match"], tmp_path / "file" / "video.mp4")


@pytest.mark.parametrize(("gray", "problem"), [(0, "black"), (80, "equal")])
def test_equal_frames_give_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], gray: int, problem: str
) -> None:
    frame = np.full((32, 48, 3), gray, np.uint8)
    write_video(tmp_path / "still.mp4", [frame, frame, frame], 5)
    assert f"warning: all 3 frames of {tmp_path / 'still.mp4'} are {problem}" in capsys.readouterr().err
    write_video(tmp_path / "moving.mp4", [frame, frame, 255 - frame], 5)
    write_video(tmp_path / "single.mp4", [frame], 5)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("driver", [None, "dummy"])
def test_pygame_draws_offscreen_and_not_with_the_dummy_driver(
    monkeypatch: pytest.MonkeyPatch, driver: str | None
) -> None:
    """highway-env draws nothing with the driver `dummy`."""
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("SDL_VIDEODRIVER", driver or "")  # so monkeypatch restores it
    for name in ("DISPLAY", "WAYLAND_DISPLAY", *(["SDL_VIDEODRIVER"] if driver is None else [])):
        monkeypatch.delenv(name, raising=False)
    use_offscreen_rendering()
    assert os.environ["SDL_VIDEODRIVER"] == "offscreen"
    monkeypatch.setenv("SDL_VIDEODRIVER", "x11")  # the user's choice
    use_offscreen_rendering()
    assert os.environ["SDL_VIDEODRIVER"] == "x11"


def test_gif_has_every_frame_and_the_right_duration(runs: dict[str, Path], tmp_path: Path) -> None:
    assert record_video(runs["BrighteningEnv"], tmp_path / "video.gif", episodes=2) == [10.0, 10.0]
    assert (tmp_path / "video.gif").read_bytes()[:6] == b"GIF89a"
    assert gray_levels(tmp_path / "video.gif")[:6] == pytest.approx(
        [40 * t * 33 * 47 / (34 * 48) for t in range(6)], abs=6
    )
    assert imageio_ffmpeg.count_frames_and_secs(str(tmp_path / "video.gif"))[1] == pytest.approx(12 / 5, abs=0.3)


def test_episodes_are_cut_after_max_steps(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    returns = record_video(runs["BrighteningEnv"], tmp_path / "video.mp4", episodes=2, max_steps=3)
    assert returns == [6.0, 6.0]  # three steps with reward 2
    assert imageio_ffmpeg.count_frames_and_secs(str(tmp_path / "video.mp4"))[0] == 8  # the start and three steps, twice
    assert "2 of 2 episodes were cut after 3 steps" in capsys.readouterr().err
    assert record_video(runs["BrighteningEnv"], tmp_path / "video.mp4", episodes=2, max_steps=5) == [10.0, 10.0]
    assert "cut" not in capsys.readouterr().err

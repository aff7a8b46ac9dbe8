"""Videos of agents, without a screen."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from zhixing import envs
from zhixing.agent import load
from zhixing.errors import UserError
from zhixing.ops.seeding import stream


def record(run: str | Path, out: str | Path, episodes: int = 1, seed: int = 0, checkpoint: str = "last") -> list[float]:
    """Film an agent in its task; returns the returns of the episodes shown."""
    out = Path(out)
    if out.suffix.lower() != ".mp4":
        raise UserError(f"the video {out} must end in .mp4")
    without_screen()
    with Show(run, seed, checkpoint) as show:
        write_video(out, show.frames(episodes), show.fps)
    return show.returns


def without_screen() -> None:
    """Let pygame draw where there is no screen; else it complains."""
    if sys.platform == "linux" and not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")


class Show:
    """A run's agent in its task, picture by picture. `returns` are those of the episodes that have ended."""

    def __init__(self, run: str | Path, seed: int = 0, checkpoint: str = "last") -> None:
        self.agent, self.seed = load(run, checkpoint), seed
        task = self.agent.cfg.env
        self._ends: list[Any] = []
        filmed = _Filmed(task.name, {**task.options, "render_mode": "rgb_array"}, self._ends)
        try:
            self.env = envs.SerialVectorEnv(filmed, 1)
        except UserError as error:
            raise UserError(f"{task.name} can't be filmed: {error}") from error
        self.agent.policy.watch(self.env)
        self.returns: list[float] = []

    @property
    def fps(self) -> float:
        return float(self.env.metadata["render_fps"])

    def frames(self, episodes: int) -> Iterator[Any]:
        env, agent = self.env, self.agent
        obs, info = env.reset(seed=stream(self.seed, "record"))
        yield env.render()
        total = 0.0
        while True:
            obs, reward, terminated, truncated, info = env.step(agent.act(obs, info.get("action_mask")))
            total += float(np.mean(reward[0]))
            if terminated[0] or truncated[0]:
                self.returns.append(total)
                yield self._ends.pop()
                if len(self.returns) == episodes:
                    return
                total = 0.0
                agent.reset()
            yield env.render()

    def __enter__(self) -> Show:
        return self

    def __exit__(self, *error: object) -> None:
        self.env.close()


@dataclass(frozen=True)
class _Filmed(envs.Task):
    """A task that keeps a picture of each end of an episode, which the vector environment leaves at once."""

    ends: list[Any] = field(default_factory=list)

    def __call__(self) -> gym.Env[Any, Any]:
        return _EndPictures(super().__call__(), self.ends)


class _EndPictures(gym.Wrapper[Any, Any, Any, Any]):
    def __init__(self, env: gym.Env[Any, Any], ends: list[Any]) -> None:
        super().__init__(env)
        self.ends = ends

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        obs, reward, terminated, truncated, info = self.env.step(action)
        if terminated or truncated:
            self.ends.append(self.env.render())
        return obs, reward, terminated, truncated, info


def write_video(path: Path, frames: Iterable[Any], fps: float) -> None:
    """H.264 that every player shows. Written aside and renamed."""
    frames = iter(frames)
    first = next(frames)
    if not isinstance(first, np.ndarray) or first.shape[2:] != (3,) or first.dtype != np.uint8:
        raise UserError("this task gives no pictures: render() must return an RGB array of uint8 (height, width, 3)")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_name(f".{path.stem}.tmp.mp4")
        try:
            _encode(aside, first, frames, fps)
            aside.replace(path)
        finally:
            aside.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"the video {path} can't be written: {error.strerror or error}") from None


def _encode(path: Path, first: Any, rest: Iterator[Any], fps: float) -> None:
    import imageio_ffmpeg

    height, width = first.shape[:2]
    even = (height + height % 2, width + width % 2)  # players want even sizes: pad by a black line where needed
    writer = imageio_ffmpeg.write_frames(str(path), even[::-1], fps=fps, macro_block_size=1, ffmpeg_log_level="error")
    with closing(writer):  # also when a frame fails: it holds a process
        writer.send(None)
        for frame in chain([first], rest):
            padded = np.zeros((*even, 3), np.uint8)
            padded[:height, :width] = frame
            writer.send(padded)

"""Videos of agents, without a screen."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

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
    agent = load(run, checkpoint)
    env = envs.make_vector(
        agent.cfg.env.name, 1, backend="serial", options=agent.cfg.env.options, render_mode="rgb_array"
    )
    returns: list[float] = []

    def frames() -> Iterator[Any]:
        obs, info = env.reset(seed=stream(seed, "record"))
        yield env.render()
        total = 0.0
        while len(returns) < episodes:
            obs, reward, terminated, truncated, info = env.step(agent.act(obs, info.get("action_mask")))
            total += float(np.mean(reward[0]))
            yield env.render()
            if terminated[0] or truncated[0]:
                returns.append(total)
                total = 0.0
                agent.reset()

    try:
        write_video(out, frames(), env.render_fps)
    finally:
        env.close()
    return returns


def write_video(path: Path, frames: Iterable[Any], fps: float) -> None:
    """H.264 that every player shows. Written aside and renamed."""
    import imageio_ffmpeg

    frames = iter(frames)
    first = next(frames)
    if not isinstance(first, np.ndarray) or first.ndim != 3 or first.shape[-1] != 3:
        raise UserError("this task gives no pictures: render() must return an RGB array (height, width, 3)")
    height, width = first.shape[:2]
    aside = path.with_name(f".{path.stem}.tmp.mp4")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # players want even sizes: pad by a black line where needed
        even = (height + height % 2, width + width % 2)
        writer = imageio_ffmpeg.write_frames(
            str(aside), even[::-1], fps=fps, macro_block_size=1, ffmpeg_log_level="error"
        )
        writer.send(None)
        for frame in _chain(first, frames):
            padded = np.zeros((*even, 3), np.uint8)
            padded[:height, :width] = frame
            writer.send(padded)
        writer.close()
        aside.replace(path)
    except OSError as error:
        raise UserError(f"the video {path} can't be written: {error.strerror or error}") from None
    finally:
        aside.unlink(missing_ok=True)


def _chain(first: Any, rest: Iterator[Any]) -> Iterator[Any]:
    yield first
    yield from rest

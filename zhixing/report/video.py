"""Videos of agents, without a screen."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from zhixing import envs
from zhixing.collect.evaluation import default_eval_steps
from zhixing.core.seeding import stream
from zhixing.envs.wrappers.final_frames import FinalFrameEnv
from zhixing.errors import UserError, note, write_stderr
from zhixing.training.agent import load

if TYPE_CHECKING:
    from zhixing.config import VectorConfig

# how ffmpeg writes each kind of video; a GIF gets a palette of its own and at most 25 frames per second, to stay small
GIF = "fps='min(25,source_fps)',split[a][b];[a]palettegen[colors];[b][colors]paletteuse=dither=none"
ENCODERS: dict[str, dict[str, Any]] = {
    ".mp4": {},  # H.264, which every player shows
    ".gif": {"codec": "gif", "pix_fmt_out": "pal8", "output_params": ["-filter_complex", GIF]},
}


def record(
    run: str | Path,
    out: str | Path,
    episodes: int = 1,
    seed: int = 0,
    checkpoint: str = "last",
    max_steps: int | None = None,
    *,
    env: Any = None,
    net: Any = None,
) -> list[float]:
    """Film an agent in its task; returns the returns of the episodes shown. Episodes are cut after `max_steps`, by
    default the run's `eval_max_steps`. `env` and `net` are classes or functions, where the run names what can't be
    imported."""
    out = Path(out).absolute()  # an environment may change the current folder
    if out.suffix.lower() not in ENCODERS:
        raise UserError(f"the video {out} must end in {' or '.join(ENCODERS)}")
    without_screen()
    with Show(run, seed, checkpoint, max_steps, env=env, net=net) as show:
        write_video(out, show.frames(episodes), show.fps)
    if show.cut_episodes:
        note(f"{show.cut_episodes} of {episodes} episodes were cut after {show.max_steps:,} steps: they had not ended")
    return show.returns


def without_screen() -> None:
    """Let pygame draw on a machine without a screen. Some environments draw nothing with SDL's driver `dummy`, so
    `offscreen` takes its place: it shows nothing either, but is a driver like any other."""
    headless = sys.platform == "linux" and not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
    if headless and os.environ.get("SDL_VIDEODRIVER", "dummy") == "dummy":
        os.environ["SDL_VIDEODRIVER"] = "offscreen"


class Show:
    """A run's agent in its task, picture by picture. `returns` are those of the episodes that have ended.

    Episodes are cut after `max_steps`, by default the run's `eval_max_steps`; `cut_episodes` counts them.
    """

    def __init__(
        self,
        run: str | Path,
        seed: int = 0,
        checkpoint: str = "last",
        max_steps: int | None = None,
        *,
        env: Any = None,
        net: Any = None,
    ) -> None:
        self.agent, self.seed = load(run, checkpoint, env=env, net=net), seed
        task = self.agent.cfg.env
        self.env = filmed(task.name, task.options, self.agent.cfg.vector)
        self.agent.policy.bind_env(self.env)
        self.returns: list[float] = []
        usual = default_eval_steps(self.env.max_episode_steps, self.agent.longest_episode)
        self.max_steps, self.cut_episodes = max_steps or self.agent.cfg.eval_max_steps or usual, 0

    @property
    def fps(self) -> float:
        return float(self.env.metadata["render_fps"])

    def frames(self, episodes: int) -> Iterator[Any]:
        env, agent = self.env, self.agent
        obs, info = env.reset(seed=stream(self.seed, "record"))
        yield env.render()
        total, steps = 0.0, 0
        while True:
            obs, reward, terminated, truncated, info = env.step(agent.act(obs, info.get("action_mask")))
            total += float(np.mean(reward[0]))
            steps += 1
            ended = terminated[0] or truncated[0]
            cut = not ended and steps == self.max_steps
            if ended or cut:
                self.returns.append(total)
                self.cut_episodes += cut
                yield env.render()  # of the end
                if len(self.returns) == episodes:
                    return
                total, steps = 0.0, 0
                agent.reset()
            if cut:
                obs, info = env.reset(seed=stream(self.seed, "record", len(self.returns)))
            yield env.render()

    def __enter__(self) -> Show:
        return self

    def __exit__(self, *error: object) -> None:
        self.env.close()


def filmed(
    name: str, options: dict[str, Any], vector: VectorConfig, crashes: Path | None = None
) -> envs.SerialVectorEnv | envs.ProcessVectorEnv:
    """One copy of a task that draws itself. After an episode ended, the first picture is that of its end, which the
    vector environment leaves at once."""
    try:
        return envs.make_small_vector(FinalFrameEnv(name, {**options, "render_mode": "rgb_array"}), 1, vector, crashes)
    except UserError as error:
        raise UserError(f"{name} can't be filmed: {error}") from error


def write_video(path: Path, frames: Iterable[Any], fps: float) -> None:
    with Video(path, fps) as video:
        for frame in frames:
            video.add(frame)


class Video:
    """An .mp4 or .gif file, written frame by frame. It is written under another name and renamed at its end."""

    def __init__(self, path: Path, fps: float) -> None:
        self.path, self.fps = path, fps
        self.aside = path.with_name(f".{path.stem}.tmp{path.suffix.lower()}")
        self._writer: Any = None
        self._even = (0, 0)  # players want even sizes: a black line pads where needed
        self._first: Any = None  # frame
        self.frames, self.still = 0, True  # `still` as long as all frames are equal

    def __enter__(self) -> Video:
        return self

    def add(self, frame: Any) -> None:
        if not isinstance(frame, np.ndarray) or frame.shape[2:] != (3,) or frame.dtype != np.uint8:
            raise UserError(
                "this task gives no pictures: render() must return an RGB array of uint8 (height, width, 3)"
            )
        height, width = frame.shape[:2]
        try:
            if self._writer is None:
                self._open(height, width)
                self._first = frame.copy()
            self.frames += 1
            self.still = self.still and np.array_equal(frame, self._first)
            padded = np.zeros((*self._even, 3), np.uint8)
            padded[:height, :width] = frame
            self._writer.send(padded)
        except OSError as error:
            raise self._refused(error) from None

    def _open(self, height: int, width: int) -> None:
        import imageio_ffmpeg

        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._even = (height + height % 2, width + width % 2)
        self._writer = imageio_ffmpeg.write_frames(
            str(self.aside),
            self._even[::-1],
            fps=self.fps,
            macro_block_size=1,
            ffmpeg_log_level="error",
            **ENCODERS[self.path.suffix.lower()],
        )
        self._writer.send(None)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._writer is None:
            return
        self._writer.close()  # also when a frame failed: it holds a process
        try:
            if kind is None:
                self._look()
                self.aside.replace(self.path)
                self._warn_if_still()
        except OSError as failed:
            raise self._refused(failed) from None
        finally:
            self.aside.unlink(missing_ok=True)

    def _warn_if_still(self) -> None:
        if self.still and self.frames > 1:
            what = "equal" if self._first.any() else "black"
            advice = "check its render() and, without a screen, its options for drawing offscreen"
            write_stderr(f"warning: all {self.frames} frames of {self.path} are {what}; {advice}")

    def _look(self) -> None:
        """The encoder may have failed on its last bytes, of which nobody tells."""
        import imageio_ffmpeg

        try:
            imageio_ffmpeg.count_frames_and_secs(str(self.aside))
        except RuntimeError:
            raise OSError("the encoder could not finish it; is the disk full?") from None

    def _refused(self, error: OSError) -> UserError:
        return UserError(f"the video {self.path} can't be written: {error.strerror or str(error).splitlines()[0]}")

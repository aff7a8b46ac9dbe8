"""Record videos of agents, without a screen."""

from __future__ import annotations

import base64
import os
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from zhixing import envs
from zhixing.collectors.evaluation import default_eval_steps
from zhixing.core.seeding import derive_seed
from zhixing.envs.wrappers.final_frames import FinalFrameEnv
from zhixing.envs.wrappers.headless import headless
from zhixing.errors import UserError, note, write_stderr
from zhixing.training.agent import Agent, load_agent, open_source
from zhixing.training.run_folder import RunPath
from zhixing.utils.files import write_atomically

if TYPE_CHECKING:
    from zhixing.config import VectorConfig

# ffmpeg arguments by file suffix; a GIF has its own palette and at most 25 frames per second, to stay small
GIF = "fps='min(25,source_fps)',split[a][b];[a]palettegen[colors];[b][colors]paletteuse=dither=none"
ENCODERS: dict[str, dict[str, Any]] = {
    ".mp4": {},  # H.264, which every player supports
    ".gif": {"codec": "gif", "pix_fmt_out": "pal8", "output_params": ["-filter_complex", GIF]},
}


@dataclass(frozen=True)
class Video:
    """A recorded video. Notebooks play it."""

    data: bytes  # of an .mp4 or .gif file
    returns: list[float]  # of the episodes in it
    path: Path | None = None  # the file, if it was written
    suffix: str = ".mp4"

    def __repr__(self) -> str:
        where = "" if self.path is None else f"{self.path}, "
        return f"Video({where}{len(self.data):,} bytes, returns {', '.join(f'{value:.6g}' for value in self.returns)})"

    def save(self, out: str | os.PathLike[str]) -> None:
        """Write the video to a file with the suffix of its format."""
        if Path(out).suffix.lower() != self.suffix:
            raise UserError(f"the video {os.fspath(out)} must end in {self.suffix}, the format that was recorded")
        write_atomically(Path(out), lambda file: file.write(self.data))

    def _repr_html_(self) -> str:
        text = base64.b64encode(self.data).decode()
        if self.suffix == ".gif":
            return f'<img src="data:image/gif;base64,{text}">'
        return f'<video controls loop style="max-width: 100%" src="data:video/mp4;base64,{text}"></video>'


def video(
    run: RunPath | Agent,
    out: str | os.PathLike[str] | None = None,
    episodes: int = 1,
    seed: int = 0,
    checkpoint: str | int = "last",
    max_steps: int | None = None,
    *,
    trust: bool = False,
    env: Any = None,
    net: Any = None,
) -> Video:
    """Record a run's agent in its environment. Needs no screen. Notebooks play the returned video.

    Args:
        run: Run folder, the result of a run, the name of an agent in `zhixing zoo`, or an agent.
        out: File to write, .mp4 or .gif; by default the video is only returned.
        episodes: Number of episodes.
        seed: Seed of the episodes.
        checkpoint: `last` for the final weights, `best` for the best evaluation, or the step of a checkpoint.
        max_steps: Maximum steps per episode; by default the run's `eval_max_steps`.
        trust: Allow the import of code that the run names.
        env: Class or function to use if the run's environment can't be imported by name.
        net: Class to use if the run's network can't be imported by name.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "video.mp4" if out is None else Path(out).absolute()
        returns = record_video(run, path, episodes, seed, checkpoint, max_steps, trust=trust, env=env, net=net)
        return Video(path.read_bytes(), returns, None if out is None else path, path.suffix.lower())


def record_video(
    run: RunPath | Agent,
    out: str | Path,
    episodes: int = 1,
    seed: int = 0,
    checkpoint: str | int = "last",
    max_steps: int | None = None,
    **source: Any,
) -> list[float]:
    """Record a run's agent in its environment to a file, and return the episodes' returns.

    Episodes are cut after `max_steps`, by default the run's `eval_max_steps`. `source` has the arguments of
    `open_source`: pass `env` and `net`, classes or functions, if the run's own can't be imported by name.
    """
    out = Path(out).absolute()  # an environment may change the current folder
    if out.suffix.lower() not in ENCODERS:
        raise UserError(f"the video {out} must end in {' or '.join(ENCODERS)}")
    use_offscreen_rendering()
    with AgentRenderer(run, seed, checkpoint, max_steps, **source) as renderer:
        write_video(out, renderer.frames(episodes), renderer.fps)
    if renderer.num_cut:
        note(
            f"{renderer.num_cut} of {episodes} episodes were cut after {renderer.max_steps:,} steps, before they ended"
        )
    return renderer.returns


def use_offscreen_rendering() -> None:
    """Let pygame render on a machine without a screen.

    Replaces SDL's driver `dummy`, with which some environments draw nothing, by `offscreen`.
    """
    if headless() and os.environ.get("SDL_VIDEODRIVER", "dummy") == "dummy":
        os.environ["SDL_VIDEODRIVER"] = "offscreen"


class AgentRenderer:
    """Run an agent in its environment and render each step. `returns` holds the returns of finished episodes.

    Episodes are cut after `max_steps`, by default the run's `eval_max_steps`. `num_cut` counts them.
    """

    def __init__(
        self,
        run: RunPath | Agent,
        seed: int = 0,
        checkpoint: str | int = "last",
        max_steps: int | None = None,
        **source: Any,
    ) -> None:
        """`source` has the arguments of `open_source`."""
        cfg, folder = open_source(run, **source)  # not by `load`, which doesn't check the code of the environment
        if isinstance(run, Agent):
            self.agent = run
            self.agent.reset()
        else:
            assert folder is not None
            self.agent = load_agent(folder, cfg, checkpoint)
        self.seed = seed
        self.env = make_rendered_env(cfg.env.name, cfg.env.options, cfg.vector)
        self.agent.policy.bind_env(self.env)
        self.returns: list[float] = []
        default_steps = default_eval_steps(self.env.max_episode_steps, self.agent.longest_episode)
        self.max_steps, self.num_cut = max_steps or cfg.eval_max_steps or default_steps, 0

    @property
    def fps(self) -> float:
        return float(self.env.metadata["render_fps"])

    def frames(self, episodes: int) -> Iterator[Any]:
        """Yield the frames of each episode, from its first observation to its last."""
        env, agent = self.env, self.agent
        obs, info = env.reset(seed=derive_seed(self.seed, "record"))
        yield env.render()
        episode_return, steps = 0.0, 0
        while True:
            obs, reward, terminated, truncated, info = env.step(agent.act(obs, info.get("action_mask")))
            episode_return += float(np.mean(reward[0]))
            steps += 1
            ended = terminated[0] or truncated[0]
            cut = not ended and steps == self.max_steps
            if ended or cut:
                self.returns.append(episode_return)
                self.num_cut += cut
                yield env.render()  # the final frame
                if len(self.returns) == episodes:
                    return
                episode_return, steps = 0.0, 0
                agent.reset()
            if cut:
                obs, info = env.reset(seed=derive_seed(self.seed, "record", len(self.returns)))
            yield env.render()

    def __enter__(self) -> AgentRenderer:
        return self

    def __exit__(self, *error: object) -> None:
        self.env.close()


def make_rendered_env(
    name: str, options: dict[str, Any], vector: VectorConfig, crashes: Path | None = None
) -> envs.VectorEnv:
    """Make a vector of one environment that renders.

    The first frame after the end of an episode is its final frame, which the vector environment's autoreset would skip.
    A user's vector environment renders the first frame of the next episode instead.
    """
    try:
        return envs.make_small_vector(FinalFrameEnv(name, {**options, "render_mode": "rgb_array"}), 1, vector, crashes)
    except UserError as error:
        raise UserError(f"{name} can't be recorded: {error}") from error


def write_video(path: Path, frames: Iterable[Any], fps: float) -> None:
    with VideoWriter(path, fps) as video:
        for frame in frames:
            video.add(frame)


class VideoWriter:
    """Write an .mp4 or .gif file frame by frame. A temporary file is renamed to `path` when the video is complete."""

    def __init__(self, path: Path, fps: float) -> None:
        self.path, self.fps = path, fps
        self.temporary = path.with_name(f".{path.stem}.tmp{path.suffix.lower()}")
        self._writer: Any = None
        self._even_size = (0, 0)  # players expect even sizes: odd ones get a black row or column
        self._first_frame: Any = None
        self.num_frames, self.all_equal = 0, True

    def __enter__(self) -> VideoWriter:
        return self

    def add(self, frame: Any) -> None:
        if not isinstance(frame, np.ndarray) or frame.shape[2:] != (3,) or frame.dtype != np.uint8:
            raise UserError(
                "this environment renders no images: render() must return an RGB array of uint8 (height, width, 3)"
            )
        height, width = frame.shape[:2]
        try:
            if self._writer is None:
                self._open(height, width)
                self._first_frame = frame.copy()
            self.num_frames += 1
            self.all_equal = self.all_equal and np.array_equal(frame, self._first_frame)
            padded = np.zeros((*self._even_size, 3), np.uint8)
            padded[:height, :width] = frame
            self._writer.send(padded)
        except OSError as error:
            raise self._write_error(error) from None

    def _open(self, height: int, width: int) -> None:
        import imageio_ffmpeg

        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._even_size = (height + height % 2, width + width % 2)
        self._writer = imageio_ffmpeg.write_frames(
            str(self.temporary),
            self._even_size[::-1],
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
        self._writer.close()  # also after a failed frame: it holds a process
        try:
            if kind is None:
                self._check_complete()
                self.temporary.replace(self.path)
                self._warn_if_all_equal()
        except OSError as failure:
            raise self._write_error(failure) from None
        finally:
            self.temporary.unlink(missing_ok=True)

    def _warn_if_all_equal(self) -> None:
        if self.all_equal and self.num_frames > 1:
            problem = "equal" if self._first_frame.any() else "black"
            hint = "check the environment's render() and, without a screen, its options for offscreen rendering"
            write_stderr(f"warning: all {self.num_frames} frames of {self.path} are {problem}; {hint}")

    def _check_complete(self) -> None:
        """Raise `OSError` if the file is incomplete: the encoder doesn't report an error on its last bytes."""
        import imageio_ffmpeg

        try:
            imageio_ffmpeg.count_frames_and_secs(str(self.temporary))
        except RuntimeError:
            raise OSError("the encoder could not finish it; is the disk full?") from None

    def _write_error(self, error: OSError) -> UserError:
        return UserError(f"can't write the video {self.path}: {error.strerror or str(error).splitlines()[0]}")

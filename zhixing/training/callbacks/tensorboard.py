"""Log to TensorBoard the same values as metrics.csv."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from zhixing import config
from zhixing.errors import note
from zhixing.training.callbacks.scalars import ScalarLogger

if TYPE_CHECKING:
    from torch import Tensor

    from zhixing.training.loop import TrainingLoop

RESULT = "eval/mean_return"  # metric in the HPARAMS tab


class TensorBoard(ScalarLogger):
    """Write scalars, settings and videos of evaluations.

    Scalars are in the groups `time/`, `rollout/`, `train/`, `eval/` and `custom/` (from `loop.log`), settings are text
    and hyperparameters, videos are animated images. If events can't be written, training continues without them.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self._writer: Any = None  # None before training, and after a write error

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._write_events(lambda writer: writer.close())

    def train_begin(self, loop: TrainingLoop) -> None:
        from torch.utils.tensorboard import SummaryWriter  # slow to import

        # hide events after the checkpoint of a resumed run, so none appears twice
        resumed = loop.steps > 0 or any(self.folder.glob("events.out.tfevents.*"))
        try:
            self._writer = SummaryWriter(str(self.folder), purge_step=loop.steps + 1 if resumed else None)
        except OSError as error:
            self._fail(error)
        self._write_events(
            lambda writer: writer.add_text("settings", f"```yaml\n{config.dump(loop.cfg)}```", loop.steps)
        )
        if not resumed:
            self._write_events(
                lambda writer: _add_hyperparameters(writer, config.flat_settings(loop.cfg.model_dump(mode="json")))
            )

    def iteration_end(self, loop: TrainingLoop, metrics: Mapping[str, Tensor]) -> None:
        super().iteration_end(loop, metrics)
        if loop.is_due(loop.cfg.checkpoint_every) or loop.ending:
            self._write_events(lambda writer: writer.flush())  # a resumed run won't write events before the checkpoint

    def write_scalars(self, values: Mapping[str, float], steps: int) -> None:
        def add(writer: Any) -> None:
            for name, value in values.items():
                writer.add_scalar(name, value, steps)

        self._write_events(add)

    def video_recorded(self, loop: TrainingLoop, path: Path) -> None:
        with loop.paused():
            gif = to_gif(path)
            if gif is not None:
                self._write_events(lambda writer: _add_gif(writer, "eval/video", gif, loop.steps))

    def _write_events(self, action: Callable[[Any], None]) -> None:
        if self._writer is not None:
            try:
                action(self._writer)
            except OSError as error:
                self._fail(error)

    def _fail(self, error: OSError) -> None:
        note(f"TensorBoard events in {self.folder} can't be written: {error.strerror or error}; training continues")
        self._writer = None


def _add_hyperparameters(writer: Any, settings: Mapping[str, Any]) -> None:
    """Write settings for the HPARAMS tab into the run itself; `SummaryWriter.add_hparams` makes a second run."""
    from torch.utils.tensorboard.summary import hparams

    kinds = (bool, int, float, str)
    plain = {name: value if isinstance(value, kinds) else str(value) for name, value in settings.items()}
    for summary in hparams(plain, {RESULT: 0.0}):
        writer.file_writer.add_summary(summary)


def _add_gif(writer: Any, name: str, gif: bytes, step: int) -> None:
    from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]

    width, height = int.from_bytes(gif[6:8], "little"), int.from_bytes(gif[8:10], "little")
    image = Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=gif)
    writer.file_writer.add_summary(Summary(value=[Summary.Value(tag=name, image=image)]), step)


def to_gif(video: Path, width: int = 160, fps: int = 10, seconds: int = 20) -> bytes | None:
    """Return the beginning of a video as a small GIF, which TensorBoard shows as an image; None if that fails."""
    from imageio_ffmpeg import get_ffmpeg_exe

    scale = f"fps={fps},scale='min({width},iw)':-2"
    command = [get_ffmpeg_exe(), "-v", "error", "-i", str(video), "-t", str(seconds), "-vf", scale, "-f", "gif", "-"]
    try:
        result = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout if result.returncode == 0 and result.stdout[:3] == b"GIF" else None

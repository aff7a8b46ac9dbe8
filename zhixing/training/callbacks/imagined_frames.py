"""Save images that compare predictions of a world model with real frames."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.image import imsave

from zhixing.core.seeding import derive_seed
from zhixing.errors import note
from zhixing.training.callbacks.base import Callback

if TYPE_CHECKING:
    from zhixing.collectors.evaluation import Evaluation
    from zhixing.training.loop import TrainingLoop

SEQUENCES = 4  # per image
MIN_FRAME_SIZE = 64  # pixels


class ImaginedFrames(Callback):
    """Write `imagined/STEPS.png` at each evaluation, with three rows for each of some sequences of the replay buffer.

    The rows are the real frames, the model's frames (reconstructed for the first steps, then predicted), and their
    difference. Nothing is written if the learner has no `dream_frames`, if that returns None, or if the buffer is too
    short.
    """

    def __init__(self, run: Path) -> None:
        self.folder = run / "imagined"

    def evaluation_end(self, loop: TrainingLoop, evaluation: Evaluation) -> None:
        dream = getattr(loop.learner, "dream_frames", None)
        if dream is None or not loop.has_buffer or not loop.buffer.ready:
            return
        # a separate generator, so the images don't change the run
        rng = np.random.default_rng(derive_seed(loop.cfg.seed, "imagine", loop.env_steps))
        with loop.paused():
            frames = dream(loop.buffer.sample(SEQUENCES, rng))
            if frames is not None:
                try:
                    self.folder.mkdir(parents=True, exist_ok=True)
                    imsave(self.folder / f"{loop.env_steps:012d}.png", strip(frames.cpu().numpy()))
                except OSError as error:
                    note(f"no image in {self.folder}: {error.strerror or error}; training continues")


def strip(frames: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Arrange frames `[B,3,T,H,W,C]` in one image `[height,width,3]`, with time to the right and sequences separated.

    If C isn't 3, the last channel is shown, which is the newest frame of a stack.
    """
    if frames.shape[-1] != 3:
        frames = np.repeat(frames[..., -1:], 3, axis=-1)
    zoom = -(-MIN_FRAME_SIZE // min(frames.shape[3:5]))
    frames = frames.repeat(zoom, axis=3).repeat(zoom, axis=4)
    frames = np.pad(frames, [(0, 0), (0, 0), (0, 0), (0, 1), (0, 1), (0, 0)], constant_values=255)  # white lines
    rows = frames.transpose(0, 1, 3, 2, 4, 5)  # [B,3,H,T,W,C]
    rows = rows.reshape(len(frames), -1, rows.shape[3] * rows.shape[4], 3)
    rows = np.pad(rows, [(0, 0), (0, MIN_FRAME_SIZE // 8), (0, 0), (0, 0)], constant_values=255)
    image: np.ndarray[Any, Any] = rows.reshape(-1, *rows.shape[2:])
    return image

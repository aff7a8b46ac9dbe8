"""Pictures of what a model of the world imagines, beside what really happened."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.image import imsave

from zhixing.core.seeding import derive_seed
from zhixing.errors import note
from zhixing.training.callbacks.base import Callback

if TYPE_CHECKING:
    from zhixing.collect.evaluation import Evaluation
    from zhixing.training.loop import TrainingLoop

SEQUENCES = 4  # of the replay, to a picture
LARGE = 64  # pixels of a frame's side, at least


class Imagine(Callback):
    """At each evaluation writes `imagined/STEPS.png`: for some sequences of the replay a strip of real frames, one of
    what the model made of them, seen for its first steps and imagined from there on, and one of their difference.

    Does nothing where the learner has no `dream_frames`, where this gives none, or where the replay is too short.
    """

    def __init__(self, run: Path) -> None:
        self.folder = run / "imagined"

    def evaluation_end(self, loop: TrainingLoop, evaluation: Evaluation) -> None:
        dream = getattr(loop.learner, "dream_frames", None)
        if dream is None or not loop.has_buffer or not loop.buffer.ready:
            return
        # a generator of its own: looking changes nothing in the run
        rng = np.random.default_rng(derive_seed(loop.cfg.seed, "imagine", loop.env_steps))
        with loop.paused():
            frames = dream(loop.buffer.sample(SEQUENCES, rng))
            if frames is not None:
                try:
                    self.folder.mkdir(parents=True, exist_ok=True)
                    imsave(self.folder / f"{loop.env_steps:012d}.png", strip(frames.cpu().numpy()))
                except OSError as error:
                    note(f"no picture in {self.folder}: {error.strerror or error}; training goes on")


def strip(frames: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Frames `[B,3,T,H,W,C]` as one picture `[height,width,3]`: time to the right, the three kinds of each sequence
    below each other, sequences apart. Of more channels than colours the last one is shown, the newest of a stack."""
    if frames.shape[-1] != 3:
        frames = np.repeat(frames[..., -1:], 3, axis=-1)
    times = -(-LARGE // min(frames.shape[3:5]))
    frames = frames.repeat(times, axis=3).repeat(times, axis=4)
    frames = np.pad(frames, [(0, 0), (0, 0), (0, 0), (0, 1), (0, 1), (0, 0)], constant_values=255)  # thin white lines
    rows = frames.transpose(0, 1, 3, 2, 4, 5)  # [B,3,H,T,W,C]
    rows = rows.reshape(len(frames), -1, rows.shape[3] * rows.shape[4], 3)
    apart = np.pad(rows, [(0, 0), (0, LARGE // 8), (0, 0), (0, 0)], constant_values=255)
    picture: np.ndarray[Any, Any] = apart.reshape(-1, *apart.shape[2:])
    return picture

"""The callbacks of a run."""

from __future__ import annotations

from zhixing.training.callbacks import (
    Callback,
    Checkpoint,
    Csv,
    Evaluate,
    EvalVideo,
    Plot,
    Progress,
    StopOnNonFinite,
    TensorBoard,
)
from zhixing.training.loop import TrainingLoop
from zhixing.training.run_folder import RunFolder


def build_callbacks(
    loop: TrainingLoop, folder: RunFolder, evaluate: Evaluate, own: list[Callback], *, quiet: bool = False
) -> list[Callback]:
    """Make the callbacks in the order in which they are called.

    Evaluations come before `own` callbacks, which see their results, and before the logs, which write them. The
    checkpoint comes last, so it holds the state of all others. Without output in the terminal if `quiet`.
    """
    cfg, learner = loop.cfg, loop.learner
    callbacks: list[Callback] = [StopOnNonFinite(folder), evaluate, *own, Csv(folder.metrics_file)]
    if cfg.tensorboard:
        callbacks.append(TensorBoard(folder.path))
    if hasattr(learner, "dream_frames"):
        from zhixing.training.callbacks.imagined_frames import ImaginedFrames  # imports a drawing library

        callbacks.append(ImaginedFrames(folder.path))
    video_at = len(callbacks)
    if cfg.plot is not None:
        draw = Plot(folder.path, cfg.plot)
        draw.check(loop)
        callbacks.append(draw)
    if not quiet:
        callbacks.append(Progress(folder=folder.given))
    callbacks.append(Checkpoint(folder))
    if cfg.eval_video and evaluate.evaluator is not None:
        # made last: it has an environment, which nobody would close if another callback failed
        callbacks.insert(video_at, EvalVideo(folder, learner.policy, cfg, cfg.device))
    return callbacks

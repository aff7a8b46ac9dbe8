"""Build the callbacks of a run."""

from __future__ import annotations

from zhixing.training.callbacks import (
    Callback,
    Checkpoint,
    Csv,
    Evaluate,
    EvalVideo,
    MLflow,
    Plot,
    Progress,
    StopOnNonFinite,
    TensorBoard,
    WandB,
)
from zhixing.training.loop import TrainingLoop
from zhixing.training.run_folder import RunFolder


def build_callbacks(
    loop: TrainingLoop, folder: RunFolder, evaluate: Evaluate, custom: list[Callback], *, quiet: bool = False
) -> list[Callback]:
    """Build the callbacks in the order in which they are called.

    Evaluations come before the `custom` callbacks and the logs, which read their results. The checkpoint comes last, so
    it has the state of all others. With `quiet`, no progress is printed.
    """
    cfg, learner = loop.cfg, loop.learner
    callbacks: list[Callback] = [StopOnNonFinite(folder), evaluate, *custom, Csv(folder.metrics_file)]
    if cfg.tensorboard:
        callbacks.append(TensorBoard(folder.path))
    if cfg.wandb is not None:
        callbacks.append(WandB(folder, cfg.wandb))
    if cfg.mlflow is not None:
        callbacks.append(MLflow(folder, cfg.mlflow))
    if hasattr(learner, "dream_frames"):
        from zhixing.training.callbacks.imagined_frames import ImaginedFrames  # imports matplotlib, which is slow

        callbacks.append(ImaginedFrames(folder.path))
    video_at = len(callbacks)
    if cfg.plot is not None:
        plot = Plot(folder.path, cfg.plot)
        plot.check(loop)
        callbacks.append(plot)
    if not quiet:
        callbacks.append(Progress(folder=folder.given))
    callbacks.append(Checkpoint(folder))
    if cfg.eval_video and evaluate.evaluator is not None:
        # built last, so its environment isn't left open if another callback can't be built
        callbacks.insert(video_at, EvalVideo(folder, learner.policy, cfg, cfg.device))
    return callbacks

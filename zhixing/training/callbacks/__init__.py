"""Callbacks for logging, checkpoints and evaluations. Derive custom ones from `Callback`."""

from zhixing.training.callbacks.base import Callback
from zhixing.training.callbacks.checkpoint import Checkpoint
from zhixing.training.callbacks.csv import Csv
from zhixing.training.callbacks.eval_video import EvalVideo
from zhixing.training.callbacks.evaluate import Evaluate
from zhixing.training.callbacks.mlflow import MLflow
from zhixing.training.callbacks.nonfinite import StopOnNonFinite
from zhixing.training.callbacks.plot import Plot
from zhixing.training.callbacks.progress import Progress
from zhixing.training.callbacks.tensorboard import TensorBoard
from zhixing.training.callbacks.wandb import WandB

__all__ = [
    "Callback",
    "Checkpoint",
    "Csv",
    "EvalVideo",
    "Evaluate",
    "MLflow",
    "Plot",
    "Progress",
    "StopOnNonFinite",
    "TensorBoard",
    "WandB",
]

"""What happens besides learning: logs, checkpoints, evaluation. The base class is there for your own."""

from zhixing.training.callbacks.base import Callback
from zhixing.training.callbacks.checkpoint import Checkpoint
from zhixing.training.callbacks.csv import Csv
from zhixing.training.callbacks.draw import Draw
from zhixing.training.callbacks.evaluate import Evaluate
from zhixing.training.callbacks.film import Film
from zhixing.training.callbacks.nonfinite import StopOnNonFinite
from zhixing.training.callbacks.progress import Progress
from zhixing.training.callbacks.tensorboard import TensorBoard

__all__ = ["Callback", "Checkpoint", "Csv", "Draw", "Evaluate", "Film", "Progress", "StopOnNonFinite", "TensorBoard"]

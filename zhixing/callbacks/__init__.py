"""What happens besides learning: logs, checkpoints, evaluation. The base class is there for your own."""

from zhixing.callbacks.base import Callback
from zhixing.callbacks.checkpoint import Checkpoint
from zhixing.callbacks.csv import Csv
from zhixing.callbacks.draw import Draw
from zhixing.callbacks.evaluate import Evaluate
from zhixing.callbacks.film import Film
from zhixing.callbacks.nonfinite import StopOnNonFinite
from zhixing.callbacks.progress import Progress
from zhixing.callbacks.tensorboard import TensorBoard

__all__ = ["Callback", "Checkpoint", "Csv", "Draw", "Evaluate", "Film", "Progress", "StopOnNonFinite", "TensorBoard"]

"""Stop training when a loss or gradient is NaN or Inf."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from zhixing.core.learner import LazyMetrics
from zhixing.errors import NonFiniteError
from zhixing.training.callbacks.base import Callback
from zhixing.training.run_folder import RunFolder

if TYPE_CHECKING:
    from torch import Tensor

    from zhixing.training.loop import TrainingLoop


class StopOnNonFinite(Callback):
    """Raise `NonFiniteError` after an iteration with a non-finite metric or gradient, and save the batch.

    The optimizer has skipped such steps, so the weights are good. This callback comes before those that save.
    """

    def __init__(self, folder: RunFolder | None = None) -> None:
        """Without a folder the batch isn't saved."""
        self.folder = folder

    def iteration_end(self, loop: TrainingLoop, metrics: Mapping[str, Tensor]) -> None:
        floats = metrics.floats() if isinstance(metrics, LazyMetrics) else map(float, metrics.values())
        bad = [name for name, value in zip(metrics, floats, strict=True) if not math.isfinite(value)]
        if bad or loop.learner.skipped_steps():
            name = bad[0] if bad else "a gradient"
            value = f" is {float(metrics[name])}" if bad else " is not finite"
            parameters = loop.learner.nonfinite_parameters()
            first = f"; the first non-finite gradient is that of {parameters[0]}" if parameters else ""
            raise NonFiniteError(
                f"{name}{value} at environment step {loop.env_steps}, update {loop.updates}; this update didn't "
                f"change the weights{first}. {self._save_batch(loop)}Try a lower lr or max_grad_norm, and check the "
                f"rewards"
            )

    def _save_batch(self, loop: TrainingLoop) -> str:
        if self.folder is None or loop.batch is None:
            return ""
        try:
            return f"The batch is in {self.folder.save_batch(loop.batch, loop.steps)}. "
        except OSError as error:
            return f"The batch can't be saved: {error.strerror or error}. "

"""Stop when a loss or gradient is NaN or Inf."""

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
    """The optimizer left the weights alone in such a step; this names what was wrong, once per iteration, and keeps
    the batch. It stands before what saves checkpoints, so that the last good one stays."""

    def __init__(self, folder: RunFolder | None = None) -> None:
        """Without a folder the batch isn't kept."""
        self.folder = folder

    def iteration_end(self, loop: TrainingLoop, metrics: Mapping[str, Tensor]) -> None:
        floats = metrics.floats() if isinstance(metrics, LazyMetrics) else map(float, metrics.values())
        bad = [name for name, value in zip(metrics, floats, strict=True) if not math.isfinite(value)]
        if bad or loop.learner.skipped_steps():
            name = bad[0] if bad else "a gradient"
            value = f" is {float(metrics[name])}" if bad else " was not finite"
            broken = loop.learner.nonfinite_parameters()
            first = f"; the first gradient that wasn't finite was that of {broken[0]}" if broken else ""
            raise NonFiniteError(
                f"{name}{value} at environment step {loop.env_steps}, update {loop.updates}; the weights were not "
                f"changed by it{first}. {self._keep(loop)}Try a lower lr, a smaller max_grad_norm, or look at the "
                f"rewards"
            )

    def _keep(self, loop: TrainingLoop) -> str:
        if self.folder is None or loop.batch is None:
            return ""
        try:
            return f"The batch is in {self.folder.save_batch(loop.batch, loop.steps)}. "
        except OSError as error:
            return f"The batch can't be kept: {error.strerror or error}. "

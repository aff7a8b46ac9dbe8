"""Stop when a loss or gradient is NaN or Inf."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from zhixing.callbacks.base import Callback
from zhixing.errors import NonFiniteError

if TYPE_CHECKING:
    from torch import Tensor

    from zhixing.trainer import Loop


class StopOnNonFinite(Callback):
    """The optimizer left the weights alone in such a step; this names what was wrong, once per iteration."""

    def iteration_end(self, loop: Loop, metrics: Mapping[str, Tensor]) -> None:
        bad = [name for name, value in metrics.items() if not math.isfinite(float(value))]
        if bad or loop.learner.skipped_steps():
            name = bad[0] if bad else "a gradient"
            value = f" is {float(metrics[name])}" if bad else " was not finite"
            raise NonFiniteError(
                f"{name}{value} at environment step {loop.env_steps}, update {loop.updates}; the weights were not "
                f"changed by it. Try a lower lr, a smaller max_grad_norm, or look at the rewards"
            )

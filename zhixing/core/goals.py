"""Reward functions of goal-conditioned environments, which hindsight experience replay calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from zhixing.errors import UserError

Array = np.ndarray[Any, Any]
# (achieved_goal [B,n], desired_goal [B,n], info) -> one value per row
GoalFunction = Callable[[Array, Array, dict[str, Any]], Any]


def compute_per_row(compute: GoalFunction, achieved: Array, desired: Array) -> Array:
    """Return one value per row. A function that doesn't accept batches is called once per row."""
    values = np.asarray(compute(achieved, desired, {}))
    if values.shape != (len(achieved),):
        values = np.array([compute(*pair, {}) for pair in zip(achieved, desired, strict=True)])
    if values.shape != (len(achieved),):
        raise UserError(
            f"HER: {compute} returns values of shape {list(values.shape[1:])} per pair of goals; expected one number"
        )
    return values

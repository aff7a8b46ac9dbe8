"""Functions of pairs of goals, which environments have and hindsight replay uses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from zhixing.errors import UserError

Array = np.ndarray[Any, Any]
GoalFunction = Callable[
    [Array, Array, dict[str, Any]], Any
]  # (achieved [B,n], desired [B,n], info) to one value per row


def compute_per_row(compute: GoalFunction, achieved: Array, desired: Array) -> Array:
    """Return one value per row, also of a function that takes no more than one row."""
    values = np.asarray(compute(achieved, desired, {}))
    if values.shape != (len(achieved),):
        values = np.array([compute(*pair, {}) for pair in zip(achieved, desired, strict=True)])
    if values.shape != (len(achieved),):
        raise UserError(f"hindsight: {compute} gives {list(values.shape[1:])} per pair of goals, expected one number")
    return values

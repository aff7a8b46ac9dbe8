"""Reward functions of goal-conditioned environments, which hindsight experience replay calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from zhixing.errors import UserError

Array = np.ndarray[Any, Any]
# (achieved_goal [B,n], desired_goal [B,n], info) -> one value per row
GoalFunction = Callable[[Array, Array, dict[str, Any]], Any]


def compute_per_row(
    compute: GoalFunction, achieved: Array, desired: Array, info: Mapping[str, Array] | None = None
) -> Array:
    """Return one value per row. `info` has arrays [B,...].

    A function that doesn't accept batches is called once per row.
    """
    arrays = dict(info or {})
    values = np.asarray(compute(achieved, desired, arrays))
    if values.shape != (len(achieved),):
        rows = [{key: array[i] for key, array in arrays.items()} for i in range(len(achieved))]
        values = np.array([compute(*row) for row in zip(achieved, desired, rows, strict=True)])
    if values.shape != (len(achieved),):
        raise UserError(
            f"HER: {compute} returns values of shape {list(values.shape[1:])} per pair of goals; expected one number"
        )
    return values

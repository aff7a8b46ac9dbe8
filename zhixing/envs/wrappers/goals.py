"""Functions of environments with goals: the reward, or the end, of any pair of goals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from zhixing.envs.vector.step_buffers import Array
from zhixing.errors import UserError

Compute = Callable[[Array, Array, dict[str, Any]], Any]  # (achieved [B,n], desired [B,n], info) to one value per row
REWARD, TERMINATED = "compute_reward", "compute_terminated"


def functions_of(env: Any) -> dict[str, Compute]:
    """Return those of the two functions that a gymnasium.Env has, by name."""
    task = env.unwrapped
    return {name: getattr(task, name) for name in (REWARD, TERMINATED) if callable(getattr(task, name, None))}


def one_per_row(compute: Compute, achieved: Array, desired: Array) -> Array:
    """Return one value per row, also of a function that takes no more than one row."""
    values = np.asarray(compute(achieved, desired, {}))
    if values.shape != (len(achieved),):
        values = np.array([compute(*pair, {}) for pair in zip(achieved, desired, strict=True)])
    if values.shape != (len(achieved),):
        raise UserError(f"hindsight: {compute} gives {list(values.shape[1:])} per pair of goals, expected one number")
    return values

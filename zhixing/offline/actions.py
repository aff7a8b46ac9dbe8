"""Actions as tasks take them and as policies choose them: disks hold the first, datasets the second."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete

from zhixing.core.spaces import Spaces
from zhixing.offline.recording import Array

TOLERANCE = 1e-3  # of half a box's width: how far rounding may carry an action out of its bounds


def to_task(spaces: Spaces, action: Array) -> Array:
    return np.asarray(spaces.to_env(action)).astype(action.dtype, copy=False)


def to_policy(spaces: Spaces, action: Array) -> Array:
    """Rounding errors at the bounds are cut off; actions that are truly outside stay so, for the check to find."""
    if not _same_scale(spaces):
        action = np.asarray(spaces.from_env(action)).astype(action.dtype, copy=False)
    if not _bounded(spaces):
        return action
    near = np.abs(action) <= 1.0 + TOLERANCE
    return np.where(near, np.clip(action, -1.0, 1.0), action)


def map_to_policy(spaces: Spaces, action: Array, rows: int) -> Array:
    """`to_policy` of an array that may be a mapped file: it stays one where nothing changes, else is held in memory."""
    chunks = [slice(start, start + rows) for start in range(0, len(action), rows)]
    if _same_scale(spaces) and not (_bounded(spaces) and any((np.abs(action[part]) > 1.0).any() for part in chunks)):
        return action
    scaled = np.empty_like(action)
    for part in chunks:
        scaled[part] = to_policy(spaces, action[part])
    return scaled


def outside(spaces: Spaces, action: Array) -> Array:
    """Which numbers of actions, in the policy's scale, are none that the task takes."""
    space = spaces.action
    low: Any
    high: Any
    if isinstance(space, Discrete):
        low, high = 0, space.n - 1
    elif isinstance(space, MultiDiscrete):
        low, high = 0, space.nvec - 1
    elif isinstance(space, MultiBinary):
        low, high = 0, 1
    elif _bounded(spaces):
        low, high = -1.0 - TOLERANCE, 1.0 + TOLERANCE
    else:
        assert isinstance(space, Box)
        low, high = space.low - TOLERANCE, space.high + TOLERANCE
    return (action < low) | (action > high)


def as_task_would_say(spaces: Spaces, action: Array) -> Array:
    """`to_task` for messages: what is out of bounds stays out."""
    box = spaces.action
    if isinstance(box, Box) and _bounded(spaces):
        return np.asarray(box.low + (action + 1.0) * (0.5 * (box.high - box.low)))
    return to_task(spaces, action)


def _bounded(spaces: Spaces) -> bool:
    return isinstance(spaces.action, Box) and spaces.action.is_bounded()


def _same_scale(spaces: Spaces) -> bool:
    space = spaces.action
    if isinstance(space, Box) and space.is_bounded():
        return bool((space.low == -1.0).all() and (space.high == 1.0).all())
    return not (isinstance(space, (Discrete, MultiDiscrete)) and np.any(space.start))

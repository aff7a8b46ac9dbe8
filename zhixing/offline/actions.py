"""Scales of actions: files hold the actions of the environment, datasets those of the policy, from -1 to 1."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete

from zhixing.core.spaces import Spaces
from zhixing.offline.chunks import Array

TOLERANCE = 1e-3  # rounding errors of actions at their bounds, as a fraction of half a box's width


def to_env(spaces: Spaces, action: Array) -> Array:
    """Return actions of the policy in the environment's scale, clipped to its bounds."""
    return np.asarray(spaces.to_env(action)).astype(action.dtype, copy=False)


def from_env(spaces: Spaces, action: Array) -> Array:
    """Return actions of the environment in the policy's scale.

    Rounding errors at the bounds are clipped. Other actions out of bounds stay as they are, for the check to report.
    """
    if not _same_scale(spaces):
        action = np.asarray(spaces.from_env(action)).astype(action.dtype, copy=False)
    if not _bounded(spaces):
        return action
    near = np.abs(action) <= 1.0 + TOLERANCE
    return np.where(near, np.clip(action, -1.0, 1.0), action)


def from_env_by_chunks(spaces: Spaces, action: Array, rows: int) -> Array:
    """Return `from_env` of a memory-mapped array: the array itself if nothing changes, else a copy in memory."""
    chunks = [slice(start, start + rows) for start in range(0, len(action), rows)]
    if _same_scale(spaces) and not (_bounded(spaces) and any((np.abs(action[part]) > 1.0).any() for part in chunks)):
        return action
    scaled = np.empty_like(action)
    for part in chunks:
        scaled[part] = from_env(spaces, action[part])
    return scaled


def out_of_bounds(spaces: Spaces, action: Array) -> Array:
    """Return which elements of actions, in the policy's scale, lie outside the action space."""
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


def to_env_unclipped(spaces: Spaces, action: Array) -> Array:
    """Return `to_env` without clipping, for error messages about actions out of bounds."""
    box = spaces.action
    if isinstance(box, Box) and _bounded(spaces):
        return np.asarray(box.low + (action + 1.0) * (0.5 * (box.high - box.low)))
    return to_env(spaces, action)


def _bounded(spaces: Spaces) -> bool:
    return isinstance(spaces.action, Box) and spaces.action.is_bounded()


def _same_scale(spaces: Spaces) -> bool:
    """Return whether the environment's actions have the policy's scale."""
    space = spaces.action
    if isinstance(space, Box) and space.is_bounded():
        return bool((space.low == -1.0).all() and (space.high == 1.0).all())
    return not (isinstance(space, (Discrete, MultiDiscrete)) and np.any(space.start))

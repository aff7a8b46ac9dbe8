"""Scales of actions: files hold the actions of the environment, datasets those of the policy, from -1 to 1.

Both hold composite actions as vectors, whose columns `zhixing.core.action_layout` describes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.spaces import Box, Discrete

from zhixing.core.spaces import Spaces
from zhixing.offline.chunks import Array

TOLERANCE = 1e-3  # rounding errors of actions at their bounds, as a fraction of half a box's width


def to_env(spaces: Spaces, action: Array) -> Array:
    """Return actions of the policy in the environment's scale, clipped to its bounds."""
    return np.asarray(spaces.flatten_action(spaces.to_env(action))).astype(action.dtype, copy=False)


def from_env(spaces: Spaces, action: Array) -> Array:
    """Return actions of the environment in the policy's scale.

    Rounding errors at the bounds are clipped. Other actions out of bounds stay as they are, for the check to report.
    """
    if not _same_scale(spaces):
        converted = spaces.layout.unscale(action) if spaces.composite else spaces.from_env(action)
        action = np.asarray(converted).astype(action.dtype, copy=False)
    if not _clipped(spaces):
        return action
    low, high = _bounds(spaces, action)
    near = (action >= low - TOLERANCE) & (action <= high + TOLERANCE)
    return np.where(near, np.clip(action, low, high), action)


def from_env_by_chunks(spaces: Spaces, action: Array, rows: int) -> Array:
    """Return `from_env` of a memory-mapped array: the array itself if nothing changes, else a copy in memory."""
    chunks = [slice(start, start + rows) for start in range(0, len(action), rows)]
    low, high = _bounds(spaces, action)
    outside = (((action[part] < low) | (action[part] > high)).any() for part in chunks)
    if _same_scale(spaces) and not (_clipped(spaces) and any(outside)):
        return action
    scaled = np.empty_like(action)
    for part in chunks:
        scaled[part] = from_env(spaces, action[part])
    return scaled


def out_of_bounds(spaces: Spaces, action: Array) -> Array:
    """Return which elements of actions, in the policy's scale, lie outside the action space."""
    low, high = _bounds(spaces, action)
    if not spaces.composite:
        tolerance: Any = 0 if spaces.discrete else TOLERANCE
        return np.asarray((action < low - tolerance) | (action > high + tolerance))
    integer = np.arange(spaces.layout.num_columns) < spaces.layout.num_columns - spaces.layout.num_continuous
    tolerance = np.where(integer, 0.0, TOLERANCE)
    fractional = integer & (action != np.round(action))
    return np.asarray((action < low - tolerance) | (action > high + tolerance) | fractional)


def to_env_unclipped(spaces: Spaces, action: Array) -> Array:
    """Return `to_env` without clipping, for error messages about actions out of bounds."""
    if spaces.composite or _clipped(spaces):
        return spaces.layout.rescale(action)
    return to_env(spaces, action)


def _bounds(spaces: Spaces, action: Array) -> tuple[Any, Any]:
    """Return the bounds of actions in the policy's scale, in their dtype: comparing is fastest then."""
    layout = spaces.layout
    if isinstance(spaces.action, Discrete):
        return 0, layout.sizes[0] - 1
    return layout.minimum.astype(action.dtype), layout.maximum.astype(action.dtype)


def _clipped(spaces: Spaces) -> bool:
    """Return whether rounding errors of actions are clipped: of bounded Boxes, and of vectors of composite actions."""
    return spaces.composite or (isinstance(spaces.action, Box) and spaces.action.is_bounded())


def _same_scale(spaces: Spaces) -> bool:
    """Return whether the environment's actions have the policy's scale."""
    layout = spaces.layout
    return bool((layout.scale == 1.0).all() and (layout.low + layout.shift == 0.0).all())

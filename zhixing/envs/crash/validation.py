"""Validate what environments return: shapes, dtypes and ranges of observations, and finite numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Discrete, MultiDiscrete

from zhixing.core.spaces import Spaces, space_fields
from zhixing.core.tree import Tree, tree_leaves
from zhixing.envs.api import MisbehaviorError
from zhixing.envs.env_spec import EnvSpec, Path
from zhixing.envs.vector.step_buffers import Array

MAX_DOT_SIZE = 8192  # elements; BLAS may start threads for a longer dot product


def obs_validators(env_spec: EnvSpec) -> list[Callable[[Any], None]]:
    """Return one function per array of an observation.

    It raises `MisbehaviorError` for a value that the array can't store, because of its shape, dtype or range.
    """
    spaces, leaves = env_spec.spaces, leaf_spaces(env_spec.spaces.obs)
    return [_obs_validator(space, spaces, path) for space, path in zip(leaves, env_spec.paths, strict=True)]


def leaf_spaces(space: gym.Space[Any]) -> list[gym.Space[Any]]:
    """Return the spaces of the arrays of an observation, in the order of `EnvSpec.paths`."""
    if isinstance(space, gym.spaces.Dict):
        return [leaf for part in space.spaces.values() for leaf in leaf_spaces(part)]
    return [space]


def _obs_validator(space: gym.Space[Any], spaces: Spaces, path: Path) -> Callable[[Any], None]:
    field = space_fields(space)
    shape, dtype, where = spaces.agents + field.shape, field.dtype, describe_path(path)

    def check_shape(value: Any) -> None:
        if getattr(value, "shape", None) != shape and np.shape(value) != shape:
            raise MisbehaviorError(f"its observation{where} has shape {np.shape(value)}; its space has shape {shape}")

    if dtype.kind == "f":
        return check_shape
    low, high = _integer_bounds(space, dtype)
    # the bounds of a Box may be narrower than its dtype: many environments leave them, so only the dtype counts
    is_box = isinstance(space, Box)

    def check_integers(value: Any) -> None:
        check_shape(value)
        array = np.asarray(value)
        if is_box and array.dtype == dtype:
            return
        if array.dtype.kind not in "biu":
            raise MisbehaviorError(f"its observation{where} has dtype {array.dtype}; its space has dtype {dtype}")
        invalid = (array < low) | (array > high)
        if invalid.any():
            raise MisbehaviorError(
                f"its observation{where} contains {array[invalid].flat[0]}; {space} allows {np.min(low)} to "
                f"{np.max(high)}"
            )

    return check_integers


def _integer_bounds(space: gym.Space[Any], dtype: np.dtype[Any]) -> tuple[Any, Any]:
    if isinstance(space, Discrete):
        return space.start, space.start + space.n - 1
    if isinstance(space, MultiDiscrete):
        return space.start, space.start + space.nvec - 1
    if isinstance(space, Box) and dtype.kind in "iu":
        return np.iinfo(dtype).min, np.iinfo(dtype).max
    return 0, 1


def describe_path(path: Path) -> str:
    """Return " at KEY.KEY" for the keys that lead to one array of an observation, for messages."""
    return f" at {'.'.join(map(str, path))}" if path else ""


def all_finite(array: Array) -> bool:
    """Return whether all numbers are finite. A finite sum proves it, and is faster to compute than `isfinite`."""
    return math.isfinite(np.add.reduce(array)) or bool(np.isfinite(array).all())


def finiteness_sums(*trees: Tree) -> list[Callable[[], float]]:
    """Return one function per float array; its result isn't finite if any element isn't.

    It is a sum, or for short arrays the dot product with zeros, which is faster.
    """
    flat = [leaf.reshape(-1) for tree in trees for leaf in tree_leaves(tree) if leaf.dtype.kind == "f"]
    return [
        partial(leaf.dot, np.zeros_like(leaf)) if leaf.size < MAX_DOT_SIZE else partial(np.add.reduce, leaf)
        for leaf in flat
    ]

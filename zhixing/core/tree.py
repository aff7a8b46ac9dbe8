"""Trees of arrays: an array, or a dict or tuple of trees.

Doesn't import torch, so environment workers start quickly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

Tree = Any  # an array, or a dict / tuple of trees


class Field(NamedTuple):
    """Shape and dtype of the array that a step of one environment stores."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]


def tree_map(function: Callable[..., Any], tree: Tree, *others: Tree) -> Tree:
    """Apply `function` to each leaf of `tree`, together with the leaves at the same place in `others`."""
    if isinstance(tree, Mapping):
        return {key: tree_map(function, tree[key], *(other[key] for other in others)) for key in tree}
    if isinstance(tree, tuple) and not isinstance(tree, Field):
        return tuple(tree_map(function, *parts) for parts in zip(tree, *others, strict=True))
    return function(tree, *others)


def time_major(tree: Tree) -> Tree:
    """Transpose sequences of tensors from `[B,T,...]` to `[T,B,...]`."""
    return tree_map(lambda leaf: leaf.transpose(0, 1), tree)


def flatten_time(tree: Tree) -> Tree:
    """Flatten tensors from `[T,B,...]` to `[T*B,...]`."""
    return tree_map(lambda leaf: leaf.flatten(0, 1), tree)


def tree_leaves(tree: Tree) -> list[Any]:
    """Return the leaves of a tree in order, depth first."""
    leaves: list[Any] = []
    tree_map(leaves.append, tree)
    return leaves

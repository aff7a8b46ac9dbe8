"""Elements of any space as vectors of floats, for environments whose agents have different kinds of spaces."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np

from zhixing.core.spaces import space_fields
from zhixing.core.tree import Tree, tree_leaves, tree_map


class FlatSpace:
    """Converts elements of a space to vectors of `size` floats and back.

    Floats have single precision, which stores integers exactly up to 2^24.
    """

    def __init__(self, space: gym.Space[Any]) -> None:
        self.fields = space_fields(space)
        self.sizes = [int(np.prod(field.shape)) for field in tree_leaves(self.fields)]
        self.size = sum(self.sizes)

    def flatten(self, element: Tree) -> np.ndarray[Any, Any]:
        """Return elements `[...]` as vectors `[..., size]`."""
        parts: list[Any] = []

        def append(field: Any, leaf: Any) -> None:
            array = np.asarray(leaf, np.float32)
            parts.append(array.reshape((*array.shape[: array.ndim - len(field.shape)], -1)))

        tree_map(append, self.fields, element)
        return np.concatenate(parts, -1)

    def unflatten(self, vectors: np.ndarray[Any, Any]) -> Tree:
        """Return the elements `[...]` of vectors `[..., size]` or longer ones, which are cut."""
        ends = iter(np.cumsum(self.sizes).tolist())
        sizes = iter(self.sizes)

        def part(field: Any) -> Any:
            end = next(ends)
            leaf = vectors[..., end - next(sizes) : end].reshape((*vectors.shape[:-1], *field.shape))
            return leaf.astype(field.dtype)

        return tree_map(part, self.fields)

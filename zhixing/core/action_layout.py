"""How elements of action spaces become vectors, and back.

Actions of Dict and Tuple spaces, and arrays of any other number of dimensions than one, are *composite*: policies and
storage hold each as one vector `[k]` of floats, the environment receives an element of its space. The vector has the
choices of all Discrete and MultiDiscrete parts, counted from 0, then the bits of MultiBinary parts, then the numbers of
Boxes, in [-1, 1] if they are bounded. Within these groups, parts are in the order of the space.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple

from zhixing.core.tree import Tree, tree_map
from zhixing.errors import UserError

Array = np.ndarray[Any, Any]
ALLOWED = (
    "allowed are Discrete, MultiDiscrete, MultiBinary, Box of floats, and Dict and Tuple of these; wrap the "
    "environment, for example in gymnasium.wrappers.TransformAction"
)
MAX_VALUE = 1 << 24  # of an integer that a 32-bit float stores exactly
GROUPS: tuple[Any, ...] = ((Discrete, MultiDiscrete), MultiBinary, Box)


def is_composite(space: gym.Space[Any]) -> bool:
    """Return whether actions aren't stored as the arrays that they are."""
    if isinstance(space, (MultiDiscrete, MultiBinary, Box)):
        return len(space.shape) != 1
    return not isinstance(space, Discrete)


@dataclass(frozen=True)
class ActionPart:
    """A part of an action space without parts of its own, and the columns that hold its elements."""

    space: Any
    start: int
    size: int

    def take(self, vectors: Array) -> Any:
        """Return the elements of this part in vectors `[...,k]`, as the environment gets them."""
        columns = vectors[..., self.start : self.start + self.size]
        array = columns.reshape((*vectors.shape[:-1], *self.space.shape)).astype(self.space.dtype)
        return array[()] if isinstance(self.space, Discrete) else array

    def put(self, elements: Any, vectors: Array) -> None:
        """Write elements of this part into vectors `[...,k]`."""
        vectors[..., self.start : self.start + self.size] = np.reshape(elements, (*vectors.shape[:-1], self.size))


class ActionLayout:
    """The columns of actions: one per choice, which has `sizes[i]` values, then `num_binary`, then `num_continuous`.

    An action mask has `mask_size` elements, one for each value of each choice. `minimum` and `maximum` `[k]` are the
    bounds of the policy's actions. The environment's are `low + (the policy's + shift) * scale`.
    """

    def __init__(self, space: gym.Space[Any]) -> None:
        """Raise `UserError` if no policy supports the space."""
        self.space = space
        leaves = list(_leaves(space, space))
        starts, column = [0] * len(leaves), 0
        for kinds in GROUPS:
            for i, leaf in enumerate(leaves):
                if isinstance(leaf, kinds):
                    starts[i] = column
                    column += math.prod(leaf.shape)
        self.num_columns = column
        parts = [ActionPart(leaf, start, math.prod(leaf.shape)) for leaf, start in zip(leaves, starts, strict=True)]
        remaining = iter(parts)
        self.tree: Tree = _map_space(lambda _: next(remaining), space)
        self.sizes = [n for part in parts for n in _num_choices(part.space)]
        self.mask_size = sum(self.sizes)
        self.num_binary = sum(part.size for part in parts if isinstance(part.space, MultiBinary))
        self.num_continuous = column - len(self.sizes) - self.num_binary
        self.low, self.shift, self.scale = np.zeros(column), np.zeros(column), np.ones(column)
        self.minimum, self.maximum = np.zeros(column), np.ones(column)
        self.maximum[: len(self.sizes)] = np.array(self.sizes) - 1
        for part in parts:
            columns, leaf = slice(part.start, part.start + part.size), part.space
            if isinstance(leaf, (Discrete, MultiDiscrete)):
                self.low[columns] = np.reshape(leaf.start, -1)
            elif isinstance(leaf, Box):
                self.minimum[columns], self.maximum[columns] = leaf.low.reshape(-1), leaf.high.reshape(-1)
                if leaf.is_bounded():
                    self.low[columns], self.shift[columns] = self.minimum[columns], 1.0
                    self.scale[columns] = 0.5 * (self.maximum[columns] - self.minimum[columns])
                    self.minimum[columns], self.maximum[columns] = -1.0, 1.0
        self.divisor = np.where(self.scale == 0.0, 1.0, self.scale)

    @property
    def bounded(self) -> bool:
        """Whether all numbers are bounded."""
        return bool(np.isfinite(self.minimum).all() and np.isfinite(self.maximum).all())

    def to_env(self, vectors: Array) -> Tree:
        """Convert vectors `[...,k]` of the policy to elements of the space, clipped to its bounds."""
        return self.unflatten(self.rescale(np.clip(vectors, self.minimum, self.maximum)))

    def from_env(self, elements: Tree) -> Array:
        """Convert elements of the space to vectors `[...,k]` of the policy."""
        return self.unscale(self.flatten(elements)).astype(np.float32)

    def rescale(self, vectors: Array) -> Array:
        """Convert vectors of the policy to vectors of the environment."""
        return np.asarray(self.low + (vectors + self.shift) * self.scale)

    def unscale(self, vectors: Array) -> Array:
        """Convert vectors of the environment to vectors of the policy."""
        return np.asarray((vectors - self.low) / self.divisor - self.shift)

    def flatten(self, elements: Tree) -> Array:
        """Return elements of the space as vectors `[...,k]`, in double precision, which is exact."""
        pairs: list[tuple[ActionPart, Any]] = []
        try:
            tree_map(lambda part, leaf: pairs.append((part, leaf)), self.tree, elements)
            part, leaf = pairs[0]
            vectors = np.empty((*np.shape(leaf)[: np.ndim(leaf) - len(part.space.shape)], self.num_columns))
            for part, leaf in pairs:
                part.put(leaf, vectors)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise UserError(f"the action {elements!r} is not in the space {self.space} ({error})") from None
        return vectors

    def sample(self, mask: Array | None = None) -> Any:
        """Sample an element of the space. `mask` marks the allowed values of all choices."""
        if mask is None:
            return self.space.sample()
        rows = iter(np.split(mask, np.cumsum(self.sizes)[:-1]))

        def sample(part: ActionPart) -> Any:
            if isinstance(part.space, Discrete):
                return part.space.sample(next(rows))
            if isinstance(part.space, MultiDiscrete):
                return part.space.sample(_nest(rows, part.space.shape))
            return part.space.sample()

        return tree_map(sample, self.tree)

    def unflatten(self, vectors: Array) -> Tree:
        """Return the elements of the space that `flatten` converted to vectors."""
        return tree_map(lambda part: part.take(vectors), self.tree)


def _leaves(space: gym.Space[Any], whole: gym.Space[Any]) -> Iterator[Any]:
    """Yield the parts of `space` that aren't Dict or Tuple, in order. Raise `UserError` for those not allowed."""
    if isinstance(space, Dict) and not all(isinstance(key, str) for key in space.spaces):
        raise UserError(f"the action space is {whole}; a Dict needs strings as names")
    if isinstance(space, (Dict, Tuple)) and len(space.spaces):
        for part in space.spaces.values() if isinstance(space, Dict) else space.spaces:
            yield from _leaves(part, whole)
        return
    composite = is_composite(whole)
    valid = isinstance(space, (Discrete, MultiDiscrete, MultiBinary, Box)) and 0 not in (space.shape or ())
    if composite and isinstance(space, Box):
        valid = valid and np.issubdtype(space.dtype, np.floating)
    if not valid:
        where = "" if space is whole else f" with the part {space}"
        raise UserError(f"the action space is {whole}{where}; {ALLOWED}")
    if composite and isinstance(space, (Discrete, MultiDiscrete)):
        largest = np.max(np.abs(space.start)) + max(_num_choices(space))
        if largest > MAX_VALUE:
            raise UserError(f"the action space has the part {space}; its values must not exceed {MAX_VALUE:,}")
    yield space


def _nest(rows: Iterator[Array], shape: tuple[int, ...]) -> Any:
    """Return the next rows as nested tuples, the masks that MultiDiscrete takes."""
    return tuple(_nest(rows, shape[1:]) for _ in range(shape[0])) if shape else next(rows)


def _map_space(function: Any, space: gym.Space[Any]) -> Tree:
    """Apply `function` to the parts of a space, in the order of `_leaves`."""
    if isinstance(space, Dict):
        return {key: _map_space(function, part) for key, part in space.spaces.items()}
    if isinstance(space, Tuple):
        return tuple(_map_space(function, part) for part in space.spaces)
    return function(space)


def _num_choices(space: gym.Space[Any]) -> list[int]:
    """Return the number of values of each choice in an element: one if the space is Discrete."""
    if isinstance(space, Discrete):
        return [int(space.n)]
    return [int(n) for n in space.nvec.reshape(-1)] if isinstance(space, MultiDiscrete) else []

"""Elements of any space survive the way to vectors and back."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete

from zhixing.core.flat_space import FlatSpace
from zhixing.core.tree import tree_leaves

SPACES = {
    "image": (Box(0, 255, (2, 3, 1), np.uint8), 6),
    "vector": (Box(-2.0, 3.0, (4,), np.float32), 4),
    "discrete": (Discrete(7), 1),
    "multi-discrete": (MultiDiscrete([3, 5]), 2),
    "multi-binary": (MultiBinary(3), 3),
    "dict": (Dict({"b": Discrete(5), "a": Box(0, 255, (2, 2), np.uint8), "c": Dict({"d": Box(-1.0, 1.0, (3,))})}), 8),
}


@pytest.mark.parametrize("name", SPACES)
def test_elements_and_batches_survive(name: str) -> None:
    space, size = SPACES[name]
    space.seed(0)
    flat = FlatSpace(space)
    assert flat.size == size
    for _ in range(20):
        element = space.sample()
        vector = flat.flatten(element)
        assert (vector.shape, vector.dtype) == ((size,), np.float32)
        padded = np.pad(np.stack([vector, vector]), ((0, 0), (0, 2)))  # a batch of two, padded by two
        check_equal(space, flat.unflatten(vector), element)
        for row in range(2):
            check_equal(space, map_leaves(flat.unflatten(padded), row), element)


def check_equal(space: gym.Space, actual: Any, expected: Any) -> None:
    for a, b in zip(tree_leaves(actual), tree_leaves(expected), strict=True):
        assert np.array_equal(a, b)
        assert np.shape(a) == np.shape(b)
    for leaf, field in zip(tree_leaves(actual), tree_leaves(FlatSpace(space).fields), strict=True):
        assert leaf.dtype == field.dtype


def map_leaves(tree: Any, row: int) -> Any:
    return {key: map_leaves(part, row) for key, part in tree.items()} if isinstance(tree, dict) else tree[row]

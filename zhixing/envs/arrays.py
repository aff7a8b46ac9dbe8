"""The rows that environments write and the caller reads, in ordinary or in shared memory."""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from typing import Any

import numpy as np

from zhixing.spaces import Spaces
from zhixing.tree import Field, Tree, tree_leaves, tree_map

Array = np.ndarray[Any, Any]
ALIGNMENT = 64  # bytes of a cache line


@dataclass
class Arrays:
    """One row per environment; `final_*` hold the last observation and mask of the episodes that just ended."""

    obs: Tree
    final_obs: Tree
    action: Array
    reward: Array
    terminated: Array
    truncated: Array
    mask: Array | None
    final_mask: Array | None

    def rows(self, index: Any) -> Arrays:
        """Some of the rows: views of a slice, copies of a list."""
        chosen: dict[str, Any] = {name: _map(lambda leaf: leaf[index], tree) for name, tree in vars(self).items()}
        return Arrays(**chosen)


def allocate(spaces: Spaces, num: int, memory: mmap.mmap | None = None) -> Arrays:
    """Arrays for `num` environments; in `memory` at places that depend on nothing but the arguments."""
    offset = 0

    def take(field: Field) -> Array:
        nonlocal offset
        shape = (num, *field.shape)
        if memory is None:
            return np.zeros(shape, field.dtype)
        count = int(np.prod(shape))
        array = np.frombuffer(memory, field.dtype, count, offset).reshape(shape)
        offset += _aligned(array.nbytes)
        return array

    fields = spaces.fields()
    mask = fields.get("mask")
    return Arrays(
        obs=tree_map(take, fields["obs"]),
        final_obs=tree_map(take, fields["obs"]),
        # the task gets actions in its own precision, not in that of storage
        action=take(Field(fields["action"].shape, np.dtype(spaces.action.dtype))),
        reward=take(fields["reward"]),
        terminated=take(fields["terminated"]),
        truncated=take(fields["truncated"]),
        mask=None if mask is None else take(mask),
        final_mask=None if mask is None else take(mask),
    )


def shared_bytes(spaces: Spaces, num: int) -> int:
    """How much memory `allocate` needs."""
    arrays = vars(allocate(spaces, num)).values()
    return sum(_aligned(leaf.nbytes) for tree in arrays if tree is not None for leaf in tree_leaves(tree))


def _aligned(count: int) -> int:
    return -(-count // ALIGNMENT) * ALIGNMENT


def _map(function: Any, value: Tree | None) -> Tree | None:
    return None if value is None else tree_map(function, value)

"""Arrays that environments write and the caller reads, in private or shared memory."""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from typing import Any

import numpy as np

from zhixing.core.spaces import Spaces
from zhixing.core.tree import Field, Tree, tree_leaves, tree_map

Array = np.ndarray[Any, Any]
ALIGNMENT = 64  # bytes of a cache line


@dataclass
class StepBuffers:
    """Results of the latest step, one row per environment.

    `info` holds the values of `info` that are fields. `extras` holds the optional arrays `mask`, `state` and `alive`.
    The `final_*` arrays hold the last values of episodes that just ended.
    """

    obs: Tree
    final_obs: Tree
    action: Array
    reward: Array
    terminated: Array
    truncated: Array
    extras: dict[str, Array]
    final_extras: dict[str, Array]
    info: dict[str, Array]

    def rows(self, index: Any) -> StepBuffers:
        """Return some of the rows: views for a slice, copies for a list of indices."""
        chosen: dict[str, Any] = {name: tree_map(lambda leaf: leaf[index], tree) for name, tree in vars(self).items()}
        return StepBuffers(**chosen)


class Snapshot:
    """Observations and extras from before a step, to fall back to if an environment fails in it."""

    def __init__(self, buffers: StepBuffers) -> None:
        self.buffers = buffers
        self.current = [*tree_leaves(buffers.obs), *buffers.extras.values()]
        self.final = [*tree_leaves(buffers.final_obs), *buffers.final_extras.values()]
        self.saved = [array.copy() for array in self.current]

    def take(self, rows: Any = ...) -> None:
        for saved, array in zip(self.saved, self.current, strict=True):
            saved[rows] = array[rows]

    def truncate(self, rows: Any) -> None:
        """Mark the episodes of these rows as truncated before the step, with reward 0."""
        for saved, array in zip(self.saved, self.final, strict=True):
            array[rows] = saved[rows]
        self.buffers.reward[rows] = 0.0
        for array in self.buffers.info.values():  # unknown, too
            array[rows] = 0
        self.buffers.terminated[rows], self.buffers.truncated[rows] = False, True


def allocate(spaces: Spaces, num_envs: int, memory: mmap.mmap | None = None) -> StepBuffers:
    """Allocate buffers. In `memory`, their offsets depend only on `spaces` and `num_envs`."""
    offset = 0

    def allocate_array(field: Field) -> Array:
        nonlocal offset
        shape = (num_envs, *field.shape)
        if memory is None:
            return np.zeros(shape, field.dtype)
        count = int(np.prod(shape))
        array = np.frombuffer(memory, field.dtype, count, offset).reshape(shape)
        offset += _align(array.nbytes)
        return array

    fields = spaces.fields()
    extras = spaces.extras()
    return StepBuffers(
        obs=tree_map(allocate_array, fields["obs"]),
        final_obs=tree_map(allocate_array, fields["obs"]),
        action=allocate_array(spaces.env_action_field),
        reward=allocate_array(fields["reward"]),
        terminated=allocate_array(fields["terminated"]),
        truncated=allocate_array(fields["truncated"]),
        extras={name: allocate_array(field) for name, field in extras.items()},
        final_extras={name: allocate_array(field) for name, field in extras.items()},
        info={name: allocate_array(field) for name, field in spaces.info.items()},
    )


def shared_bytes(spaces: Spaces, num_envs: int) -> int:
    """Return how many bytes of memory `allocate` needs."""
    buffers = vars(allocate(spaces, num_envs)).values()
    return sum(_align(leaf.nbytes) for tree in buffers for leaf in tree_leaves(tree))


def _align(count: int) -> int:
    return -(-count // ALIGNMENT) * ALIGNMENT

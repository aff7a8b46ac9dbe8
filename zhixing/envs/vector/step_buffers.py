"""The rows that environments write and the caller reads, in ordinary or in shared memory."""

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
    """One row per environment; `final_*` hold what the episodes that just ended showed last.

    `beside` is what a task shows beside observations, by name: mask, state, alive.
    """

    obs: Tree
    final_obs: Tree
    action: Array
    reward: Array
    terminated: Array
    truncated: Array
    extras: dict[str, Array]
    final_extras: dict[str, Array]

    def rows(self, index: Any) -> StepBuffers:
        """Some of the rows: views of a slice, copies of a list."""
        chosen: dict[str, Any] = {name: tree_map(lambda leaf: leaf[index], tree) for name, tree in vars(self).items()}
        return StepBuffers(**chosen)


class Snapshot:
    """What environments showed before a step, in case that one of them doesn't survive it."""

    def __init__(self, buffers: StepBuffers) -> None:
        self.buffers = buffers
        self.shown = [*tree_leaves(buffers.obs), *buffers.extras.values()]
        self.final = [*tree_leaves(buffers.final_obs), *buffers.final_extras.values()]
        self.copies = [leaf.copy() for leaf in self.shown]

    def take(self, rows: Any = ...) -> None:
        for copy, leaf in zip(self.copies, self.shown, strict=True):
            copy[rows] = leaf[rows]

    def end(self, rows: Any) -> None:
        """End these episodes there, as if cut by a clock, with nothing paid."""
        for copy, leaf in zip(self.copies, self.final, strict=True):
            leaf[rows] = copy[rows]
        self.buffers.reward[rows] = 0.0
        self.buffers.terminated[rows], self.buffers.truncated[rows] = False, True


def allocate(spaces: Spaces, num: int, memory: mmap.mmap | None = None) -> StepBuffers:
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
    extras = spaces.extras()
    return StepBuffers(
        obs=tree_map(take, fields["obs"]),
        final_obs=tree_map(take, fields["obs"]),
        # the task gets actions in its own precision, not in that of storage
        action=take(Field(fields["action"].shape, np.dtype(spaces.action.dtype))),
        reward=take(fields["reward"]),
        terminated=take(fields["terminated"]),
        truncated=take(fields["truncated"]),
        extras={name: take(field) for name, field in extras.items()},
        final_extras={name: take(field) for name, field in extras.items()},
    )


def shared_bytes(spaces: Spaces, num: int) -> int:
    """How much memory `allocate` needs."""
    buffers = vars(allocate(spaces, num)).values()
    return sum(_aligned(leaf.nbytes) for tree in buffers for leaf in tree_leaves(tree))


def _aligned(count: int) -> int:
    return -(-count // ALIGNMENT) * ALIGNMENT

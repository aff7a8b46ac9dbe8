"""Frames of stacked observations, which a ring stores once each. `zhixing.core.stack` defines the form of stacks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from zhixing.buffers.fields import Array
from zhixing.core.stack import frame_of
from zhixing.core.tree import Field, Tree, tree_leaves, tree_map
from zhixing.errors import UserError


class FrameLeaf:
    """One array of observations, a stack of `num` frames."""

    def __init__(self, field: Field, num: int, agent_dims: int) -> None:
        self.num, self.stack = num, field.shape
        self.frame, self.axis = frame_of(field, num, agent_dims)
        self.size = self.frame.shape[self.axis]

    def newest(self, stacks: Array, num_leading: int) -> Array:
        """Return the newest frames of stacks with `num_leading` leading dimensions."""
        return stacks[(slice(None),) * (num_leading + self.axis) + (slice(-self.size, None),)]

    def join(self, frames: Any) -> Any:
        """Return stacks `[B,...]` of frames `[B,num,...]`, arrays or tensors."""
        move = torch.movedim if isinstance(frames, torch.Tensor) else np.moveaxis
        moved = move(frames, 1, 1 + self.axis) if self.axis else frames
        return moved.reshape(len(frames), *self.stack)

    def split(self, stacks: Array) -> Array:
        """Return the frames `[B,num,...]` of stacks `[B,...]`."""
        parts = (*self.stack[: self.axis], self.num, self.size, *self.stack[self.axis + 1 :])
        return np.moveaxis(stacks.reshape(len(stacks), *parts), 1 + self.axis, 1)


class FrameLeaves:
    """The arrays of stacked observations, in the order of `tree_leaves`."""

    def __init__(self, spec: Tree, num: int, agent_dims: int) -> None:
        self.num = num
        tree = tree_map(lambda field: FrameLeaf(field, num, agent_dims), spec)
        self.leaves: list[FrameLeaf] = tree_leaves(tree)
        self.spec: Tree = tree_map(lambda leaf: leaf.frame, tree)

    def __len__(self) -> int:
        return len(self.leaves)

    def newest(self, stacks: Sequence[Array], num_leading: int) -> list[Array]:
        return [leaf.newest(value, num_leading) for leaf, value in zip(self.leaves, stacks, strict=True)]

    def join(self, frames: Sequence[Any]) -> list[Any]:
        return [leaf.join(value) for leaf, value in zip(self.leaves, frames, strict=True)]

    def repeat_first(self, stacks: Sequence[Array], next_stacks: Sequence[Array]) -> Array:
        """Return which first stacks of streams `[B,...]` repeat their first frame, as at the start of an episode.

        Raise `UserError` unless all of them shift by one frame with the step.
        """
        repeated = np.ones(len(stacks[0]), bool)
        for leaf, stack, next_stack in zip(self.leaves, stacks, next_stacks, strict=True):
            frames, next_frames = leaf.split(stack), leaf.split(next_stack)
            repeated &= _all_equal(frames[:, 1:], frames[:, :-1])
            if not _all_equal(next_frames[:, :-1], frames[:, 1:]).all():
                raise UserError(
                    f"frame_stack={self.num} needs observations that shift by one frame with each step; use "
                    f"frame_stack=1 for others"
                )
        return repeated


def _all_equal(a: Array, b: Array) -> Array:
    """Return which rows are equal. A NaN equals a NaN."""
    equal = a == b
    if a.dtype.kind == "f":
        equal |= np.isnan(a) & np.isnan(b)
    return equal.reshape(len(a), -1).all(-1)

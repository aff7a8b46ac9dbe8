"""Stacks of an environment's last observations, its "frames", as one array per part of an observation.

Vectors are concatenated, and images along their channels. All other observations get a new first dimension: numbers
become vectors, and gray images [H, W] become [stack, H, W]. Doesn't import torch, so environment workers start quickly.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple

from zhixing.core.spaces import Spaces, space_fields
from zhixing.core.tree import Field, Tree, tree_map
from zhixing.errors import UserError

Array = np.ndarray[Any, Any]


def stack_axis(field: Field) -> int:
    """Return the dimension along which frames are concatenated: the channels of an image, else the first."""
    return 2 if _is_image(field) and field.shape[2] < field.shape[0] else 0


def frame_of(stacked: Field, num: int, agent_dims: int = 0) -> tuple[Field, int]:
    """Return the frame of which a field is a stack, and the dimension along which frames are concatenated."""
    axis = agent_dims + stack_axis(Field(stacked.shape[agent_dims:], stacked.dtype))
    if len(stacked.shape) <= axis or stacked.shape[axis] % num:
        raise UserError(
            f"frame_stack={num} needs observations with a multiple of {num} elements in dimension {axis}, not "
            f"{list(stacked.shape)}"
        )
    shape = (*stacked.shape[:axis], stacked.shape[axis] // num, *stacked.shape[axis + 1 :])
    return Field(shape, stacked.dtype), axis


def _is_image(field: Field) -> bool:
    return len(field.shape) == 3 and field.dtype == np.uint8


@dataclass(frozen=True)
class FrameLayout:
    """How the frames of one array are stacked."""

    shape: tuple[int, ...]  # of the array as the environment returns it
    frame: tuple[int, ...]  # the same as a part of the stack, perhaps with a new first dimension
    axis: int

    @staticmethod
    def of_stack(stacked: Field, num: int, agent_dims: int) -> FrameLayout:
        """Return the layout of a field that is a stack."""
        (frame, _), axis = frame_of(stacked, num, agent_dims)
        single = frame[:axis] + frame[axis + 1 :]
        return FrameLayout(single if frame[axis] == 1 else frame, frame, axis)

    def repeat(self, value: Any, num: int) -> Array:
        """Return the stack at the start of an episode, which repeats the first frame."""
        return np.concatenate([self._to_frame(value)] * num, self.axis)

    def push(self, stack: Array, value: Any) -> Array:
        """Return a new stack without the oldest frame and with a new one."""
        kept = (slice(None),) * self.axis + (slice(self.frame[self.axis], None),)
        return np.concatenate([stack[kept], self._to_frame(value)], self.axis)

    def _to_frame(self, value: Any) -> Array:
        if np.shape(value) not in (self.shape, self.frame):
            raise ValueError(f"its observation has shape {np.shape(value)}; its space has shape {self.shape}")
        return np.asarray(value).reshape(self.frame)


class ObsStack:
    """Makes stacks of `num` observations of a space. Those named in `unstacked`, and texts, stay single."""

    def __init__(
        self, space: gym.Space[Any], num: int, agents: tuple[int, ...] = (), unstacked: Collection[str] = ()
    ) -> None:
        self.num, self.agents = num, agents
        self.layouts: Tree = self._layouts(space, unstacked)
        self.space = self._stacked(space, self.layouts)

    def start(self, obs: Tree) -> Tree:
        """Return the first stack of an episode."""
        return _map(lambda layout, value: layout.repeat(value, self.num), self.layouts, obs)

    def push(self, stack: Tree, obs: Tree) -> Tree:
        """Return the next stack. Its arrays are new."""
        return _map(lambda layout, value, old: layout.push(old, value), self.layouts, obs, stack)

    def _layouts(self, space: gym.Space[Any], unstacked: Collection[str] = ()) -> Tree:
        if isinstance(space, Dict):
            return {key: None if key in unstacked else self._layouts(part) for key, part in space.spaces.items()}
        if isinstance(space, Tuple):
            return tuple(self._layouts(part) for part in space.spaces)
        if isinstance(space, gym.spaces.Text):
            return None
        field: Field = space_fields(space)
        is_part = len(field.shape) == 1 or _is_image(field)
        frame = field if is_part else Field((1, *field.shape), field.dtype)
        axis = stack_axis(frame)
        shape = [*frame.shape]
        shape[axis] *= self.num
        if stack_axis(Field(tuple(shape), field.dtype)) != axis:
            raise UserError(
                f"env.stack={self.num} makes {shape} of the observations {list(field.shape)}, whose channels can't be "
                f"distinguished from their height; use a smaller stack, or larger images"
            )
        return FrameLayout(self.agents + field.shape, self.agents + frame.shape, len(self.agents) + axis)

    def _stacked(self, space: gym.Space[Any], layout: Tree) -> gym.Space[Any]:
        """Return the space of the stacks, without the dimension of the agents."""
        if isinstance(space, Dict):
            return Dict({key: self._stacked(part, layout[key]) for key, part in space.spaces.items()})
        if isinstance(space, Tuple):
            return Tuple([self._stacked(part, old) for part, old in zip(space.spaces, layout, strict=True)])
        if layout is None:
            return space
        single = FrameLayout(space.shape or (), layout.frame[len(self.agents) :], layout.axis - len(self.agents))
        if isinstance(space, Box):
            low, high = (single.repeat(bound, self.num) for bound in (space.low, space.high))
            return Box(low, high, dtype=space.dtype.type)
        if isinstance(space, Discrete):
            return MultiDiscrete(single.repeat(space.n, self.num), start=single.repeat(space.start, self.num))
        if isinstance(space, MultiDiscrete):
            nvec, start = (single.repeat(value, self.num) for value in (space.nvec, space.start))
            return MultiDiscrete(nvec, dtype=space.dtype.type, start=start)
        assert isinstance(space, MultiBinary)
        shape = single.repeat(np.zeros(single.shape), self.num).shape
        return MultiBinary(shape if len(shape) > 1 else shape[0])


def stack_spaces(spaces: Spaces, num: int) -> Spaces:
    """Return the spaces of environments whose observations are stacked."""
    return replace(spaces, obs=ObsStack(spaces.obs, num, spaces.agents).space, stack=num) if num > 1 else spaces


def _map(function: Any, layouts: Tree, obs: Tree, *others: Tree) -> Tree:
    """Apply `function` to each part of an observation that is stacked."""
    return tree_map(
        lambda layout, value, *rest: value if layout is None else function(layout, value, *rest), layouts, obs, *others
    )

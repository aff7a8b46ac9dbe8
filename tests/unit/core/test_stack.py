"""Stacks of observations: their form, worked out by hand for each kind of space."""

from __future__ import annotations

import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Space, Text, Tuple

from zhixing.core.stack import ObsStack, stack_axis
from zhixing.core.tree import Field
from zhixing.errors import UserError

U8 = np.uint8


@pytest.mark.parametrize(
    ("space", "first", "second", "stacked", "stack"),
    [
        (Box(0, 9, (2,)), [1, 2], [3, 4], Box(0, 9, (6,)), [1, 2, 1, 2, 3, 4]),  # a vector
        (Box(0, 9, ()), 1, 3, Box(0, 9, (3,)), [1, 1, 3]),
        (Discrete(4, start=1), 2, 4, MultiDiscrete([4] * 3, start=[1] * 3), [2, 2, 4]),
        (MultiDiscrete([2, 3]), [0, 2], [1, 1], MultiDiscrete([2, 3] * 3), [0, 2, 0, 2, 1, 1]),
        (MultiBinary(2), [0, 1], [1, 1], MultiBinary(6), [0, 1, 0, 1, 1, 1]),
        (Box(0, 9, (1, 2)), [[1, 2]], [[3, 4]], Box(0, 9, (3, 1, 2)), [[[1, 2]], [[1, 2]], [[3, 4]]]),  # not an image
    ],
)
def test_stacks_of_small_spaces(space: Space, first: object, second: object, stacked: Space, stack: list) -> None:
    made = ObsStack(space, 3)
    assert made.space == stacked
    current = made.push(made.start(first), second)
    assert current.tolist() == stack
    assert made.space.contains(current.astype(stacked.dtype))


def test_images_are_concatenated_along_their_channels() -> None:
    red, blue = np.zeros((8, 6, 3), U8), np.zeros((8, 6, 3), U8)
    red[..., 0], blue[..., 2] = 200, 100
    last = ObsStack(Box(0, 255, (8, 6, 3), U8), 2)  # channels last
    assert last.space == Box(0, 255, (8, 6, 6), U8)
    assert last.push(last.start(red), blue)[0, 0].tolist() == [200, 0, 0, 0, 0, 100]
    first = ObsStack(Box(0, 255, (3, 8, 6), U8), 2)
    assert first.space == Box(0, 255, (6, 8, 6), U8)
    stack = first.push(first.start(red.transpose(2, 0, 1)), blue.transpose(2, 0, 1))
    assert stack[:, 0, 0].tolist() == [200, 0, 0, 0, 0, 100]
    gray = ObsStack(Box(0, 255, (8, 6), U8), 4)
    assert gray.space == Box(0, 255, (4, 8, 6), U8)
    assert (stack_axis(Field((8, 6, 6), np.dtype(U8))), stack_axis(Field((8, 6, 6), np.dtype(np.float32)))) == (2, 0)


def test_channels_that_look_like_the_height_are_rejected() -> None:
    with pytest.raises(UserError, match=r"env.stack=3 makes \[8, 8, 9\] of the observations \[8, 8, 3\]"):
        ObsStack(Box(0, 255, (8, 8, 3), U8), 3)


def test_parts_are_stacked_one_by_one() -> None:
    pair = Tuple((Discrete(3), Text(5)))
    space = Dict({"pair": pair, "position": Box(-1, 1, (1,)), "action_mask": Box(0, 1, (2,), np.int8)})
    stack = ObsStack(space, 2, unstacked=("action_mask",))
    assert stack.space == Dict(
        {
            "pair": Tuple((MultiDiscrete([3, 3]), Text(5))),
            "position": Box(-1, 1, (2,)),
            "action_mask": Box(0, 1, (2,), np.int8),
        }
    )
    first = {"pair": (1, "one"), "position": [0.5], "action_mask": [0, 1]}
    second = {"pair": (2, "two"), "position": [-0.5], "action_mask": [1, 1]}
    current = stack.push(stack.start(first), second)
    assert current["pair"][0].tolist() == [1, 2]
    assert (current["pair"][1], current["action_mask"]) == ("two", [1, 1])
    assert current["position"].tolist() == [0.5, -0.5]


def test_agents_keep_their_dimension() -> None:
    stack = ObsStack(Box(0, 9, (2,)), 2, agents=(3,))
    assert stack.space == Box(0, 9, (4,))  # per agent
    current = stack.push(stack.start(np.arange(6).reshape(3, 2)), np.arange(6, 12).reshape(3, 2))
    assert current.tolist() == [[0, 1, 6, 7], [2, 3, 8, 9], [4, 5, 10, 11]]


def test_wrong_shapes_are_named() -> None:
    with pytest.raises(ValueError, match=r"has shape \(3,\); its space has shape \(2,\)"):
        ObsStack(Box(0, 9, (2,)), 2).start(np.zeros(3))

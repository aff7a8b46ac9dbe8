"""Conversion of actions, and the fields that store the elements of spaces."""

from __future__ import annotations

import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Text, Tuple
from hypothesis import given
from hypothesis import strategies as st

from zhixing.core.spaces import Spaces, space_fields
from zhixing.core.tree import Field
from zhixing.errors import UserError

OBS = Box(-1.0, 1.0, (2,), np.float32)
UNEVEN = Box(np.float32([-2.0, 0.0]), np.float32([4.0, 10.0]))


def test_bounded_actions_are_scaled_to_the_box() -> None:
    spaces = Spaces(OBS, UNEVEN)
    policy = np.array([[-1.0, -1.0], [0.0, 0.0], [1.0, 1.0], [0.5, -0.5]], np.float32)
    # low + (a + 1) / 2 * (high - low):  widths 6 and 10
    expected = [[-2.0, 0.0], [1.0, 5.0], [4.0, 10.0], [2.5, 2.5]]
    assert spaces.to_env(policy).tolist() == expected
    assert spaces.to_env(policy).dtype == np.float32
    assert spaces.from_env(np.float32(expected)).tolist() == policy.tolist()


def test_actions_out_of_bounds_are_clipped() -> None:
    assert Spaces(OBS, UNEVEN).to_env(np.float32([[-7.0, 7.0]])).tolist() == [[-2.0, 10.0]]


@given(st.lists(st.floats(-50, 50, width=32), min_size=2, max_size=2))
def test_env_never_receives_an_action_outside_its_box(action: list[float]) -> None:
    assert UNEVEN.contains(Spaces(OBS, UNEVEN).to_env(np.float32(action)))


def test_unbounded_actions_are_unchanged() -> None:
    spaces = Spaces(OBS, Box(-np.inf, np.inf, (2,), np.float32))
    action = np.float32([[5.0, -900.0]])
    assert spaces.to_env(action) is action
    assert spaces.from_env(action) is action


def test_discrete_actions_are_shifted_to_their_start() -> None:
    spaces = Spaces(OBS, Discrete(3, start=5))
    assert spaces.to_env(np.array([0, 2])).tolist() == [5, 7]
    assert spaces.from_env(np.array([5, 7])).tolist() == [0, 2]
    plain = Spaces(OBS, Discrete(3))
    assert plain.to_env(np.array([0, 2])).tolist() == plain.from_env(np.array([0, 2])).tolist() == [0, 2]


def test_multi_discrete_actions_are_shifted_to_their_start() -> None:
    spaces = Spaces(OBS, MultiDiscrete([2, 3], start=[1, 10]))
    assert spaces.to_env(np.array([[0, 2]])).tolist() == [[1, 12]]
    assert spaces.from_env(np.array([[1, 12]])).tolist() == [[0, 2]]


def test_num_actions_counts_discrete_actions_or_dimensions() -> None:
    assert Spaces(OBS, Discrete(3, start=5)).num_actions == 3
    assert Spaces(OBS, MultiDiscrete([2, 3])).num_actions == 2
    assert Spaces(OBS, UNEVEN).num_actions == 2
    assert Spaces(OBS, Discrete(3)).discrete
    assert Spaces(OBS, MultiDiscrete([2, 3])).discrete
    assert not Spaces(OBS, UNEVEN).discrete


def test_floats_are_stored_in_single_precision_and_other_types_unchanged() -> None:
    space = Dict(
        {
            "cue": Discrete(3),
            "double": Box(-1, 1, (2,), np.float64),
            "image": Box(0, 255, (4, 4, 3), np.uint8),
            "parts": Dict({"bits": MultiBinary(3), "options": MultiDiscrete([2, 3])}),
        }
    )
    assert space_fields(space) == {
        "cue": Field((), np.dtype(np.int64)),
        "double": Field((2,), np.dtype(np.float32)),
        "image": Field((4, 4, 3), np.dtype(np.uint8)),
        "parts": {"bits": Field((3,), np.dtype(np.int8)), "options": Field((2,), np.dtype(np.int64))},
    }


@pytest.mark.parametrize("space", [Text(5), Tuple([Discrete(2)])])
def test_spaces_without_array_elements_are_rejected(space: object) -> None:
    with pytest.raises(UserError, match="can't be stored as arrays; allowed are Box"):
        space_fields(space)


def test_fields_are_the_base_fields_and_the_mask() -> None:
    fields = Spaces(OBS, Discrete(4), mask=4).fields()
    assert list(fields) == ["obs", "action", "reward", "terminated", "truncated", "mask"]
    assert fields["mask"] == Field((4,), np.dtype(bool))
    assert fields["reward"] == Field((), np.dtype(np.float32))
    assert "mask" not in Spaces(OBS, Discrete(4)).fields()


def test_every_field_but_the_flags_has_an_agent_dimension() -> None:
    spaces = Spaces(OBS, Discrete(4), num_agents=3, mask=4)
    fields = spaces.fields()
    assert {name: field.shape for name, field in fields.items()} == {
        "obs": (3, 2),
        "action": (3,),
        "reward": (3,),
        "terminated": (),
        "truncated": (),
        "mask": (3, 4),
    }

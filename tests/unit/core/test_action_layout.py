"""Vectors of composite actions: their columns, scales, masks and random elements."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from dummy_envs import HYBRID
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Sequence, Tuple
from gymnasium.vector.utils import batch_space, iterate

from zhixing.core.policy import Decision, Phase, Policy
from zhixing.core.spaces import Spaces
from zhixing.core.tree import tree_leaves
from zhixing.errors import UserError

OBS = Box(-1.0, 1.0, (2,), np.float32)
SMALL = Dict({"aim": Box(np.float32([0.0]), np.float32([4.0])), "tool": Discrete(3, start=5), "up": MultiBinary(2)})


class RandomPolicy(Policy):
    def act(self, obs: Any, hidden: Any, mask: Any, phase: Phase, rng: torch.Generator, env_steps: int) -> Decision:
        return Decision(self.random_action(len(obs), mask, rng))


def same(one: Any, other: Any) -> bool:
    pairs = zip(tree_leaves(one), tree_leaves(other), strict=True)
    return all(np.array_equal(a, b) and np.asarray(a).dtype == np.asarray(b).dtype for a, b in pairs)


def test_vectors_have_choices_then_bits_then_numbers() -> None:
    spaces = Spaces(OBS, SMALL)
    field = spaces.fields()["action"]
    assert (field.shape, field.dtype, spaces.num_actions, spaces.discrete) == ((4,), np.float32, 4, False)
    # tool 2 counts from 5; up is (0, 1); 0.5 in [-1, 1] is 3 in [0, 4]
    action = spaces.to_env(np.float32([2.0, 0.0, 1.0, 0.5]))
    assert same(action, {"aim": np.float32([3.0]), "tool": np.int64(7), "up": np.int8([0, 1])})
    assert SMALL.contains(action)
    assert spaces.from_env(action).tolist() == [2.0, 0.0, 1.0, 0.5]


def test_numbers_out_of_bounds_are_clipped() -> None:
    action = Spaces(OBS, SMALL).to_env(np.float32([2.0, 0.0, 1.0, -7.0]))
    assert action["aim"].tolist() == [0.0]


@pytest.mark.parametrize(
    "space",
    [HYBRID, Tuple([Discrete(2), Tuple([Box(-np.inf, np.inf, (2,))])]), Box(-1, 1, (2, 3)), MultiBinary([2, 2])],
    ids=str,
)
def test_elements_survive_the_conversion_to_vectors(space: Any) -> None:
    spaces = Spaces(OBS, space)
    space.seed(0)
    for _ in range(20):
        element = space.sample()
        assert same(spaces.unflatten_action(spaces.flatten_action(element)), element)
        returned = spaces.to_env(spaces.from_env(element))
        assert space.contains(returned)
        for leaf, expected in zip(tree_leaves(returned), tree_leaves(element), strict=True):
            np.testing.assert_allclose(leaf, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("space", [HYBRID, Tuple([Discrete(2), Box(-1, 1, (2,))])], ids=str)
def test_batches_are_elements_of_gymnasiums_batched_space(space: Any) -> None:
    spaces, batched = Spaces(OBS, space), batch_space(space, 3)
    policy_actions = RandomPolicy(spaces).random_action(3, None, torch.Generator().manual_seed(0)).numpy()
    actions = spaces.to_env(policy_actions)
    assert batched.contains(actions)
    for one, policy_action in zip(iterate(batched, actions), policy_actions, strict=True):
        assert same(one, spaces.to_env(policy_action))
    assert np.allclose(spaces.from_env(actions), policy_actions, atol=1e-6)


def test_random_choices_are_allowed_and_numbers_cover_their_range() -> None:
    space = Dict({"a": Discrete(3), "b": MultiBinary(1), "c": MultiDiscrete([2, 2]), "d": Box(-1, 1, (1,))})
    spaces = Spaces(OBS, space, mask=7)
    mask = np.array([True, False, True, False, True, True, True])
    rows = RandomPolicy(spaces).random_action(500, torch.from_numpy(mask).expand(500, -1), torch.Generator())
    values = [set(column.tolist()) for column in rows[:, :4].unbind(-1)]
    assert values == [{0.0, 2.0}, {1.0}, {0.0, 1.0}, {0.0, 1.0}]
    assert rows[:, 4].min() < -0.9
    assert rows[:, 4].max() > 0.9
    space.seed(0)
    samples = [spaces.layout.sample(mask.astype(np.int8)) for _ in range(200)]
    assert all(space.contains(sample) for sample in samples)
    assert {int(sample["a"]) for sample in samples} == {0, 2}
    assert {int(sample["c"][0]) for sample in samples} == {1}


@pytest.mark.parametrize(
    ("space", "message"),
    [
        (Sequence(Discrete(2)), "the action space is Sequence.*; allowed are Discrete"),
        (Dict({"a": Discrete(2), "b": Box(0, 9, (1,), np.uint8)}), "with the part Box.*Box of floats"),
        (Dict({}), "the action space is Dict.*; allowed are"),
        (Dict({1: Discrete(2)}), "needs strings as names"),
        (Tuple([Discrete(3, start=1 << 24)]), "must not exceed 16,777,216"),
    ],
    ids=str,
)
def test_unsupported_spaces_are_rejected(space: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Spaces(OBS, space).fields()


def test_actions_of_another_structure_are_rejected() -> None:
    for wrong in (np.zeros(4), {"aim": np.zeros(1), "tool": 5}, {"aim": np.zeros(3), "tool": 5, "up": np.zeros(2)}):
        with pytest.raises(UserError, match=r"is not in the space Dict"):
            Spaces(OBS, SMALL).flatten_action(wrong)

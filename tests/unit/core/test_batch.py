from __future__ import annotations

import numpy as np
import pytest
import torch

from zhixing.core.batch import Batch
from zhixing.core.tree import Field


def nested() -> Batch:
    return Batch(
        obs={"x": np.arange(12.0).reshape(3, 2, 2), "y": {"z": np.arange(6).reshape(3, 2)}},
        hidden=(np.ones((3, 2)), np.zeros((3, 2))),
        reward=np.arange(6.0).reshape(3, 2),
    )


def test_a_field_that_nobody_declared_is_told() -> None:
    with pytest.raises(AttributeError, match="this batch has no field 'logp', only obs, hidden, reward"):
        _ = nested().logp


def test_a_batch_takes_no_new_values() -> None:
    batch = nested()
    with pytest.raises(AttributeError, match=r"batch\.replace\(reward=\.\.\.\)"):
        batch.reward = 3
    with pytest.raises(AttributeError, match="no field 'logp'"):
        batch.replace(logp=1)
    assert batch.fields == ("obs", "hidden", "reward")


def test_replace_leaves_the_first_one_alone() -> None:
    batch = nested()
    other = batch.replace(reward=np.full((3, 2), 7.0))
    assert other.reward[0, 0] == 7.0
    assert batch.reward[0, 0] == 0.0
    assert other.obs is batch.obs


def test_indexing_reaches_every_leaf() -> None:
    part = nested()[1:, 0]
    assert part.obs["x"].tolist() == [[4.0, 5.0], [8.0, 9.0]]
    assert part.obs["y"]["z"].tolist() == [2, 4]
    assert part.hidden[0].shape == (2,)
    assert len(part) == 2


def test_flatten_goes_row_by_row() -> None:
    flat = nested().flatten()
    assert flat.reward.tolist() == [0, 1, 2, 3, 4, 5]
    assert flat.obs["x"].shape == (6, 2)
    assert flat.obs["y"]["z"].tolist() == [0, 1, 2, 3, 4, 5]


def test_a_field_given_as_a_function_is_computed_once_and_only_when_read() -> None:
    calls: list[int] = []

    def later() -> np.ndarray:
        calls.append(1)
        return np.ones(3)

    batch = Batch(reward=np.zeros(3), next_obs=later)
    assert "next_obs" in batch
    assert repr(batch) == "Batch(reward=float64[3], next_obs=<not read yet>)"
    assert len(batch.select(["reward", "next_obs"])) == 3
    assert not calls
    assert batch.next_obs.tolist() == batch.next_obs.tolist() == [1.0, 1.0, 1.0]
    assert len(calls) == 1


def test_torch_and_numpy_share_memory_on_the_cpu() -> None:
    batch = nested()
    tensors = batch.to("cpu")
    assert isinstance(tensors.obs["y"]["z"], torch.Tensor)
    batch.reward[0, 0] = 9.0
    assert tensors.reward[0, 0] == 9.0
    assert tensors.numpy().reward[0, 0] == 9.0


def test_stack_and_cat_join_every_leaf() -> None:
    one, two = nested(), nested()
    assert Batch.stack([one, two]).obs["x"].shape == (2, 3, 2, 2)
    assert Batch.stack([one, two], dim=1).reward.shape == (3, 2, 2)
    joined = Batch.cat([one.to("cpu"), two.to("cpu")])
    assert isinstance(joined.reward, torch.Tensor)
    assert joined.reward.tolist() == [[0, 1], [2, 3], [4, 5]] * 2


def test_allocate_gives_zeros_of_the_declared_types() -> None:
    spec = {"obs": {"picture": Field((2, 2), np.dtype(np.uint8))}, "reward": Field((), np.dtype(np.float32))}
    batch = Batch.allocate(spec, (5, 3))
    assert batch.obs["picture"].shape == (5, 3, 2, 2)
    assert batch.obs["picture"].dtype == np.uint8
    assert batch.reward.shape == (5, 3)
    assert not batch.reward.any()


def test_a_batch_without_fields_is_empty() -> None:
    assert len(Batch()) == 0

from __future__ import annotations

import numpy as np
import pytest
import torch

from zhixing.core.batch import Batch


def nested() -> Batch:
    return Batch(
        obs={"x": np.arange(12.0).reshape(3, 2, 2), "y": {"z": np.arange(6).reshape(3, 2)}},
        hidden=(np.ones((3, 2)), np.zeros((3, 2))),
        reward=np.arange(6.0).reshape(3, 2),
    )


def test_reading_an_unknown_field_raises() -> None:
    with pytest.raises(AttributeError, match="this batch has no field 'logp', only obs, hidden, reward"):
        _ = nested().logp


def test_fields_cannot_be_set_or_added() -> None:
    batch = nested()
    with pytest.raises(AttributeError, match=r"batch\.replace\(reward=\.\.\.\)"):
        batch.reward = 3
    with pytest.raises(AttributeError, match="no field 'logp'"):
        batch.replace(logp=1)
    assert batch.fields == ("obs", "hidden", "reward")


def test_replace_does_not_change_the_original() -> None:
    batch = nested()
    replaced = batch.replace(reward=np.full((3, 2), 7.0))
    assert replaced.reward[0, 0] == 7.0
    assert batch.reward[0, 0] == 0.0
    assert replaced.obs is batch.obs


def test_get_returns_none_for_a_missing_field() -> None:
    batch = nested()
    assert batch.get("reward") is batch.reward
    assert batch.get("mask") is None


def test_indexing_applies_to_every_leaf() -> None:
    part = nested()[1:, 0]
    assert part.obs["x"].tolist() == [[4.0, 5.0], [8.0, 9.0]]
    assert part.obs["y"]["z"].tolist() == [2, 4]
    assert part.hidden[0].shape == (2,)
    assert len(part) == 2


def test_flatten_merges_time_and_envs_row_by_row() -> None:
    flat = nested().flatten()
    assert flat.reward.tolist() == [0, 1, 2, 3, 4, 5]
    assert flat.obs["x"].shape == (6, 2)
    assert flat.obs["y"]["z"].tolist() == [0, 1, 2, 3, 4, 5]


def test_lazy_field_is_computed_once_when_first_read() -> None:
    calls: list[int] = []

    def compute() -> np.ndarray:
        calls.append(1)
        return np.ones(3)

    batch = Batch(reward=np.zeros(3), next_obs=compute)
    assert "next_obs" in batch
    assert repr(batch) == "Batch(reward=float64[3], next_obs=<not read yet>)"
    assert len(batch.select(["reward", "next_obs"])) == 3
    assert not calls
    assert batch.next_obs.tolist() == batch.next_obs.tolist() == [1.0, 1.0, 1.0]
    assert len(calls) == 1


def test_tensors_and_arrays_share_memory_on_the_cpu() -> None:
    batch = nested()
    tensors = batch.to("cpu")
    assert isinstance(tensors.obs["y"]["z"], torch.Tensor)
    batch.reward[0, 0] = 9.0
    assert tensors.reward[0, 0] == 9.0
    assert tensors.numpy().reward[0, 0] == 9.0


def test_cat_concatenates_every_leaf() -> None:
    arrays = Batch.cat([nested(), nested()], dim=1)
    assert arrays.obs["x"].shape == (3, 4, 2)
    tensors = Batch.cat([nested().to("cpu"), nested().to("cpu")])
    assert isinstance(tensors.reward, torch.Tensor)
    assert tensors.reward.tolist() == [[0, 1], [2, 3], [4, 5]] * 2


def test_batch_without_fields_is_empty() -> None:
    assert len(Batch()) == 0

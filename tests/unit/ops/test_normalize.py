"""Running statistics against those of the whole data, and reward scaling by hand."""

from __future__ import annotations

import pytest
import torch

from zhixing.ops.normalize import RewardScaler, RunningNorm


def test_incremental_statistics_equal_those_of_the_whole() -> None:
    data = 3.0 + 2.0 * torch.randn(1000, 4, generator=torch.Generator().manual_seed(0))
    norm = RunningNorm((4,))
    for part in (data[:1], data[1:200], data[200:201], data[201:]):
        norm.update(part)
    assert norm.count == 1000
    assert torch.allclose(norm.mean, data.double().mean(0), atol=1e-12)
    assert torch.allclose(norm.var, data.double().var(0, unbiased=False), atol=1e-12)
    scaled = norm(data)
    assert scaled.dtype == torch.float32
    assert torch.allclose(scaled.mean(0), torch.zeros(4), atol=1e-5)
    assert torch.allclose(scaled.std(0, unbiased=False), torch.ones(4), atol=1e-5)


def test_leading_dimensions_are_rows() -> None:
    data = torch.randn(5, 6, 3, generator=torch.Generator().manual_seed(1))
    flat, nested = RunningNorm((3,)), RunningNorm((3,))
    flat.update(data.reshape(30, 3))
    nested.update(data)
    assert torch.equal(flat.mean, nested.mean)
    assert nested.count == 30


def test_no_data_leaves_values_unchanged_and_outliers_are_clipped() -> None:
    norm = RunningNorm((2,), clip=5.0)
    assert torch.allclose(norm(torch.tensor([[1.0, -2.0]])), torch.tensor([[1.0, -2.0]]))
    assert norm(torch.tensor([[99.0, -99.0]])).tolist() == [[5.0, -5.0]]


def test_statistics_have_double_precision() -> None:
    # float32 can't represent 1e8 + 1; the mean of 1e8 and 1e8 + 1 is 1e8 + 0.5
    norm = RunningNorm(())
    norm.update(torch.tensor([1e8], dtype=torch.float64))
    norm.update(torch.tensor([1e8 + 1], dtype=torch.float64))
    assert norm.mean == 1e8 + 0.5
    assert norm.var == 0.25


def test_reward_scaler_by_hand() -> None:
    # gamma 0.5. Env 0 has rewards 2, 2 and ends after the first step: returns 2, then 2 (after a reset).
    # Env 1 has rewards 4, 2: returns 4, then 0.5 * 4 + 2 = 4.
    # The returns 2, 4, 2, 4 have mean 3 and variance 1: rewards are divided by 1.
    scaler = RewardScaler(0.5, 2)
    ended = torch.tensor([[True, False], [False, False]])
    reward = torch.tensor([[2.0, 4.0], [2.0, 2.0]])
    assert torch.allclose(scaler(reward, ended), reward)
    assert scaler.running.tolist() == [2.0, 4.0]
    # next: rewards 7 and 0: returns 0.5 * 2 + 7 = 8 and 0.5 * 4 + 0 = 2. The six returns 2, 4, 2, 4, 8, 2:
    # mean 22 / 6 = 11/3, variance (4+16+4+16+64+4) / 6 - 121/9 = 18 - 13.444 = 41/9; std 2.13437
    scaled = scaler(torch.tensor([[7.0, 0.0]]), torch.zeros(1, 2, dtype=torch.bool))
    assert scaled[0].tolist() == pytest.approx([7 / 2.134375, 0.0], rel=1e-5)


def test_rewards_keep_their_sign_and_outliers_are_clipped() -> None:
    scaler = RewardScaler(0.9, 1, clip=3.0)
    reward = torch.tensor([[0.1]] * 50 + [[-40.0]])
    scaled = scaler(reward, torch.ones(51, 1, dtype=torch.bool))
    assert (scaled[:50] > 0).all()
    assert scaled[50].item() == -3.0  # the std is about 5.5, and -40 / 5.5 < -3

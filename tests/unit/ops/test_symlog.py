"""Symlog scaling and two-hot distributions, by hand."""

from __future__ import annotations

import math

import pytest
import torch

from zhixing.ops.symlog import MAX_SYMLOG, symexp, symexp_bins, symlog, two_hot, two_hot_loss, two_hot_mean


def test_symlog_by_hand() -> None:
    e = math.e
    actual = symlog(torch.tensor([0.0, e - 1, 1 - e, 0.001, e**3 - 1]))
    assert actual.tolist() == pytest.approx([0.0, 1.0, -1.0, 0.0009995, 3.0], abs=1e-6)


def test_symexp_undoes_symlog() -> None:
    x = torch.tensor([-1e6, -3.0, -0.25, 0.0, 1e-4, 0.5, 20.0, 1e5])
    assert torch.allclose(symexp(symlog(x)), x, rtol=1e-4)
    assert torch.allclose(symlog(symexp(x.clamp(-10, 10))), x.clamp(-10, 10), rtol=1e-4)


def test_bins_are_equally_spaced_in_symlog_and_symmetric() -> None:
    bins = symexp_bins(5)
    # in symlog: -20, -10, 0, 10, 20
    assert bins.tolist() == pytest.approx([1 - math.e**20, 1 - math.e**10, 0.0, math.e**10 - 1, math.e**20 - 1])
    assert symlog(symexp_bins(255)).diff().tolist() == pytest.approx([2 * MAX_SYMLOG / 254] * 254, rel=1e-3)


BINS = torch.tensor([-10.0, -2.0, 0.0, 2.0, 10.0])


def test_two_hot_by_hand() -> None:
    # 1 is midway between 0 and 2; 4 is a quarter of the way from 2 to 10; -2 is a bin; 99 is clipped to the last bin
    actual = two_hot(torch.tensor([[1.0, 4.0], [-2.0, 99.0]]), BINS)
    assert actual.shape == (2, 2, 5)
    assert actual[0].tolist() == [[0, 0, 0.5, 0.5, 0], [0, 0, 0, 0.75, 0.25]]
    assert actual[1].tolist() == [[0, 1, 0, 0, 0], [0, 0, 0, 0, 1]]


def test_two_hot_preserves_the_mean() -> None:
    bins = symexp_bins(255)
    x = torch.tensor([-1e5, -17.0, -1.0, -0.01, 0.0, 0.3, 1.0, 5.0, 200.0, 4e8])
    assert torch.allclose(two_hot(x, bins) @ bins, x, rtol=1e-4, atol=1e-6)
    logits = two_hot(x, bins).clamp_min(1e-30).log()
    assert torch.allclose(two_hot_mean(logits, bins), x, rtol=1e-3, atol=1e-3)


def test_mean_of_a_distribution_by_hand() -> None:
    # 0.1 · -10 + 0.2 · -2 + 0.3 · 0 + 0.15 · 2 + 0.25 · 10 = 1.4
    logits = torch.tensor([0.1, 0.2, 0.3, 0.15, 0.25]).log() + 7.0
    assert float(two_hot_mean(logits, BINS)) == pytest.approx(1.4)


def test_symmetric_distribution_has_mean_exactly_zero() -> None:
    """The outermost bins are ±5e8, so a plain sum would leave large rounding errors."""
    assert two_hot_mean(torch.zeros(3, 255), symexp_bins(255)).tolist() == [0.0, 0.0, 0.0]
    noisy = torch.full((255,), 0.37)
    noisy[120:135] += torch.linspace(-1, 1, 15)
    assert abs(float(two_hot_mean(noisy, symexp_bins(255)))) < 1.0


def test_loss_is_cross_entropy() -> None:
    # probabilities 1/5 each: log 5 for any target, and 2 log 5 for the sum of two targets
    logits = torch.zeros(2, 5, requires_grad=True)
    targets = two_hot(torch.tensor([1.0, 4.0]), BINS)
    assert two_hot_loss(logits, targets).tolist() == pytest.approx([math.log(5)] * 2)
    assert two_hot_loss(logits, targets + targets.flip(0)).tolist() == pytest.approx([2 * math.log(5)] * 2)
    two_hot_loss(logits, targets).sum().backward()
    assert logits.grad is not None
    assert torch.allclose(logits.grad, 0.2 - targets)  # softmax minus target

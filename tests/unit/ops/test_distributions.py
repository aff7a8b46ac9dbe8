"""Distributions: log-probabilities and entropies by hand, and frequencies of samples."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from zhixing.ops.distributions import Categorical, Distribution, Gaussian, MultiCategorical


def log(*probabilities: float) -> torch.Tensor:
    return torch.tensor(probabilities).log()


def rng() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def test_categorical_by_hand() -> None:
    d = Categorical(log(0.5, 0.25, 0.25) + 7.0)  # an added constant has no effect
    assert d.log_prob(torch.tensor(1)).item() == pytest.approx(math.log(0.25), rel=1e-6)
    # 0.5 ln 2 + 2 * 0.25 ln 4 = 1.5 ln 2
    assert d.entropy().item() == pytest.approx(1.5 * math.log(2), rel=1e-6)
    assert d.mode().item() == 0


def test_categorical_sample_frequencies() -> None:
    probability = torch.tensor([0.1, 0.2, 0.7])
    samples = Categorical(probability.log().expand(40_000, 3)).sample(rng())
    frequency = samples.bincount(minlength=3) / 40_000
    # three standard errors are at most 3 sqrt(0.25 / 40000) = 0.0075
    assert torch.allclose(frequency, probability, atol=0.0075)


def test_masked_actions_have_probability_0() -> None:
    mask = torch.tensor([True, False, True])
    d = Categorical(log(0.2, 0.6, 0.2), mask)  # the others have 0.5 each
    assert d.log_prob(torch.tensor(0)).item() == pytest.approx(math.log(0.5), rel=1e-6)
    assert d.log_prob(torch.tensor(1)).item() < -1e6
    assert d.entropy().item() == pytest.approx(math.log(2), rel=1e-6)
    assert d.mode().item() == 0
    assert not (Categorical(log(0.2, 0.6, 0.2).expand(5000, 3), mask).sample(rng()) == 1).any()


def test_masked_entropy_has_a_finite_gradient() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0]], requires_grad=True)
    Categorical(logits, torch.tensor([[True, True, False]])).entropy().sum().backward()
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()
    assert logits.grad[0, 2] == 0.0


def test_multi_categorical_sums_over_dimensions() -> None:
    d = MultiCategorical(torch.cat([log(0.5, 0.5), log(0.1, 0.2, 0.7)]).expand(4, 5), [2, 3])
    action = torch.tensor([[0, 0], [1, 2], [0, 1], [1, 0]])
    expected = [math.log(0.5 * p) for p in (0.1, 0.7, 0.2, 0.1)]
    assert d.log_prob(action).tolist() == pytest.approx(expected, rel=1e-5)
    entropy = math.log(2) - sum(p * math.log(p) for p in (0.1, 0.2, 0.7))
    assert d.entropy().tolist() == pytest.approx([entropy] * 4, rel=1e-5)
    assert d.mode()[:, 1].tolist() == [2] * 4
    assert d.sample(rng()).shape == (4, 2)


def test_multi_categorical_samples_dimensions_independently() -> None:
    samples = MultiCategorical(torch.cat([log(0.3, 0.7), log(0.6, 0.4)]).expand(40_000, 4), [2, 2]).sample(rng())
    frequency = (samples[:, 0] * 2 + samples[:, 1]).bincount(minlength=4) / 40_000
    assert torch.allclose(frequency, torch.tensor([0.18, 0.12, 0.42, 0.28]), atol=0.0075)


def test_gaussian_by_hand() -> None:
    d = Gaussian(torch.tensor([[1.0, -1.0]]), torch.tensor([0.0, math.log(2.0)]))
    # z = (2 - 1) / 1 = 1 and (3 + 1) / 2 = 2:  -0.5 - 2 - ln 2 - ln 2π
    expected = -2.5 - math.log(2) - math.log(2 * math.pi)
    assert d.log_prob(torch.tensor([[2.0, 3.0]])).item() == pytest.approx(expected, rel=1e-6)
    # per dimension: 0.5 ln(2πe) + ln σ
    assert d.entropy().item() == pytest.approx(math.log(2 * math.pi * math.e) + math.log(2), rel=1e-6)
    assert d.mode().tolist() == [[1.0, -1.0]]


def test_gaussian_samples_have_its_mean_and_std() -> None:
    samples = Gaussian(torch.tensor([2.0, -1.0]).expand(40_000, 2), torch.tensor([0.0, math.log(3.0)])).sample(rng())
    # three standard errors of the mean are 3 * 3 / 200 = 0.045
    assert torch.allclose(samples.mean(0), torch.tensor([2.0, -1.0]), atol=0.045)
    assert torch.allclose(samples.std(0), torch.tensor([1.0, 3.0]), rtol=0.02)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Categorical(torch.zeros(8, 5)),
        lambda: MultiCategorical(torch.zeros(8, 5), [2, 3]),
        lambda: Gaussian(torch.zeros(8, 2), torch.zeros(2)),
    ],
)
def test_samples_depend_only_on_the_generator(make: Callable[[], Distribution]) -> None:
    d = make()
    torch.manual_seed(0)
    first = d.sample(rng())
    torch.manual_seed(1)
    assert torch.equal(d.sample(rng()), first)
    assert not torch.equal(d.sample(torch.Generator().manual_seed(9)), first)

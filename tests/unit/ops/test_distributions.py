"""Distributions: log-probabilities and entropies by hand, and frequencies of samples."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from zhixing.ops.distributions import Bernoulli, Categorical, Composite, Distribution, Gaussian, MultiCategorical


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


def test_bernoulli_by_hand() -> None:
    d = Bernoulli(torch.tensor([[0.0, math.log(3.0)]]))  # probabilities 1/2 and 3/4
    assert d.log_prob(torch.tensor([[1, 0]], dtype=torch.int8)).item() == pytest.approx(math.log(1 / 8), rel=1e-6)
    assert d.log_prob(torch.tensor([[0, 1]], dtype=torch.int8)).item() == pytest.approx(math.log(3 / 8), rel=1e-6)
    entropy = math.log(2) + 0.75 * math.log(4 / 3) + 0.25 * math.log(4)
    assert d.entropy().item() == pytest.approx(entropy, rel=1e-6)
    assert d.mode().tolist() == [[0, 1]]
    # KL of Bernoulli(3/4) from Bernoulli(1/2): 3/4 ln(3/2) + 1/4 ln(1/2)
    other = Bernoulli(torch.zeros(1, 2))
    assert d.kl(other).item() == pytest.approx(0.75 * math.log(1.5) + 0.25 * math.log(0.5), rel=1e-5)
    assert d.kl(d).item() == 0.0


def test_bernoulli_sample_frequencies() -> None:
    samples = Bernoulli(torch.tensor([0.0, math.log(3.0)]).expand(40_000, 2)).sample(rng())
    assert samples.dtype == torch.int8
    # three standard errors are at most 3 sqrt(0.25 / 40000) = 0.0075
    assert torch.allclose(samples.float().mean(0), torch.tensor([0.5, 0.75]), atol=0.0075)


def composite(choice: torch.Tensor, bits: torch.Tensor, mean: torch.Tensor) -> Composite:
    parts = [MultiCategorical(choice, [2, 3]), Bernoulli(bits), Gaussian(mean, torch.zeros(mean.shape[-1]))]
    return Composite(parts, [2, bits.shape[-1], mean.shape[-1]])


def test_composite_sums_over_its_parts() -> None:
    d = composite(torch.randn(4, 5), torch.randn(4, 1), torch.randn(4, 2))
    other = composite(torch.randn(4, 5), torch.randn(4, 1), torch.randn(4, 2))
    action = d.sample(rng())
    assert (action.shape, action.dtype) == ((4, 5), torch.float32)
    columns = [action[:, :2].long(), action[:, 2:3], action[:, 3:]]
    expected = sum(part.log_prob(a) for part, a in zip(d.parts, columns, strict=True))
    assert torch.allclose(d.log_prob(action), expected)
    assert torch.allclose(d.entropy(), sum(part.entropy() for part in d.parts))
    assert torch.allclose(d.kl(other), sum(p.kl(q) for p, q in zip(d.parts, other.parts, strict=True)))
    assert torch.equal(d.mode(), torch.cat([part.mode().float() for part in d.parts], -1))


@pytest.mark.parametrize(
    "make",
    [
        lambda: Bernoulli(torch.zeros(8, 5)),
        lambda: composite(torch.zeros(8, 5), torch.zeros(8, 2), torch.zeros(8, 3)),
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

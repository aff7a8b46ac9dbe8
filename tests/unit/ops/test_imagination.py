"""Functions of world models and imagination: by hand, or against brute force."""

from __future__ import annotations

import math

import pytest
import torch

from zhixing.ops.imagination import (
    balanced_kl,
    categorical_kl,
    discount_weights,
    lambda_returns,
    percentile_range,
    straight_through,
    uniform_mix,
)


def test_uniform_mix_by_hand() -> None:
    # softmax of log 3 and 0: 3/4 and 1/4; with a tenth uniform 0.9 · 0.75 + 0.05 and 0.9 · 0.25 + 0.05
    assert uniform_mix(torch.tensor([math.log(3), 0.0]), 0.1).tolist() == pytest.approx([0.725, 0.275])
    mixed = uniform_mix(torch.tensor([0.0, -1e9, -1e9, -1e9]), 0.01)
    assert mixed.tolist() == pytest.approx([0.9925, 0.0025, 0.0025, 0.0025])


def test_straight_through_inverts_the_cumulative_distribution() -> None:
    probability = torch.tensor([[0.2, 0.5, 0.3]]).expand(5, 3)
    # cumulative: 0.2, 0.7, 1
    sample = straight_through(probability, torch.tensor([0.0, 0.19, 0.21, 0.69, 0.71]))
    assert sample.argmax(-1).tolist() == [0, 0, 1, 1, 2]
    assert sample.sum(-1).tolist() == [1.0] * 5
    assert straight_through(probability, None).argmax(-1).tolist() == [1] * 5
    # probabilities that sum to slightly less than one still give a class
    assert straight_through(probability * 0.999, torch.full((5,), 0.9999)).tolist() == [[0, 0, 1]] * 5


def test_straight_through_frequencies() -> None:
    rng = torch.Generator().manual_seed(0)
    probability = torch.tensor([0.1, 0.6, 0.3]).expand(20_000, 3)
    frequency = straight_through(probability, torch.rand(20_000, generator=rng)).mean(0)
    # the standard error of the largest is sqrt(0.6 · 0.4 / 20000) = 0.0035
    assert torch.allclose(frequency, probability[0], atol=0.014)


def test_straight_through_gradient() -> None:
    probability = torch.tensor([[0.2, 0.5, 0.3]], requires_grad=True)
    sample = straight_through(probability, torch.tensor([0.9]))
    assert sample.tolist() == [[0, 0, 1]]  # exactly
    (sample * torch.tensor([1.0, 2.0, 3.0])).sum().backward()
    assert probability.grad is not None
    assert probability.grad.tolist() == [[1, 2, 3]]


def test_kl_by_hand() -> None:
    # two variables: (1/2, 1/2) from (1/4, 3/4) is ½ log 2 + ½ log ⅔ = ½ log 4/3; one equal to itself is 0
    p = torch.tensor([[0.5, 0.5], [0.9, 0.1]]).log()
    q = torch.tensor([[0.25, 0.75], [0.9, 0.1]]).log()
    assert float(categorical_kl(p, q)) == pytest.approx(0.5 * math.log(4 / 3))


def logp_leaf(probability: list[float]) -> torch.Tensor:
    return torch.tensor([probability]).log().requires_grad_()  # [variables=1,classes]


def test_balanced_kl_gradients() -> None:
    posterior, prior = logp_leaf([0.9, 0.1]), logp_leaf([0.1, 0.9])
    kl = 0.9 * math.log(9) - 0.1 * math.log(9)
    dynamics, representation = balanced_kl(posterior, prior, free_nats=1.0)
    assert [dynamics.item(), representation.item()] == pytest.approx([kl, kl])
    dynamics.backward()
    assert posterior.grad is None
    assert prior.grad is not None
    assert prior.grad.tolist() == [
        pytest.approx([-0.9, -0.1])
    ]  # derivative of Σ p (log p - log q) with respect to log q
    prior.grad = None
    representation.backward()
    assert prior.grad is None
    assert posterior.grad is not None


def test_no_gradient_below_free_nats() -> None:
    posterior, prior = logp_leaf([0.6, 0.4]), logp_leaf([0.4, 0.6])  # 0.2 log 1.5 = 0.08 nats
    dynamics, representation = balanced_kl(posterior, prior, free_nats=1.0)
    assert [dynamics.item(), representation.item()] == [1.0, 1.0]
    (dynamics + representation).backward()
    assert posterior.grad is not None
    assert prior.grad is not None
    assert not posterior.grad.any()
    assert not prior.grad.any()
    assert balanced_kl(posterior, prior, free_nats=0.05)[0].item() == pytest.approx(0.2 * math.log(1.5))


@pytest.mark.parametrize("lam", [0.0, 0.3, 0.95, 1.0])
def test_lambda_returns_are_the_mixture_of_all_n_step_returns(lam: float) -> None:
    rng = torch.Generator().manual_seed(1)
    horizon, num = 6, 3
    reward = torch.randn(horizon, num, generator=rng)
    discount = torch.rand(horizon, num, generator=rng)
    value = torch.randn(horizon + 1, num, generator=rng)
    actual = lambda_returns(reward, discount, value, lam)
    for n in range(num):
        for t in range(horizon):
            total = 0.0
            for k in range(1, horizon - t + 1):  # k rewards, then the value
                n_step_return, weight = 0.0, 1.0
                for i in range(t, t + k):
                    n_step_return += weight * float(reward[i, n])
                    weight *= float(discount[i, n])
                n_step_return += weight * float(value[t + k, n])
                last = k == horizon - t
                total += n_step_return * (lam ** (k - 1) if last else (1 - lam) * lam ** (k - 1))
            assert float(actual[t, n]) == pytest.approx(total, abs=1e-5)


def test_discount_weights_by_hand() -> None:
    discount = torch.tensor([[0.9, 0.0], [0.5, 0.9], [0.1, 0.9]])
    assert discount_weights(discount).tolist() == [[1, 1], [pytest.approx(0.9), 0], [pytest.approx(0.45), 0]]


def test_percentile_range_by_hand() -> None:
    # of 0..100 in steps of 1 the 5th percentile is 5 and the 95th 95; outliers have no effect
    x = torch.arange(101.0).view(1, 101)
    assert float(percentile_range(x)) == 90.0
    x[0, 100], x[0, 0] = 1e9, -1e9
    assert float(percentile_range(x)) == 90.0

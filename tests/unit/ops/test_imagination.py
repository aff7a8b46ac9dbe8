"""What learning a world model and learning in it compute: by hand, or against brute force."""

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
    never = uniform_mix(torch.tensor([0.0, -1e9, -1e9, -1e9]), 0.01)
    assert never.tolist() == pytest.approx([0.9925, 0.0025, 0.0025, 0.0025])


def test_straight_through_draws_by_luck() -> None:
    chance = torch.tensor([[0.2, 0.5, 0.3]]).expand(5, 3)
    # laid end to end: the first up to 0.2, the second up to 0.7
    drawn = straight_through(chance, torch.tensor([0.0, 0.19, 0.21, 0.69, 0.71]))
    assert drawn.argmax(-1).tolist() == [0, 0, 1, 1, 2]
    assert drawn.sum(-1).tolist() == [1.0] * 5
    assert straight_through(chance, None).argmax(-1).tolist() == [1] * 5
    # chances that sum to a bit less than one still give one class
    assert straight_through(chance * 0.999, torch.full((5,), 0.9999)).tolist() == [[0, 0, 1]] * 5


def test_straight_through_draws_by_chance() -> None:
    rng = torch.Generator().manual_seed(0)
    chance = torch.tensor([0.1, 0.6, 0.3]).expand(20_000, 3)
    share = straight_through(chance, torch.rand(20_000, generator=rng)).mean(0)
    # the standard error of the largest is sqrt(0.6 · 0.4 / 20000) = 0.0035
    assert torch.allclose(share, chance[0], atol=0.014)


def test_gradient_passes_straight_through() -> None:
    chance = torch.tensor([[0.2, 0.5, 0.3]], requires_grad=True)
    drawn = straight_through(chance, torch.tensor([0.9]))
    assert drawn.tolist() == [[0, 0, 1]]  # exactly
    (drawn * torch.tensor([1.0, 2.0, 3.0])).sum().backward()
    assert chance.grad is not None
    assert chance.grad.tolist() == [[1, 2, 3]]


def test_kl_by_hand() -> None:
    # two variables: (1/2, 1/2) from (1/4, 3/4) is ½ log 2 + ½ log ⅔ = ½ log 4/3; one equal to itself is 0
    p = torch.tensor([[0.5, 0.5], [0.9, 0.1]]).log()
    q = torch.tensor([[0.25, 0.75], [0.9, 0.1]]).log()
    assert float(categorical_kl(p, q)) == pytest.approx(0.5 * math.log(4 / 3))


def _leaf(chance: list[float]) -> torch.Tensor:
    return torch.tensor([chance]).log().requires_grad_()  # [variables=1,classes]


def test_balance_moves_each_by_its_own_term() -> None:
    posterior, prior = _leaf([0.9, 0.1]), _leaf([0.1, 0.9])
    kl = 0.9 * math.log(9) - 0.1 * math.log(9)
    dynamics, representation = balanced_kl(posterior, prior, free_nats=1.0)
    assert [dynamics.item(), representation.item()] == pytest.approx([kl, kl])
    dynamics.backward()
    assert posterior.grad is None
    assert prior.grad is not None
    assert prior.grad.tolist() == [pytest.approx([-0.9, -0.1])]  # of Σ p (log p - log q) by log q
    prior.grad = None
    representation.backward()
    assert prior.grad is None
    assert posterior.grad is not None


def test_free_nats_leave_what_is_near_alone() -> None:
    posterior, prior = _leaf([0.6, 0.4]), _leaf([0.4, 0.6])  # 0.2 log 1.5 = 0.08 nats
    dynamics, representation = balanced_kl(posterior, prior, free_nats=1.0)
    assert [dynamics.item(), representation.item()] == [1.0, 1.0]
    (dynamics + representation).backward()
    assert posterior.grad is not None
    assert prior.grad is not None
    assert not posterior.grad.any()
    assert not prior.grad.any()
    assert balanced_kl(posterior, prior, free_nats=0.05)[0].item() == pytest.approx(0.2 * math.log(1.5))


@pytest.mark.parametrize("lam", [0.0, 0.3, 0.95, 1.0])
def test_imagined_returns_are_the_mixture_of_all_n_step_returns(lam: float) -> None:
    rng = torch.Generator().manual_seed(1)
    horizon, num = 6, 3
    reward = torch.randn(horizon, num, generator=rng)
    discount = torch.rand(horizon, num, generator=rng)
    value = torch.randn(horizon + 1, num, generator=rng)
    found = lambda_returns(reward, discount, value, lam)
    for n in range(num):
        for t in range(horizon):
            total = 0.0
            for k in range(1, horizon - t + 1):  # k rewards, then the value
                gain, left = 0.0, 1.0
                for i in range(t, t + k):
                    gain += left * float(reward[i, n])
                    left *= float(discount[i, n])
                gain += left * float(value[t + k, n])
                last = k == horizon - t
                total += gain * (lam ** (k - 1) if last else (1 - lam) * lam ** (k - 1))
            assert float(found[t, n]) == pytest.approx(total, abs=1e-5)


def test_what_is_reached_by_hand() -> None:
    discount = torch.tensor([[0.9, 0.0], [0.5, 0.9], [0.1, 0.9]])
    assert discount_weights(discount).tolist() == [[1, 1], [pytest.approx(0.9), 0], [pytest.approx(0.45), 0]]


def test_percentile_range_by_hand() -> None:
    # of 0..100 in steps of 1 the 5th percentile is 5 and the 95th 95; what lies beyond doesn't count
    x = torch.arange(101.0).view(1, 101)
    assert float(percentile_range(x)) == 90.0
    x[0, 100], x[0, 0] = 1e9, -1e9
    assert float(percentile_range(x)) == 90.0

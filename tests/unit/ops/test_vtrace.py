"""V-trace: by hand, against the sum in the paper, and equal to GAE on-policy."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from zhixing.ops.returns import gae, vtrace

FALSE = torch.zeros(2, 1, dtype=torch.bool)


def column(*numbers: float) -> Tensor:
    return torch.tensor(numbers).unsqueeze(1)


def test_vtrace_by_hand() -> None:
    """Ratios 2 and 0.5, clipped at 1: rho = c = 1, 0.5. Rewards 1, 2; values 3, 4; the final next value is 5; γ = 0.9.

    delta_1 = 0.5 (2 + 0.9·5 - 4) = 1.25          v_1 = 4 + 1.25 = 5.25
    delta_0 = 1 (1 + 0.9·4 - 3) = 1.6             v_0 = 3 + 1.6 + 0.9·1·1.25 = 5.725
    advantage_0 = 1 (1 + 0.9·5.25 - 3) = 2.725    advantage_1 = 0.5 (2 + 0.9·5 - 4) = 1.25
    """
    target, advantage = vtrace(
        column(math.log(2), math.log(0.5)), column(1, 2), column(3, 4), column(4, 5), FALSE, FALSE, 0.9
    )
    assert target.flatten().tolist() == pytest.approx([5.725, 5.25])
    assert advantage.flatten().tolist() == pytest.approx([2.725, 1.25])


def test_vtrace_clipping_by_hand() -> None:
    """The same with rho_bar = 1.5, c_bar = 0.8: rho = 1.5, 0.5 and c = 0.8, 0.5.

    v_0 = 3 + 1.5·1.6 + 0.9·0.8·1.25 = 6.3        advantage_0 = 1.5 (1 + 0.9·5.25 - 3) = 4.0875
    """
    ratio = column(math.log(2), math.log(0.5))
    values = column(1, 2), column(3, 4), column(4, 5)
    target, advantage = vtrace(ratio, *values, FALSE, FALSE, 0.9, rho_bar=1.5, c_bar=0.8)
    assert target.flatten().tolist() == pytest.approx([6.3, 5.25])
    assert advantage.flatten().tolist() == pytest.approx([4.0875, 1.25])


def test_truncation_bootstraps_and_termination_does_not() -> None:
    """The episode ends after step 0: terminated v_0 = 1; truncated with next value 7, v_0 = 1 + 0.9·7 = 7.3.

    Neither depends on the values of the next episode.
    """
    end = torch.tensor([[True], [False]])
    values = column(1, 2), column(3, 4), column(7, 5)
    on_policy = torch.zeros(2, 1)
    terminated, advantage = vtrace(on_policy, *values, end, FALSE, 0.9)
    assert terminated[0].item() == pytest.approx(1.0)
    assert advantage[0].item() == pytest.approx(1.0 - 3.0)
    truncated, advantage = vtrace(on_policy, *values, FALSE, end, 0.9)
    assert truncated[0].item() == pytest.approx(7.3)
    assert advantage[0].item() == pytest.approx(7.3 - 3.0)


def random_rollout() -> tuple[Tensor, ...]:
    T, N = 7, 3
    g = torch.Generator().manual_seed(0)
    numbers = [torch.randn(T, N, generator=g) for _ in range(4)]
    ends = torch.rand(2, T, N, generator=g) < 0.15
    ratio, reward, value, final_value = numbers
    shifted = torch.cat([value[1:], final_value[-1:]])
    next_value = torch.where(ends[0] | ends[1], final_value, shifted)
    return ratio, reward, value, next_value, ends[0], ends[1]


def test_vtrace_equals_the_sum_in_the_paper() -> None:
    """v_s = V(s) + Σ_t γ^(t-s) Π_{i<t} c_i · rho_t delta_t, summed term by term within each episode."""
    ratio, reward, value, next_value, terminated, truncated = random_rollout()
    target, _ = vtrace(ratio, reward, value, next_value, terminated, truncated, 0.9, 0.8, 1.2, 0.7)
    T, N = reward.shape
    for n in range(N):
        for s in range(T):
            total, weight = float(value[s, n]), 1.0
            for t in range(s, T):
                rho = min(1.2, math.exp(ratio[t, n]))
                bootstrap = 0.0 if terminated[t, n] else 0.9 * float(next_value[t, n])
                total += weight * rho * (float(reward[t, n]) + bootstrap - float(value[t, n]))
                if terminated[t, n] or truncated[t, n]:
                    break
                weight *= 0.9 * 0.8 * min(0.7, math.exp(ratio[t, n]))
            assert target[s, n].item() == pytest.approx(total, abs=1e-5)


def test_on_policy_vtrace_is_gae() -> None:
    _, *rest = random_rollout()
    for lam in (0.0, 0.7, 1.0):
        target, _ = vtrace(torch.zeros_like(rest[0]), *rest, 0.9, lam)
        assert torch.allclose(target - rest[1], gae(*rest, 0.9, lam), atol=1e-5)

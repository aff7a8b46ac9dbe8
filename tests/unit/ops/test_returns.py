"""Advantages by hand, and against an explicit sum."""

from __future__ import annotations

import pytest
import torch

from zhixing.ops.returns import gae, next_values


def test_gae_by_hand_with_termination_truncation_and_rollout_end() -> None:
    # gamma = 0.5, lambda = 0.5, so the trace carries 0.25. Rewards are 1, values 2 everywhere, next values as given.
    # env 0 terminates at t=1, env 1 is truncated at t=1, env 2 continues beyond the rollout
    reward = torch.ones(3, 3)
    value = torch.full((3, 3), 2.0)
    next_value = torch.tensor([[2.0, 2.0, 2.0], [8.0, 8.0, 2.0], [4.0, 4.0, 4.0]])
    terminated = torch.tensor([[0, 0, 0], [1, 0, 0], [0, 0, 0]], dtype=torch.bool)
    truncated = torch.tensor([[0, 0, 0], [0, 1, 0], [0, 0, 0]], dtype=torch.bool)
    # deltas r + 0.5 v' - v:  t=2: 1 + 2 - 2 = 1 for all
    #   t=1: terminated: 1 + 0 - 2 = -1;  truncated: 1 + 4 - 2 = 3;  neither: 1 + 1 - 2 = 0
    #   t=0: 1 + 1 - 2 = 0 for all
    # advantages:  t=1: -1 and 3 (traces end), 0 + 0.25 * 1 = 0.25;  t=0: -0.25, 0.75, 0.0625
    expected = torch.tensor([[-0.25, 0.75, 0.0625], [-1.0, 3.0, 0.25], [1.0, 1.0, 1.0]])
    assert torch.equal(gae(reward, value, next_value, terminated, truncated, 0.5, 0.5), expected)


def test_terminated_and_truncated_step_does_not_bootstrap() -> None:
    true = torch.ones(1, 1, dtype=torch.bool)
    # 3 - 2 = 1: the next value 100 is ignored after termination, although the step is also truncated
    assert (
        gae(torch.tensor([[3.0]]), torch.tensor([[2.0]]), torch.tensor([[100.0]]), true, true, 0.9, 0.9).item() == 1.0
    )


@pytest.mark.parametrize(("gamma", "lam"), [(0.99, 0.95), (1.0, 1.0), (0.9, 0.0), (0.0, 0.5)])
def test_gae_equals_the_sum_over_all_later_steps(gamma: float, lam: float) -> None:
    g = torch.Generator().manual_seed(0)
    T, N = 17, 5
    reward, value, next_value = (torch.randn(T, N, generator=g, dtype=torch.float64) for _ in range(3))
    terminated, truncated = (torch.rand(T, N, generator=g) < 0.15 for _ in range(2))
    expected = torch.zeros(T, N, dtype=torch.float64)
    for n in range(N):
        for t in range(T):
            weight = 1.0
            for k in range(t, T):
                bootstrap = 0.0 if terminated[k, n] else gamma * next_value[k, n]
                expected[t, n] += weight * (reward[k, n] + bootstrap - value[k, n])
                weight *= gamma * lam
                if terminated[k, n] or truncated[k, n]:
                    break
    actual = gae(reward, value, next_value, terminated, truncated, gamma, lam)
    assert torch.allclose(actual, expected, atol=1e-12)


def test_next_values_are_the_next_rows_except_at_boundaries() -> None:
    value = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    boundary = torch.tensor([[False, True], [False, False], [True, True]])
    # row order: (0,1) gets 10, (2,0) gets 20, (2,1) gets 30
    expected = torch.tensor([[3.0, 10.0], [5.0, 6.0], [20.0, 30.0]])
    assert torch.equal(next_values(value, boundary, torch.tensor([10.0, 20.0, 30.0])), expected)

"""Mixers: monotonicity, consistency of greedy actions, and values by hand."""

from __future__ import annotations

import itertools

import pytest
import torch

from zhixing.nets.mixers import MonotonicMixer, SumMixer


@pytest.mark.parametrize("seed", range(5))
def test_joint_value_increases_with_the_value_of_each_agent(seed: int) -> None:
    torch.manual_seed(seed)
    mixer = MonotonicMixer(num_agents=4, state_size=7, size=8, hyper_size=16)
    for parameter in mixer.parameters():
        parameter.data.normal_(std=2.0)  # any weights, not only initial ones
    q = (10 * torch.randn(500, 4)).requires_grad_()
    (gradient,) = torch.autograd.grad(mixer(q, 3 * torch.randn(500, 7)).sum(), q)
    assert gradient.min() >= 0
    assert gradient.max() > 0


@pytest.mark.parametrize("seed", range(5))
def test_greedy_joint_action_is_the_greedy_action_of_each_agent(seed: int) -> None:
    torch.manual_seed(seed)
    mixer = MonotonicMixer(num_agents=3, state_size=5, size=8, hyper_size=16)
    values = torch.randn(3, 4)  # three agents with four actions each
    state = torch.randn(5)
    joint_actions = list(itertools.product(range(4), repeat=3))
    rows = torch.stack([values[torch.arange(3), torch.tensor(actions)] for actions in joint_actions])
    joint_q = mixer(rows, state.expand(len(joint_actions), -1))
    greedy_q = mixer(values.amax(-1), state)
    assert torch.isclose(joint_q.max(), greedy_q)


def test_sum_mixer() -> None:
    assert SumMixer()(torch.tensor([[1.0, 2.0, -4.0]]), torch.zeros(1, 2)).tolist() == [-1.0]


def test_monotonic_mixer_by_hand() -> None:
    mixer = MonotonicMixer(num_agents=2, state_size=1, size=1, hyper_size=1)
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.zero_()
        mixer.hyper_w1[2].bias.copy_(torch.tensor([-2.0, 0.5]))  # absolute values: 2 and 0.5
        mixer.hyper_b1.bias.fill_(-7.0)
        mixer.hyper_w2[2].bias.fill_(-3.0)
        mixer.hyper_b2[2].bias.fill_(10.0)
        # elu(2 * 4 + 0.5 * 2 - 7) = 2, times 3, plus 10
        assert mixer(torch.tensor([[4.0, 2.0]]), torch.zeros(1, 1)).item() == pytest.approx(16.0)
        # elu(2 * 3 - 7) = e^-1 - 1 = -0.63212, times 3, plus 10
        assert mixer(torch.tensor([[3.0, 0.0]]), torch.zeros(1, 1)).item() == pytest.approx(8.10364, abs=1e-4)

"""Mixers: combine the Q-values of agents into a joint Q-value that increases with each of them.

An agent that maximizes its own Q-value therefore also maximizes the joint one.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class SumMixer(nn.Module):
    """VDN (Sunehag et al., 2018): the sum over agents, `q [...,A], state [...,S] -> [...]`."""

    def forward(self, q: Tensor, state: Tensor) -> Tensor:
        return q.sum(-1)


class MonotonicMixer(nn.Module):
    """QMIX (Rashid et al., 2018): two layers with non-negative weights that hypernetworks compute from the state.

    `q [...,A], state [...,S] -> [...]`.
    """

    def __init__(self, num_agents: int, state_size: int, size: int, hyper_size: int) -> None:
        super().__init__()
        self.num_agents, self.size = num_agents, size
        self.hyper_w1 = _hypernet(state_size, hyper_size, num_agents * size)
        self.hyper_b1 = nn.Linear(state_size, size)
        self.hyper_w2 = _hypernet(state_size, hyper_size, size)
        self.hyper_b2 = _hypernet(state_size, size, 1)  # a state value, independent of the actions

    def forward(self, q: Tensor, state: Tensor) -> Tensor:
        w1 = self.hyper_w1(state).abs().unflatten(-1, (self.num_agents, self.size))
        hidden = F.elu(torch.einsum("...a,...ae->...e", q, w1) + self.hyper_b1(state))
        w2 = self.hyper_w2(state).abs()
        return (hidden * w2).sum(-1) + self.hyper_b2(state).squeeze(-1)


def _hypernet(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, outputs))

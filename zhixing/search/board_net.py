"""A residual policy and value network for board games (Silver et al., 2017)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zhixing.ops.distributions import MASKED_LOGIT

HEAD_PLANES = 4  # input channels of each head


class BoardNet(nn.Module):
    """Map planes `[B,H,W,P]` to logits `[B,n]` and values `[B]` in [-1, 1] for the player to move.

    Differs from the paper: there is no batch normalization, so outputs are the same in training and in play. Instead,
    the second convolution of each block is initialized to zero (Zhang et al., 2019): each block starts as the identity.
    """

    def __init__(self, obs_shape: Sequence[int], num_actions: int, blocks: int = 5, channels: int = 64) -> None:
        super().__init__()
        height, width, planes = obs_shape
        cells = HEAD_PLANES * height * width
        self.stem = nn.Conv2d(planes, channels, 3, padding=1)
        self.first = nn.ModuleList(nn.Conv2d(channels, channels, 3, padding=1) for _ in range(blocks))
        self.second = nn.ModuleList(nn.Conv2d(channels, channels, 3, padding=1) for _ in range(blocks))
        self.heads = nn.Conv2d(channels, 2 * HEAD_PLANES, 1)
        self.policy = nn.Linear(cells, num_actions)
        self.hidden = nn.Linear(cells, channels)
        self.value = nn.Linear(channels, 1)
        for layer in (self.stem, *self.first, self.heads, self.hidden):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            nn.init.zeros_(layer.bias)
        for layer in (*self.second, self.policy, self.value):  # uniform priors and value 0 at the start
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, obs: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        x = F.relu_(self.stem(obs.float().movedim(-1, 1)))  # channels_last in memory, like the observation
        for first, second in zip(self.first, self.second, strict=True):
            x = F.relu_(x + second(F.relu_(first(x))))
        policy_features, value_features = F.relu_(self.heads(x)).flatten(1).chunk(2, -1)
        logits = self.policy(policy_features)
        if mask is not None:
            logits = logits.masked_fill(~mask, MASKED_LOGIT)
        value = torch.tanh(self.value(F.relu_(self.hidden(value_features))))
        return logits, value.squeeze(-1)

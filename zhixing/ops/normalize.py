"""Running statistics that put observations and rewards on a common scale; saved with the agent."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class RunningNorm(nn.Module):
    """Shift and scale by the mean and variance of everything seen by `update` (Chan et al.'s parallel formula)."""

    mean: Tensor
    var: Tensor
    count: Tensor

    def __init__(self, shape: tuple[int, ...], clip: float = 10.0) -> None:
        super().__init__()
        self.clip = clip
        # double precision: after millions of rows a single's sum no longer moves
        self.register_buffer("mean", torch.zeros(shape, dtype=torch.float64))
        self.register_buffer("var", torch.ones(shape, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.rsqrt(self.var + 1e-8).float()
        return ((x - self.mean.float()) * scale).clamp(-self.clip, self.clip)

    @torch.no_grad()
    def inverse(self, x: Tensor) -> Tensor:
        """What `forward` would make `x` of, but for its clipping."""
        return x * (self.var + 1e-8).sqrt().float() + self.mean.float()

    @torch.no_grad()
    def update(self, x: Tensor) -> None:
        rows = x.reshape(-1, *self.mean.shape).double()
        n = rows.shape[0]
        total = self.count + n
        delta = rows.mean(0) - self.mean
        spread = self.var * self.count + rows.var(0, unbiased=False) * n + delta**2 * self.count * n / total
        self.mean += delta * n / total
        self.var.copy_(spread / total)
        self.count.copy_(total)


class RewardScaler(nn.Module):
    """Divide rewards by the standard deviation of the discounted return so far (their mean is kept)."""

    running: Tensor

    def __init__(self, gamma: float, num_envs: int, clip: float = 10.0) -> None:
        super().__init__()
        self.gamma, self.clip = gamma, clip
        self.norm = RunningNorm(())
        # each environment's return since its last reset; saved apart, for another run may have other environments
        self.register_buffer("running", torch.zeros(num_envs), persistent=False)

    def get_extra_state(self) -> Tensor:
        return self.running

    def set_extra_state(self, state: Tensor) -> None:
        if state.shape == self.running.shape:
            self.running.copy_(state)

    @torch.no_grad()
    def forward(self, reward: Tensor, ended: Tensor) -> Tensor:
        """Scale `reward [T,N]` after taking it into the statistics."""
        returns = []
        for row, end in zip(reward, ended, strict=True):
            self.running.mul_(self.gamma).add_(row)
            returns.append(self.running.clone())
            self.running.masked_fill_(end, 0.0)
        self.norm.update(torch.stack(returns))
        return (reward * torch.rsqrt(self.norm.var + 1e-8).float()).clamp(-self.clip, self.clip)


def normalize(x: Tensor, mask: Tensor | None = None) -> Tensor:
    """Zero mean and unit spread over all of `x`, or over its `mask` elements."""
    if mask is None:
        if x.numel() <= 1:
            return x
        spread, mean = torch.std_mean(x)
        return (x - mean) / (spread + 1e-8)
    n = mask.sum().clamp_min(1)
    centred = x - (x * mask).sum() / n
    spread = ((centred.square() * mask).sum() / n).sqrt().clamp_min(1e-8)
    return torch.where(n > 1, centred / spread, x)  # one alone has no spread

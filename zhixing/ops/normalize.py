"""Running normalization of observations and rewards. The statistics are saved with the agent."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class RunningNorm(nn.Module):
    """Normalizes by the mean and variance of all data given to `update`, which uses Chan et al.'s parallel formula."""

    mean: Tensor
    var: Tensor
    count: Tensor

    def __init__(self, shape: tuple[int, ...], clip: float = 10.0) -> None:
        super().__init__()
        self.clip = clip
        # float64: after millions of rows, updates of a float32 mean would round to nothing
        self.register_buffer("mean", torch.zeros(shape, dtype=torch.float64))
        self.register_buffer("var", torch.ones(shape, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.rsqrt(self.var + 1e-8).float()
        return ((x - self.mean.float()) * scale).clamp(-self.clip, self.clip)

    @torch.no_grad()
    def inverse(self, x: Tensor) -> Tensor:
        """Undo `forward`, except for its clipping."""
        return x * (self.var + 1e-8).sqrt().float() + self.mean.float()

    @torch.no_grad()
    def update(self, x: Tensor) -> None:
        rows = x.reshape(-1, *self.mean.shape).double()
        n = rows.shape[0]
        total = self.count + n
        delta = rows.mean(0) - self.mean
        sum_squares = self.var * self.count + rows.var(0, unbiased=False) * n + delta**2 * self.count * n / total
        self.mean += delta * n / total
        self.var.copy_(sum_squares / total)
        self.count.copy_(total)


class RewardScaler(nn.Module):
    """Divides rewards by the running standard deviation of discounted returns. The mean is not subtracted."""

    running: Tensor

    def __init__(self, gamma: float, num_envs: int, clip: float = 10.0) -> None:
        super().__init__()
        self.gamma, self.clip = gamma, clip
        self.norm = RunningNorm(())
        # return of each env since its reset; extra state, because a run with another number of envs ignores it
        self.register_buffer("running", torch.zeros(num_envs), persistent=False)

    def get_extra_state(self) -> Tensor:
        return self.running

    def set_extra_state(self, state: Tensor) -> None:
        if state.shape == self.running.shape:
            self.running.copy_(state)

    @torch.no_grad()
    def forward(self, reward: Tensor, ended: Tensor) -> Tensor:
        """Update the statistics with `reward [T,N]` and return it scaled."""
        returns = []
        for row, end in zip(reward, ended, strict=True):
            self.running.mul_(self.gamma).add_(row)
            returns.append(self.running.clone())
            self.running.masked_fill_(end, 0.0)
        self.norm.update(torch.stack(returns))
        return (reward * torch.rsqrt(self.norm.var + 1e-8).float()).clamp(-self.clip, self.clip)


def normalize(x: Tensor, mask: Tensor | None = None) -> Tensor:
    """Shift and scale `x` to zero mean and unit std, computed over all elements or those where `mask` is true."""
    if mask is None:
        if x.numel() <= 1:
            return x
        std, mean = torch.std_mean(x)
        return (x - mean) / (std + 1e-8)
    n = mask.sum().clamp_min(1)
    centered = x - (x * mask).sum() / n
    std = ((centered.square() * mask).sum() / n).sqrt().clamp_min(1e-8)
    return torch.where(n > 1, centered / std, x)  # a single element has no std

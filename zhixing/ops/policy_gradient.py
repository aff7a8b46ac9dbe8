"""What policy gradients from rollouts share: minibatches, the clipped objective, and what there is to tell."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from zhixing.batch import Batch


def minibatches(data: Batch, size: int, rng: torch.Generator, sequences: bool = False) -> Iterator[Batch]:
    """Random parts `[B]` of a rollout `[T,N]`, or `[T,n]`, of its environments, where memory needs whole sequences."""
    steps, envs = data.ret.shape[:2]
    if sequences:
        for columns in torch.randperm(envs, generator=rng, device=rng.device).split(max(1, size // steps)):
            yield data[:, columns]
    elif size >= steps * envs:
        yield data.flatten()
    else:
        flat = data.flatten()
        for rows in torch.randperm(steps * envs, generator=rng, device=rng.device).split(size):
            yield flat[rows]


def mean_of(x: Tensor, counted: Tensor | None = None) -> Tensor:
    """The mean, or that of the `counted` elements."""
    return x.mean() if counted is None else (x * counted).sum() / counted.sum().clamp_min(1)


def clipped_loss(log_ratio: Tensor, advantage: Tensor, clip: float, counted: Tensor | None = None) -> Tensor:
    """`-E[min(r A, clip(r, 1 - ε, 1 + ε) A)]` (Schulman et al., 2017)."""
    # of the two bounds only the one on the side that A favours can be the lesser; it needs no gradient
    bound = torch.add(advantage, advantage.abs(), alpha=clip)
    return -mean_of(torch.min(log_ratio.exp() * advantage, bound), counted)


def sampled_kl(log_ratio: Tensor, counted: Tensor | None = None) -> Tensor:
    """KL(old, new) out of `log new - log old` of the old one's actions; never negative, little variance."""
    return mean_of(torch.expm1(log_ratio) - log_ratio, counted)


def clip_fraction(log_ratio: Tensor, clip: float, counted: Tensor | None = None) -> Tensor:
    return mean_of((torch.expm1(log_ratio).abs() > clip).float(), counted)


def explained_variance(value: Tensor, ret: Tensor) -> Tensor:
    """1 where values foretell the returns, 0 where a constant would do as well."""
    return 1 - (ret - value).var() / ret.var().clamp_min(1e-8)

"""Policy gradients from rollouts: minibatches, PPO's clipped objective, and metrics."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from zhixing.core.batch import Batch
from zhixing.core.schedule import Coefficient


def num_minibatches(total: int, size: int) -> int:
    """Return how many minibatches of at most `size` samples an epoch over `total` samples takes.

    Minibatches differ in size by one sample at most, so no small remainder makes an update. With size 2 and an odd
    total, one minibatch has 3 samples, because the advantage of a single sample can't be normalized.
    """
    count = -(-total // size)
    return count if size == 1 else min(count, max(1, total // 2))


def minibatches(data: Batch, size: int, rng: torch.Generator, sequences: bool = False) -> Iterator[Batch]:
    """Yield random minibatches `[B]` of a rollout `[T,N]` that together cover it once, each of about `size` steps.

    With `sequences`, for recurrent networks, they are `[T,n]`: whole columns of the rollout.
    """
    steps, envs = data.returns.shape[:2]
    if sequences:
        columns = torch.randperm(envs, generator=rng, device=rng.device)
        for part in columns.tensor_split(num_minibatches(envs, max(1, size // steps))):
            yield data[:, part]
        return
    flat, count = data.flatten(), num_minibatches(steps * envs, size)
    if count == 1:
        yield flat
        return
    for rows in torch.randperm(steps * envs, generator=rng, device=rng.device).tensor_split(count):
        yield flat[rows]


def masked_mean(x: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return the mean of all elements, or of those where `mask` is true."""
    return x.mean() if mask is None else (x * mask).sum() / mask.sum().clamp_min(1)


def ppo_clip_loss(log_ratio: Tensor, advantage: Tensor, clip: Coefficient, mask: Tensor | None = None) -> Tensor:
    """Return PPO's clipped surrogate loss (Schulman et al., 2017), with ratio = π_new(a|s) / π_old(a|s):

        -mean(min(ratio * A, clip(ratio, 1 - eps, 1 + eps) * A))

    The code computes min(ratio * A, A + eps * |A|), which has the same value and gradient and takes about a third less
    time: the clipped term is the smaller one only where it equals (1 + eps) A for A > 0, or (1 - eps) A for A < 0.
    """
    if isinstance(clip, Tensor):
        bound = torch.addcmul(advantage, advantage.abs(), clip)
    else:
        bound = torch.add(advantage, advantage.abs(), alpha=clip)
    return -masked_mean(torch.min(log_ratio.exp() * advantage, bound), mask)


def approx_kl(log_ratio: Tensor, mask: Tensor | None = None) -> Tensor:
    """Estimate KL(old || new) from `log_ratio = log π_new - log π_old` of actions of the old policy.

    The estimator (ratio - 1) - log ratio is never negative and has low variance (Schulman, 2020).
    """
    return masked_mean(torch.expm1(log_ratio) - log_ratio, mask)


def clip_fraction(log_ratio: Tensor, clip: Coefficient, mask: Tensor | None = None) -> Tensor:
    """Return the fraction of steps whose ratio is outside [1 - clip, 1 + clip]."""
    return masked_mean((torch.expm1(log_ratio).abs() > clip).float(), mask)


def explained_variance(value: Tensor, returns: Tensor) -> Tensor:
    """Return 1 - Var[returns - value] / Var[returns]: 1 is a perfect prediction, 0 no better than a constant."""
    if returns.numel() < 2:  # no variance
        return torch.zeros((), device=returns.device)
    return 1 - (returns - value).var() / returns.var().clamp_min(1e-8)

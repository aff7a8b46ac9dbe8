"""Losses that more than one algorithm may use: pure functions of tensors, a number per row."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from zhixing.core.batch import Batch


def quantile_huber_loss(quantiles: Tensor, targets: Tensor, kappa: float) -> Tensor:
    """Σ_i E_j |τ_i - 1(u_ij < 0)| · huber_κ(u_ij),  u_ij = target_j - quantile_i  (Dabney et al., 2018, eq. 10).

    `quantiles [B,N]` and samples `targets [B,M]` of what they should describe, to `[B]`. Quantile i stands for the
    share τ_i = (i + ½) / N of the outcomes that lie below it: missing them costs τ_i above it and 1 - τ_i below it.
    """
    num = quantiles.shape[-1]
    tau = (torch.arange(num, dtype=quantiles.dtype, device=quantiles.device) + 0.5) / num
    q, y = torch.broadcast_tensors(quantiles.unsqueeze(-2), targets.unsqueeze(-1))  # [B,M,N]
    slope = (tau - (y < q).to(tau.dtype)).abs()
    return (slope * F.huber_loss(q, y, reduction="none", delta=kappa)).mean(-2).sum(-1)


def expectile_loss(error: Tensor, tau: float) -> Tensor:
    """|τ - 1(u < 0)| · u²  (Kostrikov et al., 2022, eq. 3) of errors u = target - estimate: with τ above a half the
    estimate settles above the mean of its targets, near the best of them as τ nears 1."""
    return torch.where(error < 0, 1.0 - tau, tau) * error.square()


def advantage_weight(advantage: Tensor, beta: float, max_weight: float) -> Tensor:
    """exp(advantage · beta), but no more than `most`: how much an action is worth imitating."""
    return torch.exp(advantage.detach() * beta).clamp(max=max_weight)


def weighted_mean(losses: Tensor, batch: Batch) -> Tensor:
    """Over rows `[...,B]`, each with its importance weight where the replay is prioritized."""
    return (losses * batch.weight).mean(-1) if "weight" in batch else losses.mean(-1)

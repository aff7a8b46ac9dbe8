"""Losses that several algorithms use: pure functions of tensors, with one loss per row."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from zhixing.core.batch import Batch


def quantile_huber_loss(quantiles: Tensor, targets: Tensor, kappa: float) -> Tensor:
    """Σ_i E_j |τ_i - 1(u_ij < 0)| · huber_κ(u_ij),  u_ij = target_j - quantile_i  (Dabney et al., 2018, eq. 10).

    `quantiles [B,N]` are fitted to samples `targets [B,M]`; the loss is `[B]`. Quantile i estimates the value below
    which a fraction τ_i = (i + ½) / N of the targets lies. A target above it is weighted by τ_i, one below by 1 - τ_i.
    """
    num = quantiles.shape[-1]
    tau = (torch.arange(num, dtype=quantiles.dtype, device=quantiles.device) + 0.5) / num
    q, y = torch.broadcast_tensors(quantiles.unsqueeze(-2), targets.unsqueeze(-1))  # [B,M,N]
    weight = (tau - (y < q).to(tau.dtype)).abs()
    return (weight * F.huber_loss(q, y, reduction="none", delta=kappa)).mean(-2).sum(-1)


def expectile_loss(error: Tensor, tau: float) -> Tensor:
    """|τ - 1(u < 0)| · u²  (Kostrikov et al., 2022, eq. 3) for errors u = target - estimate.

    With τ = 0.5 the estimate converges to the mean of the targets, with τ near 1 to their maximum.
    """
    return torch.where(error < 0, 1.0 - tau, tau) * error.square()


def advantage_weight(advantage: Tensor, beta: float, max_weight: float) -> Tensor:
    """Return the weight of an action in imitation: exp(β · advantage), at most `max_weight`."""
    return torch.exp(advantage.detach() * beta).clamp(max=max_weight)


def weighted_mean(losses: Tensor, batch: Batch) -> Tensor:
    """Return the mean over rows `[...,B]`, with importance weights if the replay is prioritized."""
    return (losses * batch.weight).mean(-1) if "weight" in batch else losses.mean(-1)

"""What learning a model of the world, and learning inside it, compute: pure functions of tensors."""

from __future__ import annotations

import torch
from torch import Tensor


def uniform_mix(logits: Tensor, share: float) -> Tensor:
    """ActionDistribution, `share` of them uniform: none is ever nothing, so that no divergence explodes."""
    return logits.softmax(-1) * (1.0 - share) + share / logits.shape[-1]


def straight_through(chance: Tensor, uniform_noise: Tensor | None) -> Tensor:
    """One of the classes of each variable, one-hot; the gradient is that of its chances `[..., classes]`.

    `luck [...]`, uniform in 0..1, draws the class that it falls on when chances lie end to end; without it the
    likeliest is taken.
    """
    detached = chance.detach()
    if uniform_noise is None:
        drawn = detached.argmax(-1, keepdim=True)
    else:
        passed = detached.cumsum(-1) < uniform_noise.unsqueeze(-1)
        drawn = passed.sum(-1, keepdim=True).clamp_(max=chance.shape[-1] - 1)  # chances may sum to a bit less than 1
    one_hot = torch.zeros_like(detached).scatter_(-1, drawn, 1.0)
    return one_hot + (chance - detached) if chance.requires_grad else one_hot


def categorical_kl(logp: Tensor, other: Tensor) -> Tensor:
    """KL(p, q) of independent variables, `[..., variables, classes]` to `[...]`."""
    return (logp.exp() * (logp - other)).sum((-2, -1))


def balanced_kl(posterior: Tensor, prior: Tensor, free_nats: float) -> tuple[Tensor, Tensor]:
    """How far the prior must move to meet the posterior, and the posterior to meet the prior: each with a gradient for
    that one alone, and none while they are nearer than `free_nats`."""
    dynamics = categorical_kl(posterior.detach(), prior).clamp_min(free_nats)
    representation = categorical_kl(posterior, prior.detach()).clamp_min(free_nats)
    return dynamics, representation


def lambda_returns(reward: Tensor, discount: Tensor, value: Tensor, lam: float) -> Tensor:
    """R_t = r_t + d_t ((1 - λ) V_t+1 + λ R_t+1),  R_H = V_H,  over rewards and discounts `[H,N]`, values `[H+1,N]`.

    Discounts hold the chance that the world goes on.
    """
    later = value[-1]
    backwards = []
    steps = list(zip(reward.unbind(), discount.unbind(), value[1:].unbind(), strict=True))
    for r, d, v in reversed(steps):
        later = r + d * torch.lerp(v, later, lam)
        backwards.append(later)
    return torch.stack(backwards[::-1])


def discount_weights(discount: Tensor) -> Tensor:
    """How much each step `[H,N]` counts: what is left of 1 after the discounts of the steps before it."""
    return torch.cat([torch.ones_like(discount[:1]), discount[:-1].cumprod(0)])


def percentile_range(x: Tensor) -> Tensor:
    """From the 5th to the 95th percentile of all of `x`: its scale, whatever a few outliers say."""
    low, high = torch.quantile(x.flatten(), torch.tensor([0.05, 0.95], device=x.device))
    return high - low

"""Functions to train a world model and to train an actor in imagination (Hafner et al., 2023)."""

from __future__ import annotations

import torch
from torch import Tensor


def uniform_mix(logits: Tensor, fraction: float) -> Tensor:
    """Return probabilities mixed with a `fraction` of the uniform distribution.

    No probability is then zero, so KL divergences stay finite.
    """
    return logits.softmax(-1) * (1.0 - fraction) + fraction / logits.shape[-1]


def straight_through(probability: Tensor, uniform_noise: Tensor | None) -> Tensor:
    """Return a one-hot sample of each variable, with the gradient of `probability [..., classes]`.

    `uniform_noise [...]` in 0..1 selects the class by inverting the cumulative distribution. Without it, the most
    probable class is taken.
    """
    detached = probability.detach()
    if uniform_noise is None:
        index = detached.argmax(-1, keepdim=True)
    else:
        below = detached.cumsum(-1) < uniform_noise.unsqueeze(-1)
        index = below.sum(-1, keepdim=True).clamp_(max=probability.shape[-1] - 1)  # the sum may round to less than 1
    one_hot = torch.zeros_like(detached).scatter_(-1, index, 1.0)
    return one_hot + (probability - detached) if probability.requires_grad else one_hot


def categorical_kl(logp: Tensor, logq: Tensor) -> Tensor:
    """Return KL(p || q) of independent variables, `[..., variables, classes]` to `[...]`."""
    return (logp.exp() * (logp - logq)).sum((-2, -1))


def balanced_kl(posterior: Tensor, prior: Tensor, free_nats: float) -> tuple[Tensor, Tensor]:
    """Return the dynamics loss, which trains the prior, and the representation loss, which trains the posterior.

    Both are KL(posterior || prior), with a stop-gradient on the other distribution and no gradient below `free_nats`.
    """
    dynamics = categorical_kl(posterior.detach(), prior).clamp_min(free_nats)
    representation = categorical_kl(posterior, prior.detach()).clamp_min(free_nats)
    return dynamics, representation


def lambda_returns(reward: Tensor, discount: Tensor, value: Tensor, lam: float) -> Tensor:
    """R_t = r_t + d_t ((1 - λ) V_t+1 + λ R_t+1),  R_H = V_H,  for rewards and discounts `[H,N]` and values `[H+1,N]`.

    Discounts include the probability that the episode continues.
    """
    next_return = value[-1]
    reversed_returns = []
    steps = list(zip(reward.unbind(), discount.unbind(), value[1:].unbind(), strict=True))
    for r, d, v in reversed(steps):
        next_return = r + d * torch.lerp(v, next_return, lam)
        reversed_returns.append(next_return)
    return torch.stack(reversed_returns[::-1])


def discount_weights(discount: Tensor) -> Tensor:
    """Return the weight of each step `[H,N]`: the product of the discounts of all steps before it."""
    return torch.cat([torch.ones_like(discount[:1]), discount[:-1].cumprod(0)])


def percentile_range(x: Tensor) -> Tensor:
    """Return the distance from the 5th to the 95th percentile of `x`, a scale that is robust to outliers."""
    low, high = torch.quantile(x.flatten(), torch.tensor([0.05, 0.95], device=x.device))
    return high - low

"""Symlog scaling, and the two-hot encoding of numbers over symexp-spaced bins (Hafner et al., 2023)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

MAX_SYMLOG = 20.0  # of the outermost bin, which represents 5e8


def symlog(x: Tensor) -> Tensor:
    """Return sign(x) log(1 + |x|): nearly linear for small x, logarithmic for large x."""
    return x.sign() * x.abs().log1p()


def symexp(x: Tensor) -> Tensor:
    """Return the inverse of `symlog`."""
    return x.sign() * x.abs().expm1()


def symexp_bins(num: int) -> Tensor:
    """Return `num` bins, equally spaced in symlog and symmetric around 0. `num` must be odd."""
    half = symexp(torch.linspace(0.0, MAX_SYMLOG, num // 2 + 1))
    return torch.cat([-half[1:].flip(0), half])


def two_hot(x: Tensor, bins: Tensor) -> Tensor:
    """Encode `x [...]` as weights `[..., bins]` of the two neighboring bins whose weighted mean is x.

    Numbers beyond the first or last bin are clipped to it.
    """
    x = x.clamp(bins[0], bins[-1])
    upper = torch.searchsorted(bins, x, right=True).clamp_(1, len(bins) - 1)
    below, above = bins[upper - 1], bins[upper]
    weight = ((x - below) / (above - below)).unsqueeze(-1)  # of the upper bin
    weights = torch.zeros(*x.shape, len(bins), device=x.device)
    upper = upper.unsqueeze(-1)
    return weights.scatter_(-1, upper, weight).scatter_(-1, upper - 1, 1.0 - weight)


def two_hot_mean(logits: Tensor, bins: Tensor) -> Tensor:
    """Return the mean of distributions `logits [..., bins]`.

    The probabilities of opposite bins are subtracted before the sum. Otherwise rounding errors in the probabilities of
    the outermost bins, which are huge, would dominate the result.
    """
    probability = logits.softmax(-1)
    middle = len(bins) // 2
    return (probability[..., middle + 1 :] - probability[..., :middle].flip(-1)) @ bins[middle + 1 :]


def two_hot_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Return the cross-entropy `[...]` of predictions and two-hot targets, `[..., bins]` each."""
    return -(target * F.log_softmax(logits, -1)).sum(-1)

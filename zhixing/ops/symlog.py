"""Numbers of any size on a common scale, and numbers as distributions over bins of that scale (Hafner et al., 2023)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

LIMIT = 20.0  # of bins, in symlog: numbers up to 5e8


def symlog(x: Tensor) -> Tensor:
    """sign(x) log(1 + |x|): nearly x where it is small, its logarithm where it is large."""
    return x.sign() * x.abs().log1p()


def symexp(x: Tensor) -> Tensor:
    """The inverse of `symlog`."""
    return x.sign() * x.abs().expm1()


def symexp_bins(num: int) -> Tensor:
    """`num` numbers, an odd number of them, equally far apart in symlog: finest around 0, and mirrored there."""
    half = symexp(torch.linspace(0.0, LIMIT, num // 2 + 1))
    return torch.cat([-half[1:].flip(0), half])


def two_hot(x: Tensor, bins: Tensor) -> Tensor:
    """Share each of `x [...]` between the two bins around it so that their mean is x: `[..., bins]`.

    What lies beyond the first or the last bin goes to that one.
    """
    x = x.clamp(bins[0], bins[-1])
    upper = torch.searchsorted(bins, x, right=True).clamp_(1, len(bins) - 1)
    below, above = bins[upper - 1], bins[upper]
    share = ((x - below) / (above - below)).unsqueeze(-1)  # of the bin above
    shares = torch.zeros(*x.shape, len(bins), device=x.device)
    upper = upper.unsqueeze(-1)
    return shares.scatter_(-1, upper, share).scatter_(-1, upper - 1, 1.0 - share)


def two_hot_mean(logits: Tensor, bins: Tensor) -> Tensor:
    """The mean of distributions `logits [..., bins]`. Bins that mirror each other are paired before they are summed:
    the outermost are so large that the least error in their chances would drown all others."""
    chance = logits.softmax(-1)
    middle = len(bins) // 2
    return (chance[..., middle + 1 :] - chance[..., :middle].flip(-1)) @ bins[middle + 1 :]


def two_hot_loss(logits: Tensor, shares: Tensor) -> Tensor:
    """Cross-entropy `[...]` of distributions with what they should be, `[..., bins]` each."""
    return -(shares * F.log_softmax(logits, -1)).sum(-1)

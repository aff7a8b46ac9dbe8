"""Projection of return distributions onto a fixed support."""

from __future__ import annotations

import torch
from torch import Tensor


def categorical_projection(values: Tensor, probability: Tensor, support: Tensor) -> Tensor:
    """Project `values [B,M]` with `probability [B,M]` onto the atoms `support [K]` (Bellemare et al., 2017).

    The probability of a value is split between the two neighboring atoms such that the mean is preserved. Values beyond
    the first or last atom are clipped to it. Atoms must be ascending and equally spaced.
    """
    last = len(support) - 1
    position = ((values - support[0]) * (last / (support[-1] - support[0]))).clamp(0.0, last)  # in units of atoms
    # at the last atom, lower is the one before it and weight 1, so lower + 1 always exists
    lower = position.long().clamp(0, last - 1)
    weight = position - lower  # of the upper atom
    projected = torch.zeros(len(values), len(support), dtype=probability.dtype, device=probability.device)
    projected.scatter_add_(-1, lower, probability * (1.0 - weight))
    return projected.scatter_add_(-1, lower + 1, probability * weight)

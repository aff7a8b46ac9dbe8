"""Distributions over returns, brought back to the atoms that they are kept on."""

from __future__ import annotations

import torch
from torch import Tensor


def categorical_projection(values: Tensor, probability: Tensor, support: Tensor) -> Tensor:
    """Share the `probability [B,M]` of any `values [B,M]` among the atoms of `support [K]` (Bellemare et al., 2017).

    Each value gives to the two atoms around it, in proportion to its nearness, which keeps the mean; what lies beyond
    the first or the last atom goes to that one. Atoms are in ascending order and equally far apart.
    """
    last = len(support) - 1
    place = ((values - support[0]) * (last / (support[-1] - support[0]))).clamp(0.0, last)  # in units of atoms
    # the last atom is reached from below, with a share of 1: an atom above is always there
    lower = place.long().clamp(0, last - 1)
    share = place - lower  # of the atom above
    projected = torch.zeros(len(values), len(support), dtype=probability.dtype, device=probability.device)
    projected.scatter_add_(-1, lower, probability * (1.0 - share))
    return projected.scatter_add_(-1, lower + 1, probability * share)

"""The mean of several curves and how certain it is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

_MAX_POINTS = 1000  # of a mean; more can't be seen

# 97.5 % quantiles of Student's t at 1, 2, ... degrees of freedom
_T = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281)


class Curve(NamedTuple):
    x: Array  # never falls
    y: Array


class Band(NamedTuple):
    x: Array
    mean: Array
    low: Array
    high: Array


def band(curves: Sequence[Curve]) -> Band:
    """Mean of two or more curves and its 95 % interval, `mean ± t s / √n`, at every x of any of them.

    Only where all have a value: beyond, the mean would jump as curves end, towards those that took longest. Empty
    where they share no x.
    """
    start, end = max(curve.x[0] for curve in curves), min(curve.x[-1] for curve in curves)
    x = np.unique(np.concatenate([curve.x for curve in curves]))
    x = x[(x >= start) & (x <= end)]
    if len(x) > _MAX_POINTS:
        x = x[np.linspace(0, len(x) - 1, _MAX_POINTS).astype(int)]
    y = np.stack([np.interp(x, curve.x, curve.y) for curve in curves])
    mean = y.mean(0)
    half = student_t(len(curves) - 1) * y.std(0, ddof=1) / math.sqrt(len(curves))
    return Band(x, mean, mean - half, mean + half)


def student_t(freedom: int) -> float:
    """The 97.5 % quantile: what 1.96 is to the normal distribution."""
    if freedom <= len(_T):
        return _T[freedom - 1]
    z = 1.959964  # expansion in 1 / freedom, wrong by less than 0.0025 here
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)

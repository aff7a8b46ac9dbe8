"""The mean of several curves and its confidence interval."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

_MAX_POINTS = 1000  # of a mean curve: more can't be distinguished

# 97.5 % quantiles of Student's t at 1, 2, ... degrees of freedom
_T = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281)


class Curve(NamedTuple):
    x: Array  # non-decreasing
    y: Array


class Interval(NamedTuple):
    x: Array
    mean: Array
    low: Array
    high: Array


def confidence_interval(curves: Sequence[Curve]) -> Interval:
    """Return the mean of two or more curves and its 95 % interval, `mean ± t s / √n`, at every x of any curve.

    Covers only the x range that all curves share: beyond it, the mean would jump whenever a curve ends. Empty if they
    share none.
    """
    start, end = max(curve.x[0] for curve in curves), min(curve.x[-1] for curve in curves)
    x = np.unique(np.concatenate([curve.x for curve in curves]))
    x = x[(x >= start) & (x <= end)]
    if len(x) > _MAX_POINTS:
        x = x[np.linspace(0, len(x) - 1, _MAX_POINTS).astype(int)]
    y = np.stack([np.interp(x, curve.x, curve.y) for curve in curves])
    mean = y.mean(0)
    half_width = student_t(len(curves) - 1) * y.std(0, ddof=1) / math.sqrt(len(curves))
    return Interval(x, mean, mean - half_width, mean + half_width)


def student_t(degrees_of_freedom: int) -> float:
    """Return the 97.5 % quantile of Student's t distribution, which corresponds to 1.96 of the normal distribution."""
    n = degrees_of_freedom
    if n <= len(_T):
        return _T[n - 1]
    z = 1.959964  # expansion in 1 / n, with an error below 0.0025 here
    return z + (z**3 + z) / (4 * n) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)

"""Schedules of hyperparameters."""

from __future__ import annotations


def linear_schedule(start: float, end: float, fraction: float) -> float:
    """Interpolate from `start` at fraction 0 to `end` at fraction 1; constant outside."""
    return start + (end - start) * min(max(fraction, 0.0), 1.0)

"""Numbers that change over a run."""

from __future__ import annotations


def linear_schedule(start: float, end: float, fraction: float) -> float:
    """From `start` at fraction 0 to `end` at fraction 1, and constant outside."""
    return start + (end - start) * min(max(fraction, 0.0), 1.0)

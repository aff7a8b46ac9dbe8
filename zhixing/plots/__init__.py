"""Pictures of runs."""

from zhixing.plots.curves import plot

__all__ = ["plot"]

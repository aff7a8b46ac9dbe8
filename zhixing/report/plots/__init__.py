"""Plots of runs."""

from zhixing.report.plots.curves import plot

__all__ = ["plot"]

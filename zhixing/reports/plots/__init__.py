"""Plots of runs."""

from zhixing.reports.plots.curves import plot

__all__ = ["plot"]

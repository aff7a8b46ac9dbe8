"""Plots of runs."""

from zhixing.reports.plots.curves import Chart, plot

__all__ = ["Chart", "plot"]

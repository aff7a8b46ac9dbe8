"""Plot the trials of a study: the best return so far, and the return against each searched setting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

from zhixing.reports.plots.curves import COLORS, LINE_STYLES

if TYPE_CHECKING:
    from zhixing.experiments.tune import TrialResult

COLUMNS = 3
MARKERS = {"complete": (COLORS[0], "o"), "pruned": (COLORS[4], "x")}  # color and marker by state


def draw_trials(trials: Sequence[TrialResult], log_scale: Mapping[str, bool]) -> Figure:
    """Draw one panel per searched setting. `log_scale` maps each setting to whether its axis is logarithmic."""
    plotted = [trial for trial in trials if trial.state in MARKERS and trial.mean_return == trial.mean_return]
    rows = -(-(1 + len(log_scale)) // COLUMNS)
    figure = Figure(figsize=(4 * min(COLUMNS, 1 + len(log_scale)), 3.4 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(rows, min(COLUMNS, 1 + len(log_scale)), squeeze=False).flatten()
    _scatter(panels[0], plotted, [trial.number for trial in plotted])
    complete = [trial for trial in plotted if trial.state == "complete"]
    if complete:
        best = np.maximum.accumulate([trial.mean_return for trial in complete])
        numbers = [trial.number for trial in complete]
        panels[0].step(numbers, best, where="post", color=COLORS[1], linestyle=LINE_STYLES[0], label="best so far")
    panels[0].set_xlabel("trial")
    panels[0].xaxis.set_major_locator(MaxNLocator(integer=True))
    panels[0].legend(frameon=False, fontsize="small")
    for panel, (name, logarithmic) in zip(panels[1:], log_scale.items(), strict=False):
        xs = [trial.params[name] for trial in plotted]
        if any(isinstance(x, str) for x in xs):  # a choice: its values are equally spaced
            texts = sorted(set(xs), key=lambda text: (len(text), text))
            panel.set_xticks(range(len(texts)), texts)
            xs = [texts.index(x) for x in xs]
        elif logarithmic:
            panel.set_xscale("log")
            # label each power of ten, and on a short axis also 2 and 5 times it: 0.0005, not 5 x 10^-4
            short = max(xs, default=1.0) < 100 * min(xs, default=1.0)
            panel.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if short else (1.0,)))
            panel.xaxis.set_major_formatter("{x:g}")
            panel.xaxis.set_minor_formatter(NullFormatter())
        _scatter(panel, plotted, xs)
        panel.set_xlabel(name)
    for panel in panels[1 + len(log_scale) :]:
        panel.set_visible(False)
    return figure


def _scatter(panel: Axes, trials: Sequence[TrialResult], xs: Sequence[Any]) -> None:
    panel.set_ylabel("return")
    panel.grid(color="#e0e0e0", linewidth=0.8)
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)
    for state, (color, marker) in MARKERS.items():
        indices = [i for i, trial in enumerate(trials) if trial.state == state]
        if indices:
            points = [xs[i] for i in indices], [trials[i].mean_return for i in indices]
            panel.scatter(*points, s=22, alpha=0.8, label=state, color=color, marker=marker)

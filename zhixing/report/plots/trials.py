"""Trials of a search for settings: the best return so far, and the return against each setting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

from zhixing.report.plots.curves import COLOURS, STYLES

if TYPE_CHECKING:
    from zhixing.experiments.tune import Outcome

COLUMNS = 3
LOOKS = {"complete": (COLOURS[0], "o"), "pruned": (COLOURS[4], "x")}  # colour and mark


def draw_trials(outcomes: Sequence[Outcome], logarithmic: Mapping[str, bool]) -> Figure:
    """`logarithmic` has each searched setting, and whether its axis is."""
    seen = [one for one in outcomes if one.state in LOOKS and one.ret == one.ret]
    rows = -(-(1 + len(logarithmic)) // COLUMNS)
    figure = Figure(figsize=(4 * min(COLUMNS, 1 + len(logarithmic)), 3.4 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(rows, min(COLUMNS, 1 + len(logarithmic)), squeeze=False).flatten()
    _scatter(panels[0], seen, [one.number for one in seen])
    complete = [one for one in seen if one.state == "complete"]
    if complete:
        best = np.maximum.accumulate([one.ret for one in complete])
        numbers = [one.number for one in complete]
        panels[0].step(numbers, best, where="post", color=COLOURS[1], linestyle=STYLES[0], label="best so far")
    panels[0].set_xlabel("trial")
    panels[0].xaxis.set_major_locator(MaxNLocator(integer=True))
    panels[0].legend(frameon=False, fontsize="small")
    for panel, (name, by_log) in zip(panels[1:], logarithmic.items(), strict=False):
        xs = [one.values[name] for one in seen]
        if any(isinstance(x, str) for x in xs):  # one of several values, side by side
            texts = sorted(set(xs), key=lambda text: (len(text), text))
            panel.set_xticks(range(len(texts)), texts)
            xs = [texts.index(x) for x in xs]
        elif by_log:
            panel.set_xscale("log")
            # a label for each power of ten, and for 2 and 5 times it where there are few: 0.0005, not 5 x 10^-4
            few = max(xs, default=1.0) < 100 * min(xs, default=1.0)
            panel.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if few else (1.0,)))
            panel.xaxis.set_major_formatter("{x:g}")
            panel.xaxis.set_minor_formatter(NullFormatter())
        _scatter(panel, seen, xs)
        panel.set_xlabel(name)
    for panel in panels[1 + len(logarithmic) :]:
        panel.set_visible(False)
    return figure


def _scatter(panel: Axes, seen: Sequence[Outcome], xs: Sequence[Any]) -> None:
    panel.set_ylabel("return")
    panel.grid(color="#e0e0e0", linewidth=0.8)
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)
    for state, (colour, mark) in LOOKS.items():
        mine = [i for i, one in enumerate(seen) if one.state == state]
        if mine:
            points = [xs[i] for i in mine], [seen[i].ret for i in mine]
            panel.scatter(*points, s=22, alpha=0.8, label=state, color=colour, marker=mark)

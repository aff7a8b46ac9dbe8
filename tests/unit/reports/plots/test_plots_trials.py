"""Tests of the plot of trials."""

from __future__ import annotations

import math

from zhixing.experiments.tune import TrialResult
from zhixing.reports.plots.trials import draw_trials

TRIALS = [
    TrialResult(0, "complete", 5.0, {"lr": 1e-3, "net.hidden_sizes": "[8,8]"}),
    TrialResult(1, "pruned", 1.0, {"lr": 1e-4, "net.hidden_sizes": "[8]"}),
    TrialResult(2, "failed", math.nan, {"lr": 1e-2, "net.hidden_sizes": "[8]"}),
    TrialResult(3, "complete", 3.0, {"lr": 2e-3, "net.hidden_sizes": "[8]"}),
    TrialResult(4, "complete", 9.0, {"lr": 3e-3, "net.hidden_sizes": "[8,8]"}),
]


def test_best_return_so_far_and_a_panel_per_setting() -> None:
    figure = draw_trials(TRIALS, {"lr": True, "net.hidden_sizes": False})
    first, lr, sizes = figure.axes
    (best,) = first.lines
    assert list(best.get_xdata()) == [0, 3, 4]
    assert list(best.get_ydata()) == [5.0, 5.0, 9.0]
    complete, pruned = lr.collections
    assert complete.get_offsets().tolist() == [[1e-3, 5.0], [2e-3, 3.0], [3e-3, 9.0]]
    assert pruned.get_offsets().tolist() == [[1e-4, 1.0]]
    assert lr.get_xscale() == "log"
    labels = [text.get_text() for text in lr.get_xticklabels()]
    assert {"0.0005", "0.001", "0.002"} <= set(labels)
    assert not [label for label in labels if "10^" in label or "times" in label]
    assert [text.get_text() for text in sizes.get_xticklabels()] == ["[8]", "[8,8]"]
    assert sizes.collections[0].get_offsets().tolist() == [[1, 5.0], [0, 3.0], [1, 9.0]]


def test_unused_panels_are_hidden() -> None:
    names = dict.fromkeys(("a", "b", "c"), False)
    trials = [TrialResult(0, "pruned", 1.0, {"a": 1, "b": 2, "c": 3})]
    figure = draw_trials(trials, names)
    assert [panel.get_visible() for panel in figure.axes] == [True] * 4 + [False] * 2

"""Statistics over runs, as rliable defines them (Agarwal et al., 2021).

A sample is a list with the scores of each task, an array `[..., runs]`; tasks may have different numbers of runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

Sample = Sequence[np.ndarray]
RESAMPLES = 5_000


def interquartile_mean(scores: Sample) -> np.ndarray:
    """Return the mean of all scores without the lowest and the highest quarter, rounded down to whole runs."""
    ordered = np.sort(np.concatenate(scores, -1), -1)
    cut = ordered.shape[-1] // 4
    return ordered[..., cut : ordered.shape[-1] - cut].mean(-1)


def probability_of_improvement(ours: Sample, theirs: Sample) -> np.ndarray:
    """Return the probability that our run scores more than a peer's, averaged over tasks. Ties count half."""
    wins = []
    for x, y in zip(ours, theirs, strict=True):
        difference = x[..., :, None] - y[..., None, :]
        wins.append(((difference > 0) + 0.5 * (difference == 0)).mean((-2, -1)))
    return np.mean(wins, 0)


def interval(statistic: Callable[..., np.ndarray], *samples: Sample) -> tuple[float, float]:
    """Return the 95 % percentile interval of a stratified bootstrap: runs are resampled within each task."""
    rng = np.random.default_rng(0)
    resampled = [
        [runs[rng.integers(len(runs), size=(RESAMPLES, len(runs)))] for runs in map(np.asarray, sample)]
        for sample in samples
    ]
    low, high = np.percentile(statistic(*resampled), [2.5, 97.5])
    return float(low), float(high)

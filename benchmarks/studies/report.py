"""Tables and images of a study's results."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from common import table
from studies.estimates import interquartile_mean, interval, probability_of_improvement
from studies.rows import Row

Runs = Mapping[str, Any]  # by seed
LIBRARIES = ("zhixing", "Stable-Baselines3")
Results = Mapping[str, tuple[Runs, Runs]]  # runs of ours and of the peer, by key of the row


def number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1_000 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def finals(runs: Runs) -> np.ndarray:
    return np.array([run["final"] for run in runs.values()])


def seconds(runs: Runs) -> float:
    return statistics.median(run["seconds"] for run in runs.values())


def score(runs: Runs) -> str:
    if not runs:
        return "-"
    low, high = interval(interquartile_mean, [finals(runs)])
    return f"{number(float(interquartile_mean([finals(runs)])))} [{number(low)}, {number(high)}]"


def verdict(ours: Runs, peers: Runs) -> str:
    """Compare the intervals of the interquartile means."""
    (low, high), (peer_low, peer_high) = (interval(interquartile_mean, [finals(runs)]) for runs in (ours, peers))
    return "ahead" if low > peer_high else "**behind**" if high < peer_low else "level"


def rows_table(rows: Sequence[Row], results: Results) -> str:
    head = ["algorithm", "environment", "steps", "seeds", *LIBRARIES, "", "P(improvement)"]
    lines = []
    for row in rows:
        ours, peers = results[row.key]
        if not ours and not peers:
            continue
        line = [f"`{row.title}`", row.env, f"{row.env_steps:,}", f"{len(ours)} / {len(peers)}"]
        line += [score(ours), score(peers)]
        if ours and peers:
            improvement = probability_of_improvement([finals(ours)], [finals(peers)])
            line += [verdict(ours, peers), f"{float(improvement):.2f}"]
        else:
            line += ["", ""]
        times = [f"{seconds(runs):,.0f}" if runs else "-" for runs in (ours, peers)]
        ratio = f"{seconds(peers) / seconds(ours):.2f}" if ours and peers else ""
        lines.append([*line, " / ".join(times), ratio])
    return table([*head, "CPU seconds", "speed-up"], lines, 2)


def algorithms_table(rows: Sequence[Row], results: Results) -> str:
    """Probability of improvement averaged over the environments in which both sides have runs."""
    lines = []
    for title in dict.fromkeys(row.title for row in rows):
        pairs = [results[row.key] for row in rows if row.title == title]
        pairs = [(ours, peers) for ours, peers in pairs if ours and peers]
        if not pairs:
            continue
        samples = [finals(ours) for ours, _ in pairs], [finals(peers) for _, peers in pairs]
        low, high = interval(probability_of_improvement, *samples)
        improvement = f"{float(probability_of_improvement(*samples)):.2f} [{low:.2f}, {high:.2f}]"
        faster = math.exp(statistics.mean(math.log(seconds(peers) / seconds(ours)) for ours, peers in pairs))
        lines.append([f"`{title}`", str(len(pairs)), improvement, f"{faster:.2f}"])
    head = ["algorithm", "environments", "P(improvement)", "speed-up (geometric mean)"]
    return table(head, lines, 1) if lines else ""


def curve(runs: Runs) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the steps, the interquartile means there and their intervals `[2, steps]`, by linear interpolation."""
    curves = [np.array(run["curve"]) for run in runs.values()]
    steps = curves[0][:, 0]
    values = np.stack([np.interp(steps, one[:, 0], one[:, 1]) for one in curves], -1)  # [steps, runs]
    bounds = np.array([interval(interquartile_mean, [scores]) for scores in values])
    return steps, interquartile_mean([values]), bounds.T


def draw(rows: Sequence[Row], results: Results, image: Path) -> None:
    """Draw the interquartile mean over steps with its interval, one panel per row."""
    from matplotlib.figure import Figure

    rows = [row for row in rows if any(results[row.key])]
    if not rows:
        return
    columns = min(3, len(rows))
    num_rows = math.ceil(len(rows) / columns)
    figure = Figure(figsize=(3.4 * columns, 2.6 * num_rows), layout="constrained")
    for i, row in enumerate(rows):
        axes = figure.add_subplot(num_rows, columns, i + 1)
        for runs, label, color in zip(results[row.key], LIBRARIES, ("tab:blue", "tab:orange"), strict=True):
            if runs:
                steps, mean, (low, high) = curve(runs)
                axes.plot(steps / 1_000, mean, label=label, color=color, linewidth=1)
                axes.fill_between(steps / 1_000, low, high, color=color, alpha=0.2, linewidth=0)
        axes.set_title(f"{row.title}, {row.env}", fontsize=9)
        axes.set_xlabel("thousand steps", fontsize=7)
        axes.tick_params(labelsize=7)
        axes.legend(fontsize=6)
    image.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(image, dpi=90)

"""Plot all comparisons: speed relative to each peer, with the range over rounds.

    python benchmarks/chart.py [--quick]

Reads the results of the other benchmarks from benchmarks/results, with --quick from benchmarks/results/quick.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
from common import HERE, ROOT, read_results

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.ticker import LogLocator, NullFormatter

PLOT = ROOT / "docs" / "pictures" / "benchmarks.png"
TITLES = {
    "sb3": "SB3",
    "sbx": "SBX",
    "tianshou": "Tianshou",
    "torchrl": "TorchRL",
    "rllib": "RLlib",
    "mindrl": "MindRL",
    "benchmarl": "BenchMARL",
    "gymnasium-sync": "Gymnasium sync",
    "gymnasium-async": "Gymnasium async",
    "sb3-dummy": "SB3 dummy",
    "sb3-subproc": "SB3 subproc",
    "envpool": "EnvPool",
}
COLORS = (
    "tab:blue",
    "tab:orange",
    "tab:green",
    "tab:red",
    "tab:purple",
    "tab:brown",
    "tab:pink",
    "tab:olive",
    "tab:cyan",
    "black",
)


class Point(NamedTuple):
    group: str
    row: str
    peer: str
    ratios: dict[str, float]  # ratio, ratio_min, ratio_max


def read_points(folder: Path) -> Iterator[Point]:
    def rows(name: str) -> Iterable[tuple[str, dict[str, Any]]]:
        return read_results(folder / f"{name}.json").get("rows", {}).items()

    for row, measured in rows("fixed_work"):
        for peer, ratios in measured["peers"].items():
            yield Point("fixed work", row, peer, ratios)
    for row, ratios in rows("image_updates"):
        yield Point("updates from images", row, "sb3", ratios)
    for row, measured in rows("collecting"):
        for peer, ratios in measured["who"].items():
            if "auto" in ratios:
                yield Point("collecting, auto", row, peer, ratios["auto"])
    for row, measured in rows("replay"):
        for operation in ("insert", "sample", "both"):
            for peer, ratios in measured["who"].items():
                if operation in ratios:
                    yield Point("replay", f"{row}, {operation}", peer, ratios[operation])
    for row, ratios in read_results(folder / "scaling.json").get("rllib", {}).get("by_task", {}).items():
        yield Point("workers", row, "rllib", ratios)
    for row, measured in rows("startup"):
        if "cpu_seconds_ratio" in measured:
            yield Point("start, CPU", row, "sb3", measured["cpu_seconds_ratio"])


def plot(points: list[Point], file: Path) -> None:
    rows = list(dict.fromkeys((point.group, point.row) for point in points))
    peers = list(dict.fromkeys(point.peer for point in points))
    figure, axes = plt.subplots(figsize=(7.5, 0.22 * len(rows) + 1.2))
    for i, peer in enumerate(peers):
        shift = 0.25 * (i / max(1, len(peers) - 1) - 0.5)
        of_peer = [point for point in points if point.peer == peer]
        heights = [shift - rows.index((point.group, point.row)) for point in of_peer]
        ratios = [point.ratios["ratio"] for point in of_peer]
        # the ratio of medians may lie outside the range of the ratios of few rounds
        below = [max(0.0, point.ratios["ratio"] - point.ratios["ratio_min"]) for point in of_peer]
        above = [max(0.0, point.ratios["ratio_max"] - point.ratios["ratio"]) for point in of_peer]
        color, label = COLORS[i % len(COLORS)], TITLES.get(peer, peer)
        axes.errorbar(ratios, heights, xerr=[below, above], fmt="o", ms=4, lw=1, color=color, label=label)
    axes.axvline(1.0, color="gray", lw=1)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_yticks([-i for i in range(len(rows))], [f"{group}: {row}" for group, row in rows], fontsize=7)
    axes.set_xlabel("speed relative to the peer; bars: range over rounds", fontsize=8)
    axes.tick_params(axis="x", labelsize=7)
    axes.grid(axis="x", alpha=0.3)
    axes.legend(fontsize=7, loc="lower center", bbox_to_anchor=(0.3, 1.0), ncols=5, frameon=False)
    figure.savefig(file, dpi=90, bbox_inches="tight")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="plot the results of --quick")
    quick = parser.parse_args().quick
    folder = HERE / "results" / ("quick" if quick else "")
    points = list(read_points(folder))
    if not points:
        parser.error(f"{folder.relative_to(ROOT)} has no results; run the other benchmarks first")
    file = folder / "chart.png" if quick else PLOT
    plot(points, file)
    print(f"written: {file.relative_to(ROOT)}")


if __name__ == "__main__":
    main()

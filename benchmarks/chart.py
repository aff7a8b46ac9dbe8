"""One picture of all comparisons: how many times as fast as each peer, with the spread of single rounds.

    python benchmarks/chart.py [--quick]

It reads what the other scripts wrote: benchmarks/results, or with --quick benchmarks/results/quick.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
from common import HERE, ROOT, read_results

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.ticker import LogLocator, NullFormatter

PICTURE = ROOT / "docs" / "pictures" / "benchmarks.png"
PEERS = {
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
COLOURS = (
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


class Mark(NamedTuple):
    group: str
    row: str
    peer: str
    found: dict[str, float]  # ratio, ratio_min, ratio_max


def marks(folder: Path) -> Iterator[Mark]:
    for row, one in read_results(folder / "fixed_work.json").get("rows", {}).items():
        for peer, found in one["peers"].items():
            yield Mark("fixed work", row, peer, found)
    for row, found in read_results(folder / "pictures.json").get("rows", {}).items():
        yield Mark("updates from images", row, "sb3", found)
    for row, one in read_results(folder / "collecting.json").get("rows", {}).items():
        for peer, found in one["who"].items():
            if "auto" in found:
                yield Mark("collecting, auto", row, peer, found["auto"])
    for row, one in read_results(folder / "replay.json").get("rows", {}).items():
        for way in ("insert", "sample", "both"):
            for peer, found in one["who"].items():
                if way in found:
                    yield Mark("replay", f"{row}, {way}", peer, found[way])
    for row, one in read_results(folder / "scaling.json").get("rllib", {}).get("by_task", {}).items():
        yield Mark("workers", row, "rllib", one)
    for row, one in read_results(folder / "start.json").get("rows", {}).items():
        if "cpu_seconds_ratio" in one:
            yield Mark("start, CPU", row, "sb3", one["cpu_seconds_ratio"])


def draw(found: list[Mark], picture: Path) -> None:
    rows = list(dict.fromkeys((mark.group, mark.row) for mark in found))
    peers = list(dict.fromkeys(mark.peer for mark in found))
    figure, axes = plt.subplots(figsize=(7.5, 0.22 * len(rows) + 1.2))
    for at, peer in enumerate(peers):
        own = [mark for mark in found if mark.peer == peer]
        height = [-rows.index((mark.group, mark.row)) + 0.25 * (at / max(1, len(peers) - 1) - 0.5) for mark in own]
        ratio: list[Any] = [mark.found["ratio"] for mark in own]
        # of many rounds, the ratio of medians lies between the least and the most nearly always
        low = [max(0.0, mark.found["ratio"] - mark.found["ratio_min"]) for mark in own]
        high = [max(0.0, mark.found["ratio_max"] - mark.found["ratio"]) for mark in own]
        colour = COLOURS[at % len(COLOURS)]
        label = PEERS.get(peer, peer)
        axes.errorbar(ratio, height, xerr=[low, high], fmt="o", ms=4, lw=1, color=colour, label=label)
    axes.axvline(1.0, color="grey", lw=1)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_yticks([-i for i in range(len(rows))], [f"{group}: {row}" for group, row in rows], fontsize=7)
    axes.set_xlabel("speed relative to the peer; bars: range over rounds", fontsize=8)
    axes.tick_params(axis="x", labelsize=7)
    axes.grid(axis="x", alpha=0.3)
    axes.legend(fontsize=7, loc="lower center", bbox_to_anchor=(0.3, 1.0), ncols=5, frameon=False)
    figure.savefig(picture, dpi=90, bbox_inches="tight")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="of what was measured quickly")
    quick = parser.parse_args().quick
    folder = HERE / "results" / ("quick" if quick else "")
    found = list(marks(folder))
    if not found:
        parser.error(f"nothing was measured yet: {folder.relative_to(ROOT)} is empty")
    picture = folder / "chart.png" if quick else PICTURE
    draw(found, picture)
    print(f"written: {picture.relative_to(ROOT)}")


if __name__ == "__main__":
    main()

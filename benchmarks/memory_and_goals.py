"""Recurrent networks and hindsight experience replay, on environments that can't be learned without them.

    python benchmarks/memory_and_goals.py                  all rows without results, five seeds
    python benchmarks/memory_and_goals.py --seeds 2        the first two seeds
    python benchmarks/memory_and_goals.py recall           rows whose names contain a word
    python benchmarks/memory_and_goals.py --again recall   discard earlier results

Each row is a preset, with or without the feature in question, and the same budget. A run ends early when it exceeds a
return. The score is the mean over 100 more episodes: the success rate on bit-flip, the return elsewhere. Results are
saved to benchmarks/results/memory_and_goals.json after every run, so an interrupted study continues.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any, NamedTuple

from common import HERE, read_results, run_study, select_rows, table, write_results

import zhixing as zx

RESULTS = HERE / "results" / "memory_and_goals.json"
EPISODES = 100
GOALS, RECALL, CARTPOLE = "toy/bit-flip-15", "toy/recall", "toy/cartpole-no-velocity"
STOP = {GOALS: -6.9, RECALL: 0.99, CARTPOLE: 400.0}  # return over 100 episodes at which training ends


class Row(NamedTuple):
    algorithm: str
    env: str
    variant: str
    settings: dict[str, Any]  # in addition to the preset
    at_least: float | None = None  # target for the median over seeds
    at_most: float | None = None
    better_than: str | None = None  # variant whose median it must exceed by a factor of 1.5

    @property
    def key(self) -> str:
        return f"{self.algorithm} {self.env} {self.variant}"


FEED_FORWARD = {"net__recurrent": "none"}
RANDOM_RECALL = 0.25 + 0.13  # expected return of random actions plus three standard errors over 100 episodes
ROWS = [
    Row("dqn", GOALS, "hindsight", {}, at_least=0.9),
    Row("dqn", GOALS, "plain", {"replay__her": False}, at_most=0.1),
    Row("ppo", RECALL, "recurrent", {}, at_least=0.95),
    Row("ppo", RECALL, "feed-forward", FEED_FORWARD, at_most=RANDOM_RECALL),
    Row("dqn", RECALL, "recurrent", {}, at_least=0.95),
    Row("dqn", RECALL, "feed-forward", FEED_FORWARD, at_most=RANDOM_RECALL),
    Row("ppo", CARTPOLE, "recurrent", {}, at_least=300, better_than="feed-forward"),
    Row("ppo", CARTPOLE, "feed-forward", FEED_FORWARD),
    Row("dqn", CARTPOLE, "recurrent", {}, at_least=300, better_than="feed-forward"),
    Row("dqn", CARTPOLE, "feed-forward", FEED_FORWARD),
]


def train(row: Row, seed: int, folder: Path) -> dict[str, Any]:
    settings = {"stop_return": STOP[row.env], "tensorboard": False, **row.settings}
    result = zx.train(row.algorithm, env=row.env, seed=seed, out=folder / "run", quiet=True, **settings)
    summary = zx.evaluate(folder / "run", EPISODES, seed).summary()
    return {
        "figure": summary.get("is_success", summary["mean_return"]),
        "mean_return": summary["mean_return"],
        **{name: result[name] for name in ("env_steps", "updates", "seconds")},
    }


def median_score(row: Row, results: dict[str, Any]) -> float | None:
    runs = results.get(row.key, {}).values()
    return statistics.median(run["figure"] for run in runs) if runs else None


def check_target(row: Row, results: dict[str, Any]) -> tuple[str, bool | None]:
    """Return a description of the target and whether it is met, or None if runs are missing."""
    score, targets, met = median_score(row, results), [], []
    if row.at_least is not None:
        targets.append(f"at least {row.at_least:g}")
        met.append(score is not None and score >= row.at_least)
    if row.at_most is not None:
        targets.append(f"at most {row.at_most:g}")
        met.append(score is not None and score <= row.at_most)
    if row.better_than is not None:
        other = median_score(row._replace(variant=row.better_than), results)
        targets.append(f"1.5 x {row.better_than}")
        if other is None:
            score = None
        else:
            met.append(score is not None and score >= 1.5 * other)
    return " and ".join(targets) or "-", None if score is None else all(met)


def make_table(results: dict[str, Any]) -> str:
    """Format the median and the range over seeds."""
    rows = []
    for row in ROWS:
        scores = [run["figure"] for run in results.get(row.key, {}).values()]
        cells = (
            [f"{statistics.median(scores):.3g}", f"{min(scores):.3g} to {max(scores):.3g}"] if scores else ["-", "-"]
        )
        target, met = check_target(row, results)
        verdict = "not run" if met is None else "yes" if met else "no"
        rows.append([f"`{row.algorithm}`", row.env, row.variant, str(len(scores)), *cells, target, verdict])
    return table(["algorithm", "environment", "variant", "seeds", "median", "range", "target", "target met"], rows, 8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="only rows whose names contain one of these")
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds")
    parser.add_argument("--again", action="store_true", help="discard their earlier results")
    args = parser.parse_args()
    results = read_results(RESULTS)
    rows = select_rows(ROWS, args.words)
    run_study(rows, lambda row: range(args.seeds), train, results, lambda: write_results(RESULTS, results), args.again)
    print(make_table(results))
    missed = [row.key for row in rows if check_target(row, results)[1] is False]
    if missed:
        raise SystemExit(f"targets not met: {', '.join(missed)}")


if __name__ == "__main__":
    main()

"""Learning study: every algorithm on standard environments, with several seeds, a target return and a budget.

    python benchmarks/learn.py                     all rows without results
    python benchmarks/learn.py ppo dqn             rows of these algorithms
    python benchmarks/learn.py --again ppo         discard earlier results

A run stops when 100 evaluation episodes average at least the target. Results are saved to
benchmarks/results/learn.json after every run, so an interrupted study continues. The table is in docs/algorithms.md.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any, NamedTuple

from common import HERE, ROOT, read_results, run_study, table, write_page, write_results
from offline import OFFLINE

import zhixing as zx

RESULTS = HERE / "results" / "learn.json"
PAGE = ROOT / "docs" / "algorithms.md"
SEEDS = range(5)
FROM_DATA = (*OFFLINE, "gail", "dagger")  # learn from data or experts, see offline.py


class Row(NamedTuple):
    algorithm: str
    env: str
    threshold: float
    env_steps: int  # budget; a smaller one in the preset has priority
    required: int = 4  # number of seeds that must reach the threshold

    @property
    def key(self) -> str:
        return f"{self.algorithm} {self.env}"


def make_rows(env: str, threshold: float, env_steps: int, *special: Row) -> list[Row]:
    """Return the `special` rows and a row for every other algorithm that has a preset for the environment."""
    listed = {row.algorithm for row in special} | set(FROM_DATA)
    others = [name for name in zx.algorithms.names() if name not in listed and zx.config.preset(name, env)]
    return [*special, *(Row(name, env, threshold, env_steps) for name in others)]


CARTPOLE, PENDULUM = "CartPole-v1", "Pendulum-v1"
ROWS = [
    *make_rows(
        CARTPOLE,
        475,
        200_000,
        Row("pg", CARTPOLE, 475, 500_000),
        Row("ac", CARTPOLE, 475, 500_000),
        Row("ppo", CARTPOLE, 475, 100_000, required=5),
        Row("dqn", CARTPOLE, 475, 100_000, required=5),
    ),
    *make_rows(
        PENDULUM,
        -200,
        200_000,
        Row("a2c", PENDULUM, -250, 1_000_000),
        Row("dreamer", PENDULUM, -250, 20_000),
    ),
    Row("dreamer", "toy/pixel-catch", 3.5, 20_000),
    Row("ppo", "Acrobot-v1", -120, 100_000),
    Row("dqn", "Acrobot-v1", -120, 100_000),
    Row("pg", "toy/reach", -3, 100_000),
    Row("ac", "toy/reach", -3, 100_000),
]


def train(row: Row, seed: int, folder: Path) -> dict[str, Any]:
    settings = {"stop_return": row.threshold, "tensorboard": False, "seed": seed}
    preset = zx.config.preset(row.algorithm, row.env)
    settings["env_steps"] = min(row.env_steps, preset.get("env_steps", row.env_steps))
    result = zx.train(row.algorithm, env=row.env, out=folder / "run", quiet=True, **settings)
    return {name: result[name] for name in ("reached", "env_steps", "seconds", "final_return", "best_return")}


def make_table(results: dict[str, Any]) -> str:
    """Format medians over the seeds that reached the threshold."""
    rows = []
    for row in (row for row in ROWS if row.key in results):
        runs = list(results[row.key].values())
        reached = [run for run in runs if run["reached"]]
        steps = f"{statistics.median(run['env_steps'] for run in reached):,.0f}" if reached else "-"
        seconds = f"{statistics.median(run['seconds'] for run in reached):.1f}" if reached else "-"
        counts = [f"{row.threshold:g}", f"{row.env_steps:,}", f"{len(reached)} of {len(runs)}"]
        rows.append([f"`{row.algorithm}`", row.env, *counts, steps, seconds])
    return table(
        ["algorithm", "environment", "threshold", "budget", "reached", "median steps", "median seconds"], rows, 2
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("algorithms", nargs="*", help="only these")
    parser.add_argument("--again", action="store_true", help="discard their earlier results")
    args = parser.parse_args()
    results = read_results(RESULTS)
    rows = [row for row in ROWS if not args.algorithms or row.algorithm in args.algorithms]
    run_study(rows, lambda row: SEEDS, train, results, lambda: write_results(RESULTS, results), args.again)
    print(make_table(results))
    write_page(PAGE, "learned", make_table(results))
    missed = [row.key for row in rows if sum(run["reached"] for run in results[row.key].values()) < row.required]
    if missed:
        raise SystemExit(f"too few seeds reached the threshold: {', '.join(missed)}")


if __name__ == "__main__":
    main()

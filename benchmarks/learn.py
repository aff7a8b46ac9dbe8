"""Learning studies: every algorithm on the standard tasks, over several seeds, against a threshold and a budget.

    python benchmarks/learn.py                     all rows that have no result yet
    python benchmarks/learn.py ppo dqn             rows of these algorithms
    python benchmarks/learn.py --again ppo         once more, from the start

Each run stops when 100 fresh evaluation episodes average at least the threshold. Results are kept in
benchmarks/results/learn.json after every run, so an interrupted study goes on where it stopped; the table in
docs/algorithms.md is written from them.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from common import HERE, read_results, write_page, write_results
from offline import OFFLINE

import zhixing as zx

RESULTS = HERE / "results" / "learn.json"
PAGE = HERE.parent / "docs" / "algorithms.md"
SEEDS = range(5)
FROM_OTHERS = (*OFFLINE, "gail", "dagger")  # learn from data or experts: offline.py


class Row(NamedTuple):
    algorithm: str
    env: str
    threshold: float
    env_steps: int  # budget, and no more than the preset's
    need: int = 4  # seeds of five that must reach the threshold

    @property
    def key(self) -> str:
        return f"{self.algorithm} {self.env}"


def rows(env: str, threshold: float, env_steps: int, *own: Row) -> list[Row]:
    """`own` rows and one for every other algorithm with a preset for the task: algorithms join by their presets."""
    known = {row.algorithm for row in own} | set(FROM_OTHERS)
    others = [name for name in zx.algorithms.names() if name not in known and zx.config.preset(name, env)]
    return [*own, *(Row(name, env, threshold, env_steps) for name in others)]


CARTPOLE, PENDULUM = "CartPole-v1", "Pendulum-v1"
ROWS = [
    *rows(
        CARTPOLE,
        475,
        200_000,
        Row("pg", CARTPOLE, 475, 500_000),
        Row("ac", CARTPOLE, 475, 500_000),
        Row("ppo", CARTPOLE, 475, 100_000, need=5),
        Row("dqn", CARTPOLE, 475, 100_000, need=5),
    ),
    *rows(
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


def study(row: Row, results: dict[str, Any]) -> None:
    for seed in SEEDS:
        done = results.setdefault(row.key, {})
        if str(seed) in done:
            continue
        with tempfile.TemporaryDirectory() as folder:
            settings = {"stop_return": row.threshold, "tensorboard": False, "seed": seed}
            preset = zx.config.preset(row.algorithm, row.env)
            settings["env_steps"] = min(row.env_steps, preset.get("env_steps", row.env_steps))
            result = zx.train(row.algorithm, env=row.env, out=Path(folder) / "run", quiet=True, **settings)
        done[str(seed)] = {
            name: result[name] for name in ("reached", "env_steps", "seconds", "final_return", "best_return")
        }
        print(f"{row.key:28} seed {seed}  {done[str(seed)]}", flush=True)
        write_results(RESULTS, results)


def table(results: dict[str, Any]) -> str:
    """Medians over the seeds that reached the threshold."""
    lines = [
        "| algorithm | environment | threshold | budget | reached | median steps | median seconds |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in (row for row in ROWS if row.key in results):
        runs = list(results[row.key].values())
        good = [run for run in runs if run["reached"]]
        steps = f"{statistics.median(run['env_steps'] for run in good):,.0f}" if good else "-"
        seconds = f"{statistics.median(run['seconds'] for run in good):.1f}" if good else "-"
        lines.append(
            f"| `{row.algorithm}` | {row.env} | {row.threshold:g} | {row.env_steps:,} | {len(good)} of {len(runs)} "
            f"| {steps} | {seconds} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("algorithms", nargs="*", help="only these")
    parser.add_argument("--again", action="store_true", help="forget their earlier results")
    asked = parser.parse_args()
    results = read_results(RESULTS)
    wanted = [row for row in ROWS if not asked.algorithms or row.algorithm in asked.algorithms]
    if asked.again:
        for row in wanted:
            results.pop(row.key, None)
    for row in wanted:
        study(row, results)
    print(table(results))
    write_page(PAGE, "learned", table(results))
    short = [row.key for row in wanted if sum(r["reached"] for r in results[row.key].values()) < row.need]
    if short:
        raise SystemExit(f"below what is asked: {', '.join(short)}")


if __name__ == "__main__":
    main()

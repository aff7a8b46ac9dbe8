"""Train an agent on each level of Super Mario Bros. with the same settings, and evaluate it over 100 episodes.

    python benchmarks/mario_levels.py                       all levels; an interrupted study continues
    python benchmarks/mario_levels.py 1-1 1-2               some levels
    python benchmarks/mario_levels.py --seeds 100,101 1-1   several seeds
    python benchmarks/mario_levels.py --table               only update the table

Settings are those of the preset of ppo, including its budget. Levels come in the order of ORDER. The weights of the
best evaluation are evaluated again, on other episodes with random starts. Runs are stored in runs/mario-levels and
resume in the middle of training. Results are in benchmarks/results/mario_levels.json, the table in docs/mario.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common import HERE, ROOT, machine_info, read_results, table, write_page, write_results

import zhixing as zx

RESULTS = HERE / "results" / "mario_levels.json"
RUNS = ROOT / "runs" / "mario-levels"
PAGE = ROOT / "docs" / "mario.md"
EPISODES, EVALUATION_SEED = 100, 1_000
# roughly from easy to hard: short levels with few enemies first; water and long gaps later; mazes last
ORDER = (
    *("1-1", "1-4", "2-3", "4-1", "3-4", "2-1", "2-4", "5-1", "6-1", "3-1", "5-4", "6-4", "7-3", "3-2", "1-2", "1-3"),
    *("2-2", "3-3", "5-2", "6-2", "7-1", "5-3", "4-3", "6-3", "4-2", "7-2", "8-1", "8-3", "8-2", "4-4", "7-4", "8-4"),
)
# levels that need changes of the settings, each with its reason; none so far
OVERRIDES: Mapping[str, Mapping[str, Any]] = {}


def train(level: str, seed: int, folder: Path) -> dict[str, Any]:
    """Train on a level, or continue its run, and return the content of result.json."""
    if folder.exists():
        return zx.Session.resume(folder).run()
    cfg = zx.config.load(algorithm="ppo", env=f"mario/{level}", seed=seed, **OVERRIDES.get(level, {}))
    return zx.Session(cfg, out=folder).run()


def measure(level: str, seed: int, folder: Path) -> dict[str, Any]:
    """Return the flag rate and the mean distance of the best weights, and what training them took."""
    result = train(level, seed, folder)
    evaluation = zx.evaluate(folder, EPISODES, EVALUATION_SEED, checkpoint="best").summary()
    return {
        "flag_rate": round(evaluation["flag_get"], 3),
        "x_pos": round(evaluation["x_pos"]),
        "episodes": EPISODES,
        "env_steps": result["env_steps"],
        "minutes": round(result["seconds"] / 60, 1),
        **machine_info(),
    }


def make_table(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a row for each level and seed that was measured, in the order of training."""
    rows = [
        [
            level,
            seed,
            f"{row['flag_rate']:.0%}",
            f"{row['x_pos']:,}",
            f"{row['env_steps']:,}",
            f"{row['minutes']:.0f}",
        ]
        for level in ORDER
        for seed, row in results.get(level, {}).items()
    ]
    if not rows:
        return "No level has been measured yet."
    return table(["level", "seed", "flag rate", "mean distance", "steps", "minutes"], rows, 1)


def parse_levels(words: Sequence[str]) -> list[str]:
    unknown = [word for word in words if word not in ORDER]
    if unknown:
        raise SystemExit(f"unknown levels: {', '.join(unknown)}; levels are 1-1 to 8-4")
    return [level for level in ORDER if not words or level in words]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("levels", nargs="*", help="1-1 to 8-4; by default all")
    parser.add_argument("--seeds", default="100", help="seeds, separated by commas")
    parser.add_argument("--runs", type=Path, default=RUNS, help="folder of the runs")
    parser.add_argument("--table", action="store_true", help="only update the table")
    args = parser.parse_args()
    levels = parse_levels(args.levels)
    results = read_results(RESULTS)
    for level in [] if args.table else levels:
        for seed in args.seeds.split(","):
            if seed in results.get(level, {}):
                continue
            row = measure(level, int(seed), args.runs / f"{level}-{seed}")
            results.setdefault(level, {})[seed] = row
            write_results(RESULTS, results)
            print(f"{level}, seed {seed}: {row}", flush=True)
    write_page(PAGE, "levels", make_table(results))


if __name__ == "__main__":
    main()

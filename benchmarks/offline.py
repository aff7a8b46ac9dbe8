"""Offline and imitation learning: normalized scores, 0 for random actions and 100 for the expert behind the dataset.

    python benchmarks/offline.py                     all rows without results, seeds 0 to 2
    python benchmarks/offline.py iql medium-replay   rows whose names contain all of these words
    python benchmarks/offline.py --again iql         discard earlier results

Datasets come from `make datasets`. Each run uses the budget of its preset (Hopper-v5: one seed, 30,000 updates) and is
evaluated with 100 episodes. Results are saved to benchmarks/results/offline.json after every run, so an interrupted
study continues. The tables are in docs/offline.md and docs/imitation.md.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any, NamedTuple

from common import HERE, ROOT, read_results, run_study, select_rows, table, write_page, write_results

import zhixing as zx

DATA = ROOT / "datasets"
RESULTS = HERE / "results" / "offline.json"
SEEDS = range(3)
OFFLINE = ("bc", "td3bc", "awac", "iql", "cql")


class Row(NamedTuple):
    algorithm: str
    env: str
    dataset: str
    page: str  # of the documentation
    seeds: int = len(SEEDS)
    target: float | None = None  # score that every seed must reach

    @property
    def key(self) -> str:
        return f"{self.algorithm} {self.env} {self.dataset}"


ROWS = [
    *(Row(name, "Pendulum-v1", dataset, "offline") for dataset in ("medium-replay", "medium") for name in OFFLINE),
    Row("bc", "Pendulum-v1", "expert", "offline", target=90),
    *(
        Row(name, "CartPole-v1", dataset, "offline")
        for dataset in ("medium-replay", "medium")
        for name in ("bc", "cql")
    ),
    Row("bc", "CartPole-v1", "expert", "offline", target=90),
    Row("awac online", "Pendulum-v1", "medium", "offline"),
    *(Row("gail", env, "expert", "imitation", target=90) for env in ("CartPole-v1", "Pendulum-v1")),
    *(Row("dagger", env, "expert", "imitation", target=95) for env in ("CartPole-v1", "Pendulum-v1")),
    *(Row(name, "Hopper-v5", dataset, "offline", 1) for dataset in ("medium-replay", "medium") for name in OFFLINE),
]


def train(row: Row, seed: int, folder: Path) -> dict[str, Any]:
    """Train and evaluate one seed."""
    dataset, out = str(DATA / row.env / row.dataset), folder / "run"
    settings: dict[str, Any] = {"seed": seed, "quiet": True, "tensorboard": False}
    if row.env == "Hopper-v5":
        settings["offline_updates"] = 30_000
        if row.algorithm == "cql":
            settings["penalty_samples"] = 4  # instead of 10, which takes hours longer
    if row.algorithm == "cql":
        settings["compile"] = True
    if row.algorithm == "dagger":
        expert = DATA / "agents" / f"{row.env}-expert"
        result = zx.train("dagger", env=row.env, expert=str(expert), out=out, **settings)
    elif row.algorithm == "awac online":
        zx.train("awac", dataset=dataset, out=folder / "offline", **settings)
        offline_score = zx.evaluate(folder / "offline", 100, seed + 1_000).summary()["score"]
        online = {
            "init_from": str(folder / "offline"),
            "replay__start": dataset,
            "learning_starts": 0,
            "env_steps": 10_000,
        }
        # greedier than offline, because new steps correct actions that it overestimates
        result = zx.train("awac", env=row.env, out=out, advantage_lambda=1.0, **online, **settings)
    else:
        result = zx.train(row.algorithm, dataset=dataset, env=row.env, out=out, **settings)
    mean_return = zx.evaluate(out, 100, seed + 1_000).mean_return
    evaluation = {"score": zx.offline.open(dataset).score(mean_return), "mean_return": mean_return}
    if row.algorithm == "awac online":
        evaluation["offline_score"] = offline_score
    return evaluation | {name: result[name] for name in ("env_steps", "updates", "seconds")}


def make_table(page: str, results: dict[str, Any]) -> str:
    rows = []
    for row in ROWS:
        runs = list(results.get(row.key, {}).values())
        if row.page != page or not runs:
            continue
        scores = [run["score"] for run in runs]
        seconds = statistics.median(run["seconds"] for run in runs)
        cells = [", ".join(f"{score:.1f}" for score in scores), f"{statistics.mean(scores):.1f}"]
        cells += [f"{runs[0]['updates']:,}", f"{seconds:.0f}"]
        rows.append([f"`{row.algorithm}`", row.env, row.dataset, *cells])
    return table(["algorithm", "environment", "dataset", "scores", "mean", "updates", "median seconds"], rows, 3)


def missed_targets(rows: list[Row], results: dict[str, Any]) -> list[str]:
    """Return the rows below their target, and comparisons between rows that fail."""
    scores = {row.key: [run["score"] for run in results[row.key].values()] for row in ROWS if row.key in results}
    missed = [row.key for row in rows if row.target is not None and min(scores[row.key]) < row.target]
    for name in OFFLINE[1:]:
        key, clone = (f"{algorithm} Pendulum-v1 medium-replay" for algorithm in (name, "bc"))
        if key in scores and clone in scores and statistics.mean(scores[key]) <= statistics.mean(scores[clone]):
            missed.append(f"{key} isn't better than bc")
    for run in results.get("awac online Pendulum-v1 medium", {}).values():
        if run["score"] <= run["offline_score"]:
            missed.append("awac online isn't better than offline")
    return missed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="only rows whose names contain all of these")
    parser.add_argument("--again", action="store_true", help="discard their earlier results")
    args = parser.parse_args()
    results = read_results(RESULTS)
    rows = select_rows(ROWS, args.words, all)
    for env in {row.env for row in rows if not (DATA / row.env).is_dir()}:
        print(f"no data for {env}; run: python benchmarks/make_datasets.py {env}", flush=True)
    rows = [row for row in rows if (DATA / row.env).is_dir()]
    run_study(rows, lambda row: range(row.seeds), train, results, lambda: write_results(RESULTS, results), args.again)
    for page in ("offline", "imitation"):
        print(make_table(page, results))
        write_page(ROOT / "docs" / f"{page}.md", page, make_table(page, results))
    if missed := missed_targets(rows, results):
        raise SystemExit(f"targets not met: {', '.join(missed)}")


if __name__ == "__main__":
    main()

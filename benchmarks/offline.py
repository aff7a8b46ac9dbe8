"""Learning from data and from experts: scores, with 0 for random play and 100 for the expert that made the data.

    python benchmarks/offline.py                     all rows that have no result yet, seeds 0 to 2
    python benchmarks/offline.py iql medium-replay   rows whose name contains all of these words
    python benchmarks/offline.py --again iql         once more, from the start

The data comes from `make datasets`. Each run learns to the end of its preset's budget (Hopper-v5: one seed, 30,000
updates) and plays 100 fresh episodes.
Results are kept in benchmarks/results/offline.json after every run, so an interrupted study goes on where it stopped;
the tables in docs/offline.md and docs/imitation.md are made from them.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from common import HERE, read_results, write_page, write_results

import zhixing as zx

DATA = HERE.parent / "datasets"
RESULTS = HERE / "results" / "offline.json"
DOCS = HERE.parent / "docs"
SEEDS = range(3)
OFFLINE = ("bc", "td3bc", "awac", "iql", "cql")


class Row(NamedTuple):
    algorithm: str
    task: str
    kind: str  # of the data
    page: str  # of the documentation that shows it
    seeds: int = len(SEEDS)
    least: float | None = None  # score that every seed must reach

    @property
    def key(self) -> str:
        return f"{self.algorithm} {self.task} {self.kind}"


ROWS = [
    *(Row(name, "Pendulum-v1", kind, "offline") for kind in ("medium-replay", "medium") for name in OFFLINE),
    Row("bc", "Pendulum-v1", "expert", "offline", least=90),
    *(Row(name, "CartPole-v1", kind, "offline") for kind in ("medium-replay", "medium") for name in ("bc", "cql")),
    Row("bc", "CartPole-v1", "expert", "offline", least=90),
    Row("awac online", "Pendulum-v1", "medium", "offline"),
    *(Row("gail", task, "expert", "imitation", least=90) for task in ("CartPole-v1", "Pendulum-v1")),
    *(Row("dagger", task, "expert", "imitation", least=95) for task in ("CartPole-v1", "Pendulum-v1")),
    *(Row(name, "Hopper-v5", kind, "offline", 1) for kind in ("medium-replay", "medium") for name in OFFLINE),
]


def learned(row: Row, seed: int, folder: Path) -> dict[str, Any]:
    """One run; its score and what it took."""
    data, out = DATA / row.task / row.kind, folder / "run"
    common: dict[str, Any] = {"seed": seed, "quiet": True, "tensorboard": False}
    if row.task == "Hopper-v5":
        common["offline_updates"] = 30_000
        if row.algorithm == "cql":
            common["penalty_samples"] = 4  # instead of 10: hours less
    if row.algorithm == "cql":
        common["compile"] = True
    if row.algorithm == "dagger":
        expert = DATA / "agents" / f"{row.task}-expert"
        result = zx.train("dagger", env=row.task, expert=str(expert), out=out, **common)
    elif row.algorithm == "awac online":
        zx.train("awac", dataset=str(data), out=folder / "offline", **common)
        before = zx.evaluate(folder / "offline", 100, seed + 1_000).summary()["score"]
        online = {
            "init_from": str(folder / "offline"),
            "replay__start": str(data),
            "learning_starts": 0,
            "env_steps": 10_000,
        }
        # greedier than from data alone: what it overrates is found out
        result = zx.train("awac", env=row.task, out=out, advantage_lambda=1.0, **online, **common)
    else:
        result = zx.train(row.algorithm, dataset=str(data), env=row.task, out=out, **common)
    mean = zx.evaluate(out, 100, seed + 1_000).mean_return
    found = {"score": zx.offline.open(str(data)).score(mean), "mean_return": mean}
    if row.algorithm == "awac online":
        found["offline_score"] = before
    return found | {name: result[name] for name in ("env_steps", "updates", "seconds")}


def study(row: Row, results: dict[str, Any]) -> None:
    for seed in range(row.seeds):
        done = results.setdefault(row.key, {})
        if str(seed) in done:
            continue
        with tempfile.TemporaryDirectory() as folder:
            done[str(seed)] = learned(row, seed, Path(folder))
        print(f"{row.key:36} seed {seed}  {done[str(seed)]}", flush=True)
        write_results(RESULTS, results)


def table(page: str, results: dict[str, Any]) -> str:
    lines = [
        "| algorithm | environment | dataset | scores | mean | updates | median seconds |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in ROWS:
        runs = list(results.get(row.key, {}).values())
        if row.page != page or not runs:
            continue
        scores = [run["score"] for run in runs]
        lines.append(
            f"| `{row.algorithm}` | {row.task} | {row.kind} | {', '.join(f'{s:.1f}' for s in scores)} "
            f"| {statistics.mean(scores):.1f} | {runs[0]['updates']:,} "
            f"| {statistics.median(run['seconds'] for run in runs):.0f} |"
        )
    return "\n".join(lines)


def short(rows: list[Row], results: dict[str, Any]) -> list[str]:
    """What is below what is asked."""
    means = {
        row.key: statistics.mean(run["score"] for run in results[row.key].values())
        for row in ROWS
        if row.key in results
    }
    below = [
        row.key
        for row in rows
        if row.least is not None and min(r["score"] for r in results[row.key].values()) < row.least
    ]
    for name in OFFLINE[1:]:
        key, clone = (f"{algorithm} Pendulum-v1 medium-replay" for algorithm in (name, "bc"))
        if key in means and clone in means and means[key] <= means[clone]:
            below.append(f"{key} against bc")
    for run in results.get("awac online Pendulum-v1 medium", {}).values():
        if run["score"] <= run["offline_score"]:
            below.append("awac online against offline")
    return below


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="only rows whose name contains all of these")
    parser.add_argument("--again", action="store_true", help="forget their earlier results")
    given = parser.parse_args()
    results = read_results(RESULTS)
    rows = [row for row in ROWS if all(word in row.key for word in given.words)]
    for task in {row.task for row in rows if not (DATA / row.task).is_dir()}:
        print(f"no data for {task}: python benchmarks/make_datasets.py {task}", flush=True)
    rows = [row for row in rows if (DATA / row.task).is_dir()]
    if given.again:
        for row in rows:
            results.pop(row.key, None)
    for row in rows:
        study(row, results)
    for page in ("offline", "imitation"):
        print(table(page, results))
        write_page(DOCS / f"{page}.md", page, table(page, results))
    if missed := short(rows, results):
        raise SystemExit(f"below what is asked: {', '.join(missed)}")


if __name__ == "__main__":
    main()

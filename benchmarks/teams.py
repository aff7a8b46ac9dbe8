"""Teams: algorithms of many agents on their tasks, against chance and simple rules.

    python benchmarks/teams.py                    all rows, seeds 0 to 2, that have no result yet
    python benchmarks/teams.py skirmish           rows whose name contains a word
    python benchmarks/teams.py --again skirmish   once more, from the start

Each row trains a preset to its end and plays 100 other fresh episodes. The references play 1,000. Results and learning
curves are kept in benchmarks/results/teams.json after every run, so an interrupted study goes on where it stopped; the
table and the picture in docs/teams.md are made from them.
"""

from __future__ import annotations

import argparse
import csv
import math
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from common import HERE, read_results, write_page, write_results

import zhixing as zx
from zhixing.envs.adapters.skirmish import Battles, attack_nearest

RESULTS = HERE / "results" / "teams.json"
PAGE = HERE.parent / "docs" / "teams.md"
PICTURE = HERE.parent / "docs" / "pictures" / "teams.png"
SEEDS = range(3)
SPREAD, BATTLE, FOOD = "mpe/simple_spread", "skirmish/3m", "lbf/8x8-2p-3f"


class Row(NamedTuple):
    algorithm: str
    env: str
    figure: str  # of an evaluation's summary
    least: float | None = None  # every seed must reach this; without, the interval must lie above all references

    @property
    def key(self) -> str:
        return f"{self.algorithm} {self.env}"


ROWS = [
    Row("qmix", BATTLE, "win_rate", 0.8),
    Row("mappo", BATTLE, "win_rate", 0.8),
    Row("mappo", SPREAD, "mean_return"),
    Row("qmix", SPREAD, "mean_return"),
    Row("maddpg", SPREAD, "mean_return"),
    Row("ippo", FOOD, "food", 0.5),
]


# --- references ---


def play(env: str, choose: Callable[[Any, Any], Any], episodes: int = 1_000) -> list[tuple[float, dict[str, float]]]:
    """Returns and last numbers of episodes in which `choose(mask, rng)` gives the actions `[N,A]`."""
    vector = zx.envs.make_vector(env, 50)
    rng = np.random.default_rng(0)
    _, info = vector.reset(seed=0)
    returns, played = np.zeros(vector.num_envs), []
    shape = (vector.num_envs, vector.spaces.num_agents, vector.spaces.num_actions)
    while len(played) < episodes:
        mask = info.get("action_mask", np.ones(shape, bool))
        _, reward, terminated, truncated, info = vector.step(choose(mask, rng))
        returns += reward.mean(-1)
        for i in np.flatnonzero(terminated | truncated):
            played.append((float(returns[i]), info["final_info"].get(int(i), {})))
            returns[i] = 0.0
    vector.close()
    return played


def by_chance(mask: Any, rng: np.random.Generator) -> Any:
    return (mask * rng.random(mask.shape)).argmax(-1)


def nearest_wins(num: int = 1_000) -> float:
    battles = Battles(num, "3m", None)
    battles.rng = np.random.default_rng(0)
    battles.reset(np.arange(num))
    won, over = np.zeros(num, bool), np.zeros(num, bool)
    while not over.all():
        _, terminated, truncated = battles.step(attack_nearest(battles))
        fresh = (terminated | truncated) & ~over
        won[fresh] = [battles.final_info(i)["won"] for i in np.flatnonzero(fresh)]
        over |= fresh
        battles.reset(np.flatnonzero(terminated | truncated))
    return float(won.mean())


def references() -> dict[str, dict[str, float]]:
    def mean(played: list[tuple[float, dict[str, float]]], name: str | None = None) -> float:
        return float(np.mean([ret if name is None else told[name] for ret, told in played]))

    fixed = [mean(play(SPREAD, lambda mask, rng, a=a: np.full(mask.shape[:2], a))) for a in range(5)]
    return {
        SPREAD: {"random": mean(play(SPREAD, by_chance)), "best fixed action": max(fixed)},
        BATTLE: {"random": mean(play(BATTLE, by_chance), "won"), "attack nearest": nearest_wins()},
        FOOD: {"random": mean(play(FOOD, by_chance), "food")},
    }


# --- training ---


def study(row: Row, results: dict[str, Any]) -> None:
    for seed in SEEDS:
        done = results["runs"].setdefault(row.key, {})
        if str(seed) in done:
            continue
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "run"
            result = zx.train(row.algorithm, env=row.env, seed=seed, out=out, quiet=True, tensorboard=False)
            summary = zx.evaluate(out, 100, seed + 1_000).summary()
            with open(out / "metrics.csv") as file:
                rows = [line for line in csv.DictReader(file) if line["eval_return_mean"]]
            curve = [(int(line["env_steps"]), round(float(line["eval_return_mean"]), 3)) for line in rows]
        done[str(seed)] = {
            "figure": summary[row.figure],
            "mean_return": summary["mean_return"],
            **{name: result[name] for name in ("env_steps", "updates", "seconds")},
            "curve": curve,
        }
        print(f"{row.key:28} seed {seed}  {row.figure} {summary[row.figure]:.4g}  {result['seconds']} s", flush=True)
        save(results)


def save(results: dict[str, Any]) -> None:
    write_results(RESULTS, results, indent=None)


def interval(figures: list[float]) -> tuple[float, float]:
    """95 % by Student's t."""
    t = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}.get(len(figures))
    mean = statistics.mean(figures)
    half = math.inf if t is None else t * statistics.stdev(figures) / math.sqrt(len(figures))
    return mean - half, mean + half


def met(row: Row, results: dict[str, Any]) -> bool:
    figures = [run["figure"] for run in results["runs"].get(row.key, {}).values()]
    if len(figures) < len(SEEDS):
        return False
    if row.least is not None:
        return min(figures) >= row.least and min(figures) > max(results["references"][row.env].values())
    return interval(figures)[0] > max(results["references"][row.env].values())


def table(results: dict[str, Any]) -> str:
    lines = [
        "| algorithm | environment | metric | per seed | 95 % interval | baselines | steps | median s | target met |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in ROWS:
        runs = list(results["runs"].get(row.key, {}).values())
        if not runs:
            continue
        figures = [run["figure"] for run in runs]
        low, high = interval(figures)
        known = ", ".join(f"{name} {value:.3g}" for name, value in results["references"][row.env].items())
        lines.append(
            f"| `{row.algorithm}` | {row.env} | {row.figure} | {', '.join(f'{f:.3g}' for f in figures)} "
            f"| {low:.3g} to {high:.3g} | {known} | {runs[0]['env_steps']:,} "
            f"| {statistics.median(run['seconds'] for run in runs):.0f} | {'yes' if met(row, results) else 'no'} |"
        )
    return "\n".join(lines)


def draw(results: dict[str, Any]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    tasks = list(dict.fromkeys(row.env for row in ROWS if row.key in results["runs"]))
    figure, axes = plt.subplots(1, len(tasks), figsize=(4.2 * len(tasks), 3.2), squeeze=False)
    for ax, task in zip(axes[0], tasks, strict=True):
        for i, row in enumerate(row for row in ROWS if row.env == task):
            for j, run in enumerate(results["runs"].get(row.key, {}).values()):
                steps, returns = zip(*run["curve"], strict=True)
                ax.plot(steps, returns, color=f"C{i}", alpha=0.8, label=row.algorithm if j == 0 else None)
        if task == SPREAD:
            for style, (name, value) in zip((":", "--"), results["references"][task].items(), strict=True):
                ax.axhline(value, color="grey", linestyle=style, label=name)
        ax.set(title=task, xlabel="environment steps", ylabel="return")
        ax.legend(fontsize=8)
    figure.tight_layout()
    PICTURE.parent.mkdir(exist_ok=True)
    figure.savefig(PICTURE, dpi=80)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="only rows whose name contains one of these")
    parser.add_argument("--again", action="store_true", help="forget their earlier results")
    given = parser.parse_args()
    results = read_results(RESULTS) or {"runs": {}}
    rows = [row for row in ROWS if not given.words or any(word in row.key for word in given.words)]
    if given.again:
        for row in rows:
            results["runs"].pop(row.key, None)
    if "references" not in results:
        results["references"] = references()
        save(results)
    for row in rows:
        study(row, results)
    print(table(results))
    draw(results)
    write_page(PAGE, "teams", table(results))
    short = [row.key for row in rows if not met(row, results)]
    if short:
        raise SystemExit(f"below what is asked: {', '.join(short)}")


if __name__ == "__main__":
    main()

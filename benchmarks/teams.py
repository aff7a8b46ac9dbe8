"""Multi-agent algorithms, compared with random actions and simple scripted policies.

    python benchmarks/teams.py                    all rows without results, seeds 0 to 2
    python benchmarks/teams.py skirmish           rows whose names contain a word
    python benchmarks/teams.py --again skirmish   discard earlier results

Each row trains with a preset and is evaluated with 100 more episodes, the baselines with 1,000. Results and learning
curves are saved to benchmarks/results/teams.json after every run, so an interrupted study continues. The table and the
plot are in docs/teams.md.
"""

from __future__ import annotations

import argparse
import csv
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from common import HERE, ROOT, read_results, run_study, select_rows, table, write_page, write_results

import zhixing as zx
from zhixing.envs.adapters.skirmish import Battles, attack_nearest

RESULTS = HERE / "results" / "teams.json"
PAGE = ROOT / "docs" / "teams.md"
PLOT = ROOT / "docs" / "pictures" / "teams.png"
SEEDS = range(3)
SPREAD, BATTLE, FOOD = "mpe/simple_spread", "skirmish/3m", "lbf/8x8-2p-3f"


class Row(NamedTuple):
    algorithm: str
    env: str
    metric: str  # of an evaluation's summary
    target: float | None = None  # for every seed; without it, the 95 % interval must lie above all baselines

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


# --- baselines -------------------------------------------------------------------------------------------------------


def play(env: str, choose: Callable[[Any, Any], Any], episodes: int = 1_000) -> list[tuple[float, dict[str, float]]]:
    """Play episodes with the actions `choose(mask, rng) [N,A]`. Return their returns and final infos."""
    vector = zx.envs.make_vector(env, 50)
    rng = np.random.default_rng(0)
    _, info = vector.reset(seed=0)
    returns, finished = np.zeros(vector.num_envs), []
    shape = (vector.num_envs, vector.spaces.num_agents, vector.spaces.num_actions)
    while len(finished) < episodes:
        mask = info.get("action_mask", np.ones(shape, bool))
        _, reward, terminated, truncated, info = vector.step(choose(mask, rng))
        returns += reward.mean(-1)
        for i in np.flatnonzero(terminated | truncated):
            finished.append((float(returns[i]), info["final_info"].get(int(i), {})))
            returns[i] = 0.0
    vector.close()
    return finished


def choose_random(mask: Any, rng: np.random.Generator) -> Any:
    return (mask * rng.random(mask.shape)).argmax(-1)


def win_rate_of_attack_nearest(num: int = 1_000) -> float:
    battles = Battles(num, "3m", None)
    battles.rng = np.random.default_rng(0)
    battles.reset(np.arange(num))
    won, finished = np.zeros(num, bool), np.zeros(num, bool)
    while not finished.all():
        _, terminated, truncated = battles.step(attack_nearest(battles))
        newly_finished = (terminated | truncated) & ~finished
        won[newly_finished] = [battles.final_info(i)["won"] for i in np.flatnonzero(newly_finished)]
        finished |= newly_finished
        battles.reset(np.flatnonzero(terminated | truncated))
    return float(won.mean())


def measure_baselines() -> dict[str, dict[str, float]]:
    def mean_return(env: str, choose: Callable[[Any, Any], Any]) -> float:
        return float(np.mean([episode_return for episode_return, _ in play(env, choose)]))

    def mean_info(env: str, name: str) -> float:
        return float(np.mean([info[name] for _, info in play(env, choose_random)]))

    fixed = [mean_return(SPREAD, lambda mask, rng, a=a: np.full(mask.shape[:2], a)) for a in range(5)]
    return {
        SPREAD: {"random": mean_return(SPREAD, choose_random), "best fixed action": max(fixed)},
        BATTLE: {"random": mean_info(BATTLE, "won"), "attack nearest": win_rate_of_attack_nearest()},
        FOOD: {"random": mean_info(FOOD, "food")},
    }


# --- training --------------------------------------------------------------------------------------------------------


def train(row: Row, seed: int, folder: Path) -> dict[str, Any]:
    run = folder / "run"
    result = zx.train(row.algorithm, env=row.env, seed=seed, out=run, quiet=True, tensorboard=False)
    summary = zx.evaluate(run, 100, seed + 1_000).summary()
    with open(run / "metrics.csv") as file:
        lines = [line for line in csv.DictReader(file) if line["eval_return_mean"]]
    return {
        "figure": summary[row.metric],
        "mean_return": summary["mean_return"],
        **{name: result[name] for name in ("env_steps", "updates", "seconds")},
        "curve": [(int(line["env_steps"]), round(float(line["eval_return_mean"]), 3)) for line in lines],
    }


def confidence_interval(values: list[float]) -> tuple[float, float]:
    """Return the 95 % interval of the mean by Student's t-distribution."""
    t = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}.get(len(values))
    mean = statistics.mean(values)
    half = math.inf if t is None else t * statistics.stdev(values) / math.sqrt(len(values))
    return mean - half, mean + half


def target_met(row: Row, results: dict[str, Any]) -> bool:
    values = [run["figure"] for run in results["runs"].get(row.key, {}).values()]
    best_baseline = max(results["references"][row.env].values())
    if len(values) < len(SEEDS):
        return False
    if row.target is not None:
        return min(values) >= row.target and min(values) > best_baseline
    return confidence_interval(values)[0] > best_baseline


def make_table(results: dict[str, Any]) -> str:
    rows = []
    for row in ROWS:
        runs = list(results["runs"].get(row.key, {}).values())
        if not runs:
            continue
        values = [run["figure"] for run in runs]
        low, high = confidence_interval(values)
        baselines = ", ".join(f"{name} {value:.3g}" for name, value in results["references"][row.env].items())
        per_seed = ", ".join(f"{value:.3g}" for value in values)
        cells = [f"`{row.algorithm}`", row.env, row.metric, per_seed, f"{low:.3g} to {high:.3g}", baselines]
        seconds = statistics.median(run["seconds"] for run in runs)
        verdict = "yes" if target_met(row, results) else "no"
        rows.append([*cells, f"{runs[0]['env_steps']:,}", f"{seconds:.0f}", verdict])
    head = ["algorithm", "environment", "metric", "per seed", "95 % interval", "baselines"]
    return table([*head, "steps", "median s", "target met"], rows, 9)


def plot_curves(results: dict[str, Any]) -> None:
    from matplotlib.figure import Figure

    envs = list(dict.fromkeys(row.env for row in ROWS if row.key in results["runs"]))
    figure = Figure(figsize=(4.2 * len(envs), 3.2), layout="tight")
    for axes, env in zip(figure.subplots(1, len(envs), squeeze=False)[0], envs, strict=True):
        for i, row in enumerate(row for row in ROWS if row.env == env):
            for j, run in enumerate(results["runs"].get(row.key, {}).values()):
                steps, returns = zip(*run["curve"], strict=True)
                axes.plot(steps, returns, color=f"C{i}", alpha=0.8, label=row.algorithm if j == 0 else None)
        if env == SPREAD:
            for style, (name, value) in zip((":", "--"), results["references"][env].items(), strict=True):
                axes.axhline(value, color="gray", linestyle=style, label=name)
        axes.set(title=env, xlabel="environment steps", ylabel="return")
        axes.legend(fontsize=8)
    PLOT.parent.mkdir(exist_ok=True)
    figure.savefig(PLOT, dpi=80)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="only rows whose names contain one of these")
    parser.add_argument("--again", action="store_true", help="discard their earlier results")
    args = parser.parse_args()
    results = read_results(RESULTS) or {"runs": {}}

    def save() -> None:
        write_results(RESULTS, results, indent=None)

    if "references" not in results:
        results["references"] = measure_baselines()
        save()
    rows = select_rows(ROWS, args.words)
    run_study(rows, lambda row: SEEDS, train, results["runs"], save, args.again)
    print(make_table(results))
    plot_curves(results)
    write_page(PAGE, "teams", make_table(results))
    missed = [row.key for row in rows if not target_met(row, results)]
    if missed:
        raise SystemExit(f"targets not met: {', '.join(missed)}")


if __name__ == "__main__":
    main()

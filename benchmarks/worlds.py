"""Learning in environments that take hours: Super Mario Bros., Atari, Procgen, MuJoCo and DM Control.

    python benchmarks/worlds.py                    all rows; an interrupted study continues
    python benchmarks/worlds.py sac Hopper         rows whose names contain all of these words
    python benchmarks/worlds.py --reference sac    Stable-Baselines3 for the steps of zhixing's first seed
    python benchmarks/worlds.py --draw             only update the table and the plot

Runs use presets and are stored in runs/worlds; RUN/curve.jsonl contains every evaluation. Results are in
benchmarks/results/worlds.json, the table and the plot in docs/worlds.md.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from common import HERE, ROOT, peer_python, read_results, run_alone, select_rows, table, write_page, write_results

import zhixing as zx
from zhixing.collectors.evaluation import Evaluation

RESULTS = HERE / "results" / "worlds.json"
RUNS = ROOT / "runs" / "worlds"
PAGE = ROOT / "docs" / "worlds.md"
PLOT = ROOT / "docs" / "pictures" / "worlds.png"
SCORES = ("x_pos", "mean_return")  # the first of these in an evaluation's summary is its score


class Row(NamedTuple):
    algorithm: str
    env: str
    targets: dict[int, float]  # scores by the number of steps within which they should be reached
    seeds: int = 1
    stop: bool = False  # stop when 100 episodes confirm the last target, which saves hours
    episodes: int = 20  # of the final evaluation
    settings: Mapping[str, Any] = MappingProxyType({})  # in addition to the preset
    reference: bool = False  # whether Stable-Baselines3 trains it too

    @property
    def key(self) -> str:
        return f"{self.algorithm} {self.env}"


COMPILED = {"compile": True}  # changes only rounding
# one hour on one core: a network a third as expensive as Nature's, and each action repeated for four steps, for which
# the paper's discount of 0.999 becomes 0.996
BIGFISH = {"env": {"action_repeat": 4}, "net": {"cnn": "small"}, "gamma": 0.996, "num_threads": 1}
# one hour on one core: a network a third as expensive as Nature's, and environments in the same process
PONG = {"num_envs": 8, "vector": {"backend": "serial"}, "net": {"cnn": "small"}, "eval_every": 102_400}
ROWS = [
    Row("ppo", "mario/1-1", {300_000: 1_000, 1_000_000: 1_500}),
    # 1.5 times the return of random actions on unseen levels: 0.82 (0.66 to 0.98, 200 episodes)
    Row("ppo", "procgen/bigfish", {3_014_656: 1.23}, episodes=200, settings=BIGFISH),
    Row("ppo", "ALE/Pong-v5", {1_500_000: -18}, settings=PONG),
    Row("sac", "HalfCheetah-v5", {200_000: 4_000}, seeds=3, stop=True, reference=True),
    Row("ppo", "HalfCheetah-v5", {1_000_000: 1_500}, reference=True),
    Row("sac", "Hopper-v5", {200_000: 2_000}, seeds=3, stop=True, settings=COMPILED, reference=True),
    Row("sac", "dmc/cartpole-balance", {200_000: 900}, stop=True, settings=COMPILED, reference=True),
    Row("sac", "dmc/walker-walk", {200_000: 800}, stop=True, settings=COMPILED, reference=True),
]


class RecordCurve(zx.Callback):
    """Appends every evaluation to a file. A resumed run may repeat some; then the later one counts."""

    def __init__(self, run: Path) -> None:
        self.file = run / "curve.jsonl"

    def evaluation_end(self, loop: zx.TrainingLoop, evaluation: Evaluation) -> None:
        with self.file.open("a") as file:
            training = {"env_steps": loop.env_steps, "trained": loop.recent_mean("episode_return")}
            file.write(json.dumps(training | evaluation.summary()) + "\n")


def read_curve(run: Path) -> list[list[float]]:
    """Return points of steps, score and, if it was recorded, the mean return of the last 100 training episodes."""
    file = run / "curve.jsonl"
    lines = file.read_text().splitlines() if file.is_file() else []
    by_steps = {line["env_steps"]: line for line in map(json.loads, lines)}
    points = []
    for steps, line in sorted(by_steps.items()):
        score = next(line[name] for name in SCORES if name in line)
        points.append([steps, *(round(value, 2) for value in (score, line.get("trained")) if value is not None)])
    return points


def save_result(row: Row, side: str, result: dict[str, Any]) -> None:
    """Add a result to the file as it is now: other processes may train other rows at the same time."""
    results = read_results(RESULTS)
    results.setdefault(row.key, {})[side] = result
    write_results(RESULTS, results)


def train(row: Row, seed: int) -> None:
    run = RUNS / f"{row.key.replace('/', '-').replace(' ', '-')}-{seed}"
    steps = max(row.targets)
    if (run / "checkpoints").is_dir():
        session = zx.Session.resume(run, [RecordCurve(run)])
    else:
        stop_return = row.targets[steps] if row.stop else None
        settings = {"algorithm": row.algorithm, "env__name": row.env, "seed": seed, **row.settings}
        cfg = zx.config.load(**settings, env_steps=steps, stop_return=stop_return)
        session = zx.Session(cfg, run, [RecordCurve(run)])
    result = session.run()
    training = {"env_steps": result["env_steps"], "seconds": result["seconds"], "curve": read_curve(run)}
    save_result(row, str(seed), training | {"final": zx.evaluate(run, row.episodes, seed + 1_000).summary()})


def train_reference(row: Row) -> None:
    """Train with Stable-Baselines3 and the settings of RL Baselines3 Zoo, for the steps of zhixing's first seed."""
    requirements = ["torch==2.13.0", "stable-baselines3==2.9.2", "mujoco==3.17.0", "shimmy[dm-control]", "packaging"]
    steps = read_results(RESULTS).get(row.key, {}).get("0", {"env_steps": max(row.targets)})["env_steps"]
    work = {"algorithm": row.algorithm, "env": row.env, "env_steps": steps, "seed": 0}
    python = peer_python("sb3-worlds", requirements, constrained=False)
    save_result(row, "Stable-Baselines3", run_alone(python, HERE / "peers" / "sb3_worlds.py", json.dumps(work)))


def score_at(run: dict[str, Any], steps: int) -> float:
    """Return the score of the last evaluation within so many steps."""
    return next((point[1] for point in reversed(run["curve"]) if point[0] <= steps), math.nan)


def make_table(results: dict[str, Any]) -> str:
    rows = []
    for row in ROWS:
        sides = results.get(row.key, {})
        runs = [run for side, run in sides.items() if side.isdigit()]
        peer = sides.get("Stable-Baselines3")
        for steps, target in row.targets.items() if runs else ():
            scores = ", ".join(f"{score_at(run, steps):,.4g}" for run in runs)
            used = ", ".join(f"{min(steps, run['env_steps']):,}" for run in runs)
            minutes = ", ".join(f"{run['seconds'] / 60:.0f}" for run in runs)
            reference = "-" if peer is None else f"{peer['final']:,.0f}"
            cells = [f"`{row.algorithm}`", row.env, f"{steps:,}", f"{target:,}", scores, used, minutes, reference]
            rows.append(cells)
    head = ["algorithm", "environment", "step limit", "target", "return per seed", "steps", "minutes"]
    return table([*head, "Stable-Baselines3"], rows, 2)


def plot_curves(results: dict[str, Any]) -> None:
    from matplotlib.figure import Figure

    rows = [row for row in ROWS if row.key in results]
    if not rows:
        return
    columns = min(3, len(rows))
    lines = math.ceil(len(rows) / columns)
    figure = Figure(figsize=(3.4 * columns, 2.6 * lines), layout="constrained")
    for i, row in enumerate(rows):
        axes = figure.add_subplot(lines, columns, i + 1)
        for side, run in results[row.key].items():
            steps, *curves = zip(*run["curve"], strict=True)
            labels = [f"seed {side}", f"seed {side}, training"] if side.isdigit() else [side]
            for values, label, style in zip(curves, labels, ("-", "--"), strict=False):
                axes.plot([n / 1_000 for n in steps], values, style, label=label, linewidth=1)
        for limit, target in row.targets.items():
            axes.plot([0, limit / 1_000], [target, target], linestyle=":", color="0.4")
        axes.set_title(row.key, fontsize=9)
        axes.set_xlabel("environment steps (thousands)", fontsize=7)
        axes.tick_params(labelsize=7)
        axes.legend(fontsize=6)
    PLOT.parent.mkdir(exist_ok=True)
    figure.savefig(PLOT, dpi=90)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="only rows whose names contain all of these")
    parser.add_argument("--seeds", type=int, nargs="*", help="only these seeds of each row")
    parser.add_argument("--reference", action="store_true", help="train with Stable-Baselines3 instead of zhixing")
    parser.add_argument("--draw", action="store_true", help="train nothing")
    args = parser.parse_args()
    for row in () if args.draw else select_rows(ROWS, args.words, all):
        if args.reference:
            if row.reference:
                train_reference(row)
            continue
        for seed in range(row.seeds):
            if args.seeds is None or seed in args.seeds:
                train(row, seed)
    results = read_results(RESULTS)
    print(make_table(results))
    write_page(PAGE, "learned", make_table(results))
    plot_curves(results)


if __name__ == "__main__":
    main()

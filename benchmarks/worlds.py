"""Learning in worlds that take hours: Super Mario, Atari, Procgen, MuJoCo, DM Control, from their presets.

    python benchmarks/worlds.py                    all rows, one after the other; goes on where it stopped
    python benchmarks/worlds.py sac Hopper         rows whose name contains all of these words
    python benchmarks/worlds.py --reference sac    the same tasks and steps by Stable-Baselines3, one seed, after ours
    python benchmarks/worlds.py --draw             only tables and pictures, of what there is

Runs are kept in runs/worlds, so that an interrupted one goes on; every evaluation is noted in RUN/curve.jsonl. Results
are in benchmarks/results/worlds.json, the table in docs/worlds.md, the curves in docs/pictures/worlds.png.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from common import HERE, ROOT, peer_python, read_results, run_alone, write_page, write_results

import zhixing as zx
from zhixing.collect.evaluation import Evaluation

RESULTS = HERE / "results" / "worlds.json"
RUNS = ROOT / "runs" / "worlds"
PAGE = ROOT / "docs" / "worlds.md"
PICTURE = ROOT / "docs" / "pictures" / "worlds.png"
TOLD = {"x_pos": "distance", "mean_return": "return"}  # what counts: the first that an evaluation tells


class Row(NamedTuple):
    algorithm: str
    env: str
    marks: dict[int, float]  # what must be reached by which step
    seeds: int = 1
    need: int = 1  # seeds that must
    stop: bool = False  # as soon as 100 episodes confirm the last mark: hours less
    episodes: int = 20  # of the last evaluation
    settings: Mapping[str, Any] = MappingProxyType({})  # beside the preset
    reference: bool = False  # whether Stable-Baselines3 does it, too

    @property
    def key(self) -> str:
        return f"{self.algorithm} {self.env}"


GRAPH = {"compile": True}  # compiled updates, the same but for rounding
# an hour of a core: a third of the cost of Nature's network, and each action for four steps of the game, over which
# the paper's discount of 0.999 becomes 0.996
BIGFISH = {"env": {"skip": 4}, "net": {"cnn": "small"}, "gamma": 0.996, "num_threads": 1}
# an hour of a core: a network of a third of the cost, and copies in the same process
HOUR = {"num_envs": 8, "vector": {"backend": "serial"}, "net": {"cnn": "small"}, "eval_every_steps": 102_400}
ROWS = [
    Row("ppo", "mario/1-1", {300_000: 1_000, 1_000_000: 1_500}),
    # half more than chance earns on unseen levels: 0.82 (0.66 to 0.98, 200 episodes)
    Row("ppo", "procgen/bigfish", {3_014_656: 1.23}, episodes=200, settings=BIGFISH),
    Row("ppo", "ALE/Pong-v5", {1_500_000: -18}, settings=HOUR),
    Row("sac", "HalfCheetah-v5", {200_000: 4_000}, seeds=3, need=2, stop=True, reference=True),
    Row("ppo", "HalfCheetah-v5", {1_000_000: 1_500}, reference=True),
    Row("sac", "Hopper-v5", {200_000: 2_000}, seeds=3, need=2, stop=True, settings=GRAPH, reference=True),
    Row("sac", "dmc/cartpole-balance", {200_000: 900}, stop=True, settings=GRAPH, reference=True),
    Row("sac", "dmc/walker-walk", {200_000: 800}, stop=True, settings=GRAPH, reference=True),
]


class Note(zx.Callback):
    """Every evaluation in a file beside the run. Where a run goes on, some are made again: the later one counts."""

    def __init__(self, run: Path) -> None:
        self.file = run / "curve.jsonl"

    def evaluation_end(self, loop: zx.TrainingLoop, evaluation: Evaluation) -> None:
        with self.file.open("a") as file:
            trained = {"env_steps": loop.env_steps, "trained": loop.recent_mean("episode_return")}
            file.write(json.dumps(trained | evaluation.summary()) + "\n")


def curve(run: Path) -> list[list[float]]:
    """Steps, what evaluations reached there, and, where it was noted, the mean of the last 100 training episodes."""
    lines = (run / "curve.jsonl").read_text().splitlines() if (run / "curve.jsonl").is_file() else []
    found = {line["env_steps"]: line for line in map(json.loads, lines)}
    points = []
    for steps, line in sorted(found.items()):
        reached = next(line[name] for name in TOLD if name in line)
        points.append([steps, *(round(value, 2) for value in (reached, line.get("trained")) if value is not None)])
    return points


def note(row: Row, who: str, found: dict[str, Any]) -> None:
    """Into the file as it is now: other rows may be studied at the same time."""
    results = read_results(RESULTS)
    results.setdefault(row.key, {})[who] = found
    write_results(RESULTS, results)


def study(row: Row, seeds: list[int]) -> None:
    for seed in seeds:
        run = RUNS / f"{row.key.replace('/', '-').replace(' ', '-')}-{seed}"
        steps = max(row.marks)
        if (run / "checkpoints").is_dir():
            session = zx.Session.resume(run, [Note(run)])
        else:
            stop = row.marks[steps] if row.stop else None
            named = {"algorithm": row.algorithm, "env__name": row.env, "seed": seed, **row.settings}
            cfg = zx.config.load(**named, env_steps=steps, stop_return=stop)
            session = zx.Session(cfg, run, [Note(run)])
        result = session.run()
        found = {"env_steps": result["env_steps"], "seconds": result["seconds"], "curve": curve(run)}
        note(row, str(seed), found | {"final": zx.evaluate(run, row.episodes, seed + 1_000).summary()})


def refer(row: Row) -> None:
    """Stable-Baselines3 with the settings that its authors tuned for the task, for as many steps as our first seed."""
    requirements = ["torch==2.13.0", "stable-baselines3==2.9.2", "mujoco==3.17.0", "shimmy[dm-control]", "packaging"]
    steps = read_results(RESULTS).get(row.key, {}).get("0", {"env_steps": max(row.marks)})["env_steps"]
    work = {"algorithm": row.algorithm, "env": row.env, "env_steps": steps, "seed": 0}
    python = peer_python("sb3-worlds", requirements, constrained=False)
    note(row, "Stable-Baselines3", run_alone(python, HERE / "peers" / "sb3_worlds.py", json.dumps(work)))


def reached(row: Row, run: dict[str, Any]) -> dict[int, float]:
    """What the evaluation at each mark said, or the one before it."""
    return {
        mark: next((point[1] for point in reversed(run["curve"]) if point[0] <= mark), math.nan) for mark in row.marks
    }


def table(results: dict[str, Any]) -> str:
    lines = [
        "| algorithm | environment | step limit | target | return per seed | steps | minutes | Stable-Baselines3 |"
    ]
    lines += ["|---|---|---:|---:|---|---|---|---|"]
    for row in ROWS:
        found = results.get(row.key, {})
        own = [run for who, run in found.items() if who.isdigit()]
        peer = found.get("Stable-Baselines3")
        for mark, asked in row.marks.items() if own else ():
            values = ", ".join(f"{reached(row, run)[mark]:,.4g}" for run in own)
            other = "-" if peer is None else f"{peer['final']:,.0f}"
            minutes = ", ".join(f"{run['seconds'] / 60:.0f}" for run in own)
            name = f"| `{row.algorithm}` | {row.env} | {mark:,} | {asked:,} "
            taken = ", ".join(f"{min(mark, run['env_steps']):,}" for run in own)
            lines.append(f"{name}| {values} | {taken} | {minutes} | {other} |")
    return "\n".join(lines)


def draw(results: dict[str, Any]) -> None:
    from matplotlib.figure import Figure

    rows = [row for row in ROWS if row.key in results]
    if not rows:
        return
    across = min(3, len(rows))
    down = math.ceil(len(rows) / across)
    figure = Figure(figsize=(3.4 * across, 2.6 * down), layout="constrained")
    for place, row in enumerate(rows):
        axes = figure.add_subplot(down, across, place + 1)
        for who, run in results[row.key].items():
            steps, *told = zip(*run["curve"], strict=True)
            names = [f"seed {who}", f"seed {who}, training"] if who.isdigit() else [who]
            for values, name, style in zip(told, names, ("-", "--"), strict=False):
                axes.plot([n / 1_000 for n in steps], values, style, label=name, linewidth=1)
        for mark, asked in row.marks.items():
            axes.plot([0, mark / 1_000], [asked, asked], linestyle=":", color="0.4")
        axes.set_title(row.key, fontsize=9)
        axes.set_xlabel("environment steps (thousands)", fontsize=7)
        axes.tick_params(labelsize=7)
        axes.legend(fontsize=6)
    PICTURE.parent.mkdir(exist_ok=True)
    figure.savefig(PICTURE, dpi=90)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="only rows whose name contains all of these")
    parser.add_argument("--seeds", type=int, nargs="*", help="only these of each row")
    parser.add_argument("--reference", action="store_true", help="Stable-Baselines3 instead of our runs")
    parser.add_argument("--draw", action="store_true", help="run nothing")
    given = parser.parse_args()
    rows = [row for row in ROWS if all(word in row.key for word in given.words)]
    for row in () if given.draw else rows:
        if given.reference and row.reference:
            refer(row)
        elif not given.reference:
            study(row, [seed for seed in range(row.seeds) if given.seeds is None or seed in given.seeds])
    results = read_results(RESULTS)
    print(table(results))
    write_page(PAGE, "learned", table(results))
    draw(results)


if __name__ == "__main__":
    main()

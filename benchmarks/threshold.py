"""Training time to a target return, with each library's tuned settings.

    python benchmarks/threshold.py [--repeats 10] [--rows ppo-cartpole,sac-pendulum] [--peers sb3,sbx] [--quick]

zhixing uses its presets, Stable-Baselines3 and SBX use the settings of RL Baselines3 Zoo. All evaluate every 1,000
steps with 10 episodes; if these reach the target, 100 more episodes must confirm it. Evaluation time doesn't count.
Every library runs on one thread with seeds 0 to 9, and the order flips with every seed. A seed that doesn't reach the
target within its library's budget counts as infinite. Results are saved after each run, so an interrupted benchmark
continues.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common import HERE, machine_info, peer_python, read_results, run_alone, write_results
from comparison import order_of_round, parse_args, publish, results_table
from peers.sb3_threshold import REQUIREMENTS

RUNS = HERE / "results" / "threshold_runs.json"
TITLES = {"ours": "zhixing", "sb3": "Stable-Baselines3", "sbx": "SBX"}
ROWS: dict[str, dict[str, Any]] = {
    f"{algorithm}-{name}": {"algorithm": algorithm, "env": env, "threshold": threshold, "every": 1_000}
    for name, env, threshold, algorithms in (
        ("cartpole", "CartPole-v1", 475, ("ppo", "dqn", "a2c")),
        ("pendulum", "Pendulum-v1", -200, ("ppo", "sac", "td3", "ddpg")),
    )
    for algorithm in algorithms
}
NOT_SUPPORTED = {("a2c-cartpole", "sbx")}


def train_ours(work: Mapping[str, Any]) -> dict[str, Any]:
    import zhixing as zx

    with tempfile.TemporaryDirectory() as folder:
        result = zx.train(
            work["algorithm"],
            env=work["env"],
            out=f"{folder}/run",
            quiet=True,
            seed=work["seed"],
            num_threads=1,
            stop_return=work["threshold"],
            eval_every=work["every"],
            eval_episodes=10,
            tensorboard=False,
        )
    return {name: result[name] for name in ("reached", "seconds", "env_steps")} | {"version": zx.__version__}


def train(library: str, python: Path, work: Mapping[str, Any]) -> dict[str, Any]:
    """Train one seed in a new process."""
    if library == "ours":
        return run_alone(python, __file__, "--ours", json.dumps(work))
    return run_alone(python, HERE / "peers" / "sb3_threshold.py", json.dumps({**work, "library": library}))


def median_seconds(runs: Mapping[str, Any]) -> float:
    return statistics.median(run["seconds"] if run["reached"] else math.inf for run in runs.values())


def make_table(results: Mapping[str, Any]) -> str:
    """Format median times, the number of seeds that reached the target, and the best peer's time relative to ours."""
    rows = []
    for name, row in results["rows"].items():
        cells, medians = [f"{name.split('-')[0]}, {row['env']} to {row['threshold']}"], {}
        for library in TITLES:
            runs = row["who"].get(library)
            if not runs:
                cells.append("not supported" if (name, library) in NOT_SUPPORTED else "not measured")
                continue
            medians[library] = median_seconds(runs)
            time = f"{medians[library]:.1f}" if math.isfinite(medians[library]) else "not reached"
            cells.append(f"{time} ({sum(run['reached'] for run in runs.values())} of {len(runs)})")
        peers = [seconds for library, seconds in medians.items() if library != "ours"]
        ratio = min(peers) / medians["ours"] if peers and "ours" in medians else math.nan
        cells.append("" if math.isnan(ratio) else "no peer reached it" if math.isinf(ratio) else f"**{ratio:.2f}**")
        rows.append(cells)
    head = ["algorithm, environment, threshold", *(f"{title}, s" for title in TITLES.values()), "best peer / zhixing"]
    return results_table(results, head, rows, 1)


def main() -> None:
    if sys.argv[1:2] == ["--ours"]:
        print(json.dumps(train_ours(json.loads(sys.argv[2]))))
        return
    options = parse_args(__doc__, list(ROWS), repeats=10, quick_rows=("ppo-cartpole",), peers=list(REQUIREMENTS))
    pythons = {"ours": Path(sys.executable)}
    pythons |= {peer: peer_python(f"{peer}-zoo", REQUIREMENTS[peer], constrained=False) for peer in options.peers}
    saved: dict[str, Any] = {} if options.quick else read_results(RUNS)
    for name in options.rows:
        row = saved.setdefault(name, {**ROWS[name], "who": {}})
        for seed in range(options.repeats):
            for library in order_of_round(pythons, seed):
                runs = row["who"].setdefault(library, {})
                if str(seed) in runs or (name, library) in NOT_SUPPORTED:
                    continue
                runs[str(seed)] = train(library, pythons[library], {**ROWS[name], "seed": seed})
                print(f"{name} seed {seed}, {TITLES[library]}: {runs[str(seed)]}", flush=True)
                if not options.quick:
                    write_results(RUNS, saved)
    rows = {name: saved[name] for name in ROWS if name in saved}
    results = {"rows": rows, "repeats": options.repeats, "made": machine_info()}
    publish("threshold", results, make_table(results), options.quick)


if __name__ == "__main__":
    main()

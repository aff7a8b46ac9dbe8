"""Seconds of training from nothing to a good return, each library with its own tuned settings.

    python benchmarks/threshold.py [--repeats 10] [--rows ppo-cartpole,sac-pendulum] [--peers sb3,sbx] [--quick]

Ours are the presets, Stable-Baselines3's and SBX's those of RL Baselines3 Zoo. All are evaluated every 1,000 steps by
10 episodes; what reaches the threshold there must do so in 100 fresh ones. Evaluations are outside of the clock. One
thread each, seeds 0 to 9; who begins changes from seed to seed. A seed that doesn't arrive within its library's own
budget counts as never. Runs are kept after each, so that an interrupted study goes on.
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

from common import HERE, asked, made, made_line, peer_python, publish, read_results, run_alone, table, write_results
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
UNABLE = {("a2c-cartpole", "sbx")}  # it has none


def ours(work: dict[str, Any]) -> dict[str, Any]:
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
            eval_every_steps=work["every"],
            eval_episodes=10,
            tensorboard=False,
        )
    return {name: result[name] for name in ("reached", "seconds", "env_steps")} | {"version": zx.__version__}


def run(who: str, python: Path, work: dict[str, Any]) -> dict[str, Any]:
    if who == "ours":
        return run_alone(python, __file__, "--as", who, json.dumps(work))
    return run_alone(python, HERE / "peers" / "sb3_threshold.py", json.dumps({**work, "library": who}))


def median_seconds(runs: Mapping[str, Any]) -> float:
    return statistics.median(one["seconds"] if one["reached"] else math.inf for one in runs.values())


def tell(results: Mapping[str, Any]) -> str:
    """Medians over seeds; how many of them arrived; and how often ours fits into the best peer's time."""
    lines = []
    for name, row in results["rows"].items():
        line, medians = [f"{name.split('-')[0]}, {row['env']} to {row['threshold']}"], {}
        for who in TITLES:
            runs = row["who"].get(who)
            if not runs:
                line.append("not supported" if (name, who) in UNABLE else "not measured")
                continue
            medians[who] = median_seconds(runs)
            told = f"{medians[who]:.1f}" if math.isfinite(medians[who]) else "not reached"
            line.append(f"{told} ({sum(one['reached'] for one in runs.values())} of {len(runs)})")
        others = [seconds for who, seconds in medians.items() if who != "ours"]
        ratio = min(others) / medians["ours"] if others and "ours" in medians else math.nan
        lines.append(
            [*line, "" if math.isnan(ratio) else "no peer reached it" if math.isinf(ratio) else f"**{ratio:.2f}**"]
        )
    head = ["algorithm, environment, threshold", *(f"{title}, s" for title in TITLES.values()), "best peer / zhixing"]
    return "\n".join([table(head, lines, 1), "", made_line(results["repeats"], results["made"])])


def main() -> None:
    if sys.argv[1:2] == ["--as"]:
        print(json.dumps(ours(json.loads(sys.argv[3]))))
        return
    options = asked(__doc__, list(ROWS), repeats=10, quick_rows=("ppo-cartpole",), peers=list(REQUIREMENTS))
    pythons = {"ours": Path(sys.executable)}
    pythons |= {peer: peer_python(f"{peer}-zoo", REQUIREMENTS[peer], constrained=False) for peer in options.peers}
    kept: dict[str, Any] = {} if options.quick else read_results(RUNS)
    for name in options.rows:
        row = kept.setdefault(name, {**ROWS[name], "who": {}})
        for seed in range(options.repeats):
            for who in sorted(pythons, reverse=seed % 2 == 1):
                done = row["who"].setdefault(who, {})
                if str(seed) in done or (name, who) in UNABLE:
                    continue
                done[str(seed)] = run(who, pythons[who], {**ROWS[name], "seed": seed})
                print(f"{name} seed {seed}, {TITLES[who]}: {done[str(seed)]}", flush=True)
                if not options.quick:
                    write_results(RUNS, kept)
    results = {"rows": {name: kept[name] for name in ROWS if name in kept}, "repeats": options.repeats, "made": made()}
    publish("threshold", results, tell(results), options.quick)


if __name__ == "__main__":
    main()

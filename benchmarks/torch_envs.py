"""PPO on thousands of environments written in torch, compared with rejax, which compiles all of it into a JAX program.

    python benchmarks/torch_envs.py [--repeats 5] [--core 0]

Both libraries share one core and run in alternation. Steps are counted per second of CPU time, since on a busy machine
wall time depends on other processes. Settings are rejax's defaults except for the number of environments and half the
steps and epochs. The time before the measured steps, mostly compilation, is reported separately.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping
from typing import Any

from common import HERE, ROOT, cpu, peer_python, run_alone, table, write_page, write_results
from comparison import PAGE, order_of_round, ratio_cells, results_file
from peers import rejax_ppo

ROLLOUT = 4096 * 32
ROW: dict[str, Any] = {
    "title": "PPO, CartPole-v1: 4096 environments x 32 steps, 4 epochs, minibatches of 8192, two 64x64 silu networks",
    "algorithm": "ppo",
    "env": "CartPole-v1",
    "num_envs": 4096,
    "backend": "torch",
    "warmup_steps": ROLLOUT,
    "measured_steps": 2 * ROLLOUT,
    "hidden_sizes": [64, 64],
    "activation": "silu",
    "lr": 3e-4,
    "max_grad_norm": None,
    "gamma": 0.99,
    "rollout_steps": 32,
    "minibatch_size": 8192,
    "epochs": 4,
    "gae_lambda": 0.95,
    "clip_range": 0.2,
    "value_clip_range": 0.2,
    "value_coef": 0.5,
    "entropy_coef": 0.01,
}
OURS: dict[str, dict[str, Any]] = {"compile=true": {"compile": True}, "eager": {}}
Run = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--repeats", type=int, default=5, help="rounds (default 5)")
    parser.add_argument("--core", type=int, help="the core to use (default: the first that is allowed)")
    args = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):  # inherited by child processes
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0)) if args.core is None else args.core})
    python = peer_python("rejax", rejax_ppo.REQUIREMENTS, constrained=False)
    runs: dict[str, list[Run]] = {side: [] for side in ("rejax", *OURS)}
    with tempfile.TemporaryDirectory() as cache:
        os.environ["ZHIXING_CACHE_DIR"] = cache  # compiled graphs of the first round, reused in the others
        for number in range(args.repeats):
            for side in order_of_round(runs, number):
                argument = json.dumps({**ROW, **OURS.get(side, {}), "seed": number})
                interpreter, script = (python, "rejax_ppo.py") if side == "rejax" else (sys.executable, "ours.py")
                run = run_alone(interpreter, HERE / "peers" / script, argument)
                runs[side].append(run)
                rates = f"{rate(run):,.0f} steps per CPU second, {rate(run, 'seconds'):,.0f} per second"
                print(f"{number + 1}/{args.repeats} {side}: {rates}", flush=True)
    for side in OURS:
        for run, peer_run in zip(runs[side], runs["rejax"], strict=True):
            for count in ("env_steps", "optimizer_steps", "parameters"):
                assert run[count] == peer_run[count], f"{count}: {run[count]} in {side}, {peer_run[count]} in rejax"
    results = summarize(runs)
    file = results_file("torch_envs", quick=False)
    write_results(file, results)
    write_page(PAGE, "torch envs", make_table(results))
    print(f"\n{make_table(results)}\n\nwritten: {file.relative_to(ROOT)}, {PAGE.relative_to(ROOT)}")


def rate(run: Run, clock: str = "cpu_seconds") -> float:
    return run["env_steps"] / run[clock]


def summarize(runs: Mapping[str, list[Run]]) -> dict[str, Any]:
    sides: dict[str, Any] = {}
    for side, measured in runs.items():
        pairs = list(zip(measured, runs["rejax"], strict=True))
        ratios = [rate(run) / rate(peer_run) for run, peer_run in pairs]
        wall_ratios = [rate(run, "seconds") / rate(peer_run, "seconds") for run, peer_run in pairs]
        sides[side] = {
            "steps_per_second": round(statistics.median(map(rate, measured))),
            "ratio": round(statistics.median(ratios), 3),
            "ratio_min": round(min(ratios), 3),
            "ratio_max": round(max(ratios), 3),
            "wall_ratio": round(statistics.median(wall_ratios), 3),
            "seconds": [round(run["seconds"], 3) for run in measured],
            "cpu_seconds": [round(run["cpu_seconds"], 3) for run in measured],
            "compile_seconds": [round(run.get("compile_seconds", 0.0), 1) for run in measured],
        }
    return {
        "settings": ROW,
        "sides": sides,
        "repeats": len(runs["rejax"]),
        "parameters": runs["eager"][0]["parameters"],
        "versions": {**runs["rejax"][0]["versions"], **runs["eager"][0]["versions"]},
        "cpu": cpu(),
        "date": datetime.date.today().isoformat(),
    }


def make_table(results: Mapping[str, Any]) -> str:
    versions, rows = results["versions"], []
    for name, side in results["sides"].items():
        seconds = max(side["compile_seconds"])
        compilation = "-" if name == "eager" else f"{seconds:.0f} s" if seconds >= 1 else "cached"
        steps = f"{side['steps_per_second']:,}"
        if name == "rejax":
            rows.append([f"rejax {versions['rejax']}, JAX {versions['jax']}", steps, "1", "", "1", compilation])
        else:
            rows.append([f"zhixing, {name}", steps, *ratio_cells(side), f"{side['wall_ratio']:.2f}", compilation])
    head = ["library", "steps per CPU second", "ratio to rejax", "range over pairs", "wall-clock ratio", "compilation"]
    note = f"{results['cpu']}, one core, torch {versions['torch']}, {results['date']}."
    return f"{results['settings']['title']}.\n\n{table(head, rows, 1)}\n\nRounds: {results['repeats']}. {note}"


if __name__ == "__main__":
    main()

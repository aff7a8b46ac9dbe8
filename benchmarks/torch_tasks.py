"""PPO on thousands of environments written in torch, beside rejax, where the same is one compiled JAX program.

    python benchmarks/torch_tasks.py [--repeats 5] [--core 0]

Both sides have one core, the same one, and take turns. What is compared are steps per second of that core: on a machine
with others on it seconds of the wall clock tell how busy these were. Settings are rejax's defaults but for the number
of environments and half the steps and epochs. What takes place before the measured steps, compiling above all, isn't
counted but told.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import sys
import tempfile
from typing import Any

from common import HERE, ROOT, cpu, peer_python, run_alone, write_page, write_results
from peers import rejax_ppo

RESULTS = HERE / "results" / "torch_tasks.json"
PAGE = ROOT / "docs" / "benchmarks.md"
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
OURS: dict[str, dict[str, Any]] = {"compile=true": {"compile": True}, "eager": {}}  # compiled updates, and plain ones


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--repeats", type=int, default=5, help="rounds in which each side runs once (5)")
    parser.add_argument("--core", type=int, help="which core both sides have (the first allowed one)")
    options = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):  # what is started below inherits it
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0)) if options.core is None else options.core})
    python = peer_python("rejax", rejax_ppo.REQUIREMENTS, constrained=False)
    fresh = tempfile.TemporaryDirectory()
    os.environ["ZHIXING_CACHE_DIR"] = fresh.name  # the first round compiles, later ones find it there
    runs: dict[str, list[dict[str, Any]]] = {side: [] for side in ("rejax", *OURS)}
    for repeat in range(options.repeats):
        for side in sorted(runs, reverse=repeat % 2 == 1):
            row = {**ROW, **OURS.get(side, {}), "seed": repeat}
            script = "rejax_ppo.py" if side == "rejax" else "ours.py"
            own = python if side == "rejax" else sys.executable
            runs[side].append(run_alone(own, HERE / "peers" / script, json.dumps(row)))
            last = runs[side][-1]
            told = f"{rate(last):,.0f} steps/s of CPU time, {rate(last, 'seconds'):,.0f} of the wall clock"
            print(f"{repeat + 1}/{options.repeats} {side}: {told}", flush=True)
    for side in OURS:
        for mine, its in zip(runs[side], runs["rejax"], strict=True):
            for what in ("env_steps", "optimizer_steps", "parameters"):
                assert mine[what] == its[what], f"{what}: {mine[what]} in {side}, {its[what]} in rejax"
    found = summary(runs)
    write_results(RESULTS, found)
    write_page(PAGE, "torch tasks", table(found))
    print("\n" + table(found))


def rate(run: dict[str, Any], of: str = "cpu_seconds") -> float:
    return run["env_steps"] / run[of]


def summary(runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    sides: dict[str, Any] = {}
    for side, mine in runs.items():
        pairs = list(zip(mine, runs["rejax"], strict=True))
        ratios = [rate(ours) / rate(its) for ours, its in pairs]
        wall_ratios = [rate(ours, "seconds") / rate(its, "seconds") for ours, its in pairs]
        sides[side] = {
            "steps_per_second": round(statistics.median(map(rate, mine))),
            "ratio": round(statistics.median(ratios), 3),
            "ratio_min": round(min(ratios), 3),
            "ratio_max": round(max(ratios), 3),
            "wall_ratio": round(statistics.median(wall_ratios), 3),
            "seconds": [round(run["seconds"], 3) for run in mine],
            "cpu_seconds": [round(run["cpu_seconds"], 3) for run in mine],
            "compile_seconds": [round(run.get("compile_seconds", 0.0), 1) for run in mine],
        }
    first = {**runs["rejax"][0]["versions"], **runs["eager"][0]["versions"]}
    return {
        "settings": ROW,
        "sides": sides,
        "repeats": len(runs["rejax"]),
        "parameters": runs["eager"][0]["parameters"],
        "versions": first,
        "cpu": cpu(),
        "date": datetime.date.today().isoformat(),
    }


def table(found: dict[str, Any]) -> str:
    versions, sides = found["versions"], found["sides"]
    lines = [
        f"{found['settings']['title']}.",
        "",
        "| library | steps per CPU second | ratio to rejax | range over pairs | wall-clock ratio | compilation |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name, side in sides.items():
        seconds = max(side["compile_seconds"])
        compiled = "-" if name == "eager" else f"{seconds:.0f} s" if seconds >= 1 else "cached"
        title = f"rejax {versions['rejax']}, JAX {versions['jax']}" if name == "rejax" else f"zhixing, {name}"
        spread = f"{side['ratio_min']:.2f} .. {side['ratio_max']:.2f}" if name != "rejax" else ""
        ratio = f"**{side['ratio']:.2f}**" if name != "rejax" else "1"
        wall = f"{side['wall_ratio']:.2f}" if name != "rejax" else "1"
        lines.append(f"| {title} | {side['steps_per_second']:,} | {ratio} | {spread} | {wall} | {compiled} |")
    note = f"Rounds: {found['repeats']}. {found['cpu']}, one core, torch {versions['torch']}, {found['date']}."
    return "\n".join([*lines, "", note])


if __name__ == "__main__":
    main()

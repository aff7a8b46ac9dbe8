"""PPO with Ray workers in zhixing and in RLlib, as the ratio of environment steps per second. Used by `scaling.py`.

On CartPole the work is that of row `ppo-cartpole` in `fixed_work.py`, with the environments split between the workers.
With the environment that sleeps, each worker has one environment, and there is one update per 100 steps of each.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common import HERE, peer_python, run_alone, table
from comparison import compute_ratios, describe_pair, order_of_round, ratio_cells, rounded_median
from fixed_work import ROWS, check_same_work
from peers import rllib

Row = dict[str, Any]


def cartpole_row(workers: int) -> Row:
    return {**ROWS["ppo-cartpole"], "workers": workers}


def sleeping_row(workers: int) -> Row:
    changes = {"env": "sleep_env:SleepEnv", "num_envs": workers, "rollout_steps": 100, "epochs": 1}
    changes |= {"minibatch_size": 100 * workers, "warmup_steps": 200 * workers, "measured_steps": 3_000 * workers}
    return {**cartpole_row(workers), **changes}


ENVIRONMENTS = {"CartPole-v1": cartpole_row, "sleeps 1 ms per step": sleeping_row}


def compare_with_rllib(worker_counts: list[int], rounds: int, fraction: float = 1.0) -> dict[str, Any]:
    """Measure a fraction of each row. The order flips with every round. Return results by environment and workers."""
    pythons = {"ours": Path(sys.executable), "rllib": peer_python("rllib", rllib.REQUIREMENTS, rllib.CONSTRAINED)}
    # RLlib's workers must find sleep_env and comparison
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
    results = {}
    for env, make_row in ENVIRONMENTS.items():
        for workers in worker_counts:
            row = make_row(workers)
            iteration_steps = row["num_envs"] * row["rollout_steps"]
            row["measured_steps"] = max(1, round(fraction * row["measured_steps"] / iteration_steps)) * iteration_steps
            rates: dict[str, list[float]] = {side: [] for side in pythons}
            cpu_per_step: dict[str, list[float]] = {side: [] for side in pythons}
            for number in range(rounds):
                argument = json.dumps({**row, "seed": number})
                runs = {
                    side: run_alone(pythons[side], HERE / "peers" / f"{side}.py", argument)
                    for side in order_of_round(pythons, number)
                }
                check_same_work(env, "rllib", row, runs["ours"], runs["rllib"])
                for side, run in runs.items():
                    rates[side].append(run["env_steps"] / run["seconds"])
                    cpu_per_step[side].append(run["cpu_seconds"] / run["env_steps"])
                text = describe_pair(runs, "rllib", "env_steps")
                print(f"{env}, {workers} workers, {number + 1}/{rounds}: {text}", flush=True)
            medians = {side: statistics.median(values) for side, values in cpu_per_step.items()}
            results[f"{env}, {workers}"] = {
                "ours": rounded_median(rates["ours"]),
                "rllib": rounded_median(rates["rllib"]),
                **compute_ratios(rates["ours"], rates["rllib"]),
                "cpu_ratio": round(medians["rllib"] / medians["ours"], 3),
            }
    return results


def make_table(results: Mapping[str, Any]) -> str:
    rows = []
    for name, measured in results.items():
        rates = [f"{measured['ours']:,.0f}", f"{measured['rllib']:,.0f}"]
        rows.append([*name.rsplit(", ", 1), *rates, *ratio_cells(measured), f"{measured['cpu_ratio']:.2f}"])
    head = ["environment", "workers", "zhixing, steps/s", "RLlib, steps/s", "ratio", "range over pairs", "CPU ratio"]
    return table(head, rows, 1)

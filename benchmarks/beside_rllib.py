"""PPO with workers on Ray, here and in RLlib: environment steps per second as a ratio. A part of `scaling.py`.

On CartPole the work is that of the row `ppo-cartpole`, whose copies are shared among workers. On the task that sleeps
each worker has one copy, and there is one update per 100 steps of each.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

from common import HERE, compared, median_of, peer_python, run_alone, spread, table
from fixed_work import ROWS, check_same_work
from peers import rllib

Row = dict[str, Any]


def cartpole(workers: int) -> Row:
    return {**ROWS["ppo-cartpole"], "workers": workers}


def sleeping(workers: int) -> Row:
    own = {"num_envs": workers, "rollout_steps": 100, "minibatch_size": 100 * workers, "epochs": 1}
    steps = {"warmup_steps": 200 * workers, "measured_steps": 3_000 * workers}
    return {**cartpole(workers), **own, **steps, "env": "tasks:Sleeps"}


TASKS = {"CartPole-v1": cartpole, "sleeps 1 ms per step": sleeping}


def beside_rllib(counts: list[int], rounds: int, share: float = 1.0) -> dict[str, Any]:
    """By task and number of workers; runs alternate, and who begins changes from round to round."""
    pythons = {"ours": Path(sys.executable), "rllib": peer_python("rllib", rllib.REQUIREMENTS, rllib.CONSTRAINED)}
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))  # for our task
    found = {}
    for task, work in TASKS.items():
        for workers in counts:
            row = work(workers)
            size = row["num_envs"] * row["rollout_steps"]
            row["measured_steps"] = max(1, round(share * row["measured_steps"] / size)) * size
            rates: dict[str, list[float]] = {who: [] for who in pythons}
            spent: dict[str, list[float]] = {who: [] for who in pythons}
            for seed in range(rounds):
                told = json.dumps({**row, "seed": seed})
                order = sorted(pythons, reverse=seed % 2 == 1)
                runs = {who: run_alone(pythons[who], HERE / "peers" / f"{who}.py", told) for who in order}
                check_same_work(task, "rllib", row, runs["ours"], runs["rllib"])
                for who, run in runs.items():
                    rates[who].append(run["env_steps"] / run["seconds"])
                    spent[who].append(run["cpu_seconds"] / run["env_steps"])
                told = ", ".join(f"{who} {rates[who][-1]:,.0f} steps/s" for who in rates)
                told += f", ratio {rates['ours'][-1] / rates['rllib'][-1]:.2f}"
                told += f" (of CPU time {spent['rllib'][-1] / spent['ours'][-1]:.2f})"
                print(f"{task}, {workers} workers, {seed + 1}/{rounds}: {told}", flush=True)
            found[f"{task}, {workers}"] = {
                "ours": median_of(rates["ours"]),
                "rllib": median_of(rates["rllib"]),
                **compared(rates["ours"], rates["rllib"]),
                "cpu_ratio": round(statistics.median(spent["rllib"]) / statistics.median(spent["ours"]), 3),
            }
    return found


def beside_table(found: dict[str, Any]) -> str:
    rows = [
        [*name.rsplit(", ", 1), f"{one['ours']:,.0f}", f"{one['rllib']:,.0f}", *spread(one), f"{one['cpu_ratio']:.2f}"]
        for name, one in found.items()
    ]
    head = ["environment", "workers", "zhixing, steps/s", "RLlib, steps/s", "ratio", "range over pairs", "CPU ratio"]
    return table(head, rows, 1)

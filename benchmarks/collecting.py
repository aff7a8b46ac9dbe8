"""Steps per second of vector environments: zhixing's back ends compared with those of other libraries.

    python benchmarks/collecting.py [--repeats 5] [--rows cartpole-8,sleeping-8] [--quick]

All step the same environments with the same actions, except native ones (zhixing's and EnvPool's), which have their own
implementations. All may use every CPU. Rows whose package isn't installed are left out.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from common import peer_python, versions
from comparison import (
    Measurement,
    Side,
    compare_rows,
    compute_ratios,
    cpu_seconds,
    measure_rounds,
    parse_args,
    ratio_cells,
    results_table,
    rounded_median,
    run_script,
)

REQUIREMENTS = [
    "torch==2.13.0", "stable-baselines3==2.9.2", "gymnasium[mujoco]==1.4.0", "envpool==1.2.5", "mujoco==3.17.0",
    "ale-py==0.12.1", "opencv-python-headless",
]  # fmt: skip
# `module` is needed and installed by the extra `extra`; `envpool` is EnvPool's name of the environment, with options
ROWS: dict[str, dict[str, Any]] = {
    f"cartpole-{num}": {
        "title": f"CartPole-v1 x {num}",
        "env": "CartPole-v1",
        "num": num,
        "envpool": ("CartPole-v1", {}),
    }
    for num in (8, 64, 256)
}
ROWS |= {
    "halfcheetah-8": {
        "title": "HalfCheetah-v5 x 8",
        "env": "HalfCheetah-v5",
        "num": 8,
        "module": "mujoco",
        "extra": "mujoco",
        "envpool": ("HalfCheetah-v5", {}),
    },
    "pong-8": {
        "title": "ALE/Pong-v5 x 8, stacks of 4 grayscale frames",
        "env": "ALE/Pong-v5",
        "num": 8,
        "module": "ale_py",
        "extra": "atari",
        "envpool": ("Pong-v5", {"repeat_action_probability": 0.25}),
    },
    "sleeping-8": {
        "title": "an environment that sleeps 1 ms per step, x 8",
        "env": "sleep_env:SleepEnv",
        "num": 8,
    },
}
OURS = ("auto", "process", "serial")
ONE_PROCESS_PER_ENV = ("gymnasium-async", "sb3-subproc")
MAX_PROCESSES = 64  # each takes about 40 MB
TITLES = {
    **{name: f"zhixing, `{name}`" for name in OURS},
    "gymnasium-sync": "Gymnasium's SyncVectorEnv",
    "gymnasium-async": "Gymnasium's AsyncVectorEnv",
    "sb3-dummy": "SB3's DummyVecEnv",
    "sb3-subproc": "SB3's SubprocVecEnv",
    "envpool": "EnvPool",
}
RATES = ("steps_per_second", "steps_per_cpu_second")


# --- vector environments: each function returns one after its first reset, and what to store about it ----------------


def make_ours(row: Mapping[str, Any], backend: str) -> tuple[Any, dict[str, Any]]:
    from zhixing import envs

    env = envs.make_vector(row["env"], row["num"], backend)
    env.reset(seed=0)
    chosen = f"{env.backend}, {env.workers}" if env.backend in ("process", "mixed") else env.backend
    return env, {"chosen": chosen}


def make_gymnasium(row: Mapping[str, Any], kind: str) -> tuple[Any, dict[str, Any]]:
    from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

    from zhixing import envs

    make = {"sync": SyncVectorEnv, "async": AsyncVectorEnv}[kind]
    env = make([envs.RegisteredEnv(row["env"])] * row["num"], autoreset_mode=AutoresetMode.SAME_STEP)
    env.reset(seed=0)
    return env, versions("gymnasium")


def make_sb3(row: Mapping[str, Any], kind: str) -> tuple[Any, dict[str, Any]]:
    from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv

    from zhixing import envs

    env_fn = envs.RegisteredEnv(row["env"])
    env = {"dummy": DummyVecEnv, "subproc": SubprocVecEnv}[kind]([lambda: env_fn()] * row["num"])
    env.reset()
    return env, versions("stable-baselines3")


def make_envpool(row: Mapping[str, Any], kind: str) -> tuple[Any, dict[str, Any]]:
    import envpool

    name, options = row["envpool"]
    threads = min(row["num"], len(os.sched_getaffinity(0)))
    env = envpool.make_gymnasium(name, num_envs=row["num"], num_threads=threads, seed=0, **options)
    env.reset()
    return env, versions("envpool")


def setup(name: str, row: Mapping[str, Any]) -> Measurement:
    import numpy as np

    if name in OURS:
        env, info = make_ours(row, name)
    else:
        library, _, kind = name.partition("-")
        env, info = {"gymnasium": make_gymnasium, "sb3": make_sb3, "envpool": make_envpool}[library](row, kind)
    space = env.action_space
    space.seed(0)
    if name == "envpool" or name.startswith("sb3"):  # the action space of a single environment
        actions = [np.stack([space.sample() for _ in range(row["num"])]) for _ in range(64)]
        if name == "envpool" and actions[0].dtype == np.int64:
            actions = [batch.astype(np.int32) for batch in actions]
    else:
        actions = [space.sample() for _ in range(64)]

    def measure() -> dict[str, float]:
        steps, cpu_start, start = 0, cpu_seconds(), time.perf_counter()
        while (spent := time.perf_counter() - start) < row["seconds"]:
            env.step(actions[steps % 64])
            steps += 1
        done = steps * row["num"]
        return {"steps_per_second": done / spent, "steps_per_cpu_second": done / (cpu_seconds() - cpu_start)}

    return Measurement(measure, info)


# --- comparing -------------------------------------------------------------------------------------------------------


def make_sides(row: Mapping[str, Any], peer: Path) -> dict[str, Side]:
    """Return the vector environments that support a row, with their interpreters."""
    here = Path(sys.executable)
    pythons = dict.fromkeys((*OURS, "gymnasium-sync", "gymnasium-async"), here)
    pythons |= dict.fromkeys(("sb3-dummy", "sb3-subproc"), peer)
    if "envpool" in row:
        pythons["envpool"] = peer
    if row["num"] > MAX_PROCESSES:
        pythons = {name: python for name, python in pythons.items() if name not in ONE_PROCESS_PER_ENV}
    return {name: Side(python, name, row) for name, python in pythons.items()}


def compare(row: Mapping[str, Any], peer: Path, repeats: int) -> dict[str, Any]:
    info, runs = measure_rounds(__file__, make_sides(row, peer), repeats)
    rates, cpu_rates = ({name: [run[rate] for run in measured] for name, measured in runs.items()} for rate in RATES)
    sides: dict[str, Any] = {}
    for name in rates:
        sides[name] = {
            **info[name],
            "steps_per_second": round(rounded_median(rates[name])),
            "steps_per_cpu_second": round(rounded_median(cpu_rates[name])),
            "all": [round(rate) for rate in rates[name]],
        }
        if name not in OURS:
            sides[name] |= {ours: compute_ratios(rates[ours], rates[name]) for ours in ("auto", "process")}
            # CPU time of all processes: more reliable on a busy machine
            sides[name] |= {
                f"{ours}_cpu": compute_ratios(cpu_rates[ours], cpu_rates[name]) for ours in ("auto", "process")
            }
    if row["env"] == "sleep_env:SleepEnv":
        ideal = [row["num"] * rate for rate in rates["serial"]]
        sides["process"]["of_ideal"] = compute_ratios(rates["process"], ideal)
    return {"who": sides}


def make_table(results: Mapping[str, Any]) -> str:
    rows = []
    for name, row in results["rows"].items():
        work = ROWS[name]["title"]
        for side, measured in row["who"].items():
            title = TITLES[side]
            if side == "auto":
                title += f" (selected {measured['chosen']})"
            cells = [ratio_cells(measured[ours]) if ours in measured else ["", ""] for ours in ("auto", "process")]
            rows.append([work, title, f"{measured['steps_per_second']:,}", *cells[0], *cells[1]])
        if ideal := row["who"]["process"].get("of_ideal"):
            rows.append([work, "zhixing, `process` relative to N x `serial`", "", "", "", *ratio_cells(ideal)])
        for side in [side for side in TITLES if side not in row["who"]]:
            too_many = f"not run with more than {MAX_PROCESSES} processes"
            reason = too_many if side in ONE_PROCESS_PER_ENV else "not supported"
            rows.append([work, TITLES[side], reason, "", "", "", ""])
    head = ["environment", "library", "steps/s", "`auto`, ratio", "range", "`process`, ratio", "range"]
    notes = [f"Skipped: {reason}." for reason in results["left_out"].values()]
    return results_table(results, head, rows, 2, notes)


def main() -> None:
    options = parse_args(__doc__, list(ROWS), repeats=5, quick_rows=("cartpole-8", "sleeping-8"))
    left_out = {}
    for name in options.rows:
        module = ROWS[name].get("module")
        if module is not None and find_spec(module) is None:
            left_out[name] = f"{ROWS[name]['title']}, which requires `pip install 'zhixing[{ROWS[name]['extra']}]'`"
    options.rows = [name for name in options.rows if name not in left_out]
    seconds = 0.3 if options.quick else 1.0
    peer = peer_python("vectors", REQUIREMENTS)
    compare_rows(
        "collecting",
        options,
        lambda name: compare({**ROWS[name], "seconds": seconds}, peer, options.repeats),
        make_table,
        left_out=left_out,
    )


if __name__ == "__main__":
    run_script(main, setup)

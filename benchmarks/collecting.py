"""Steps per second of many copies of a task: our back ends and the vector environments of others, taking turns.

    python benchmarks/collecting.py [--repeats 5] [--rows cartpole-8,sleeping-8] [--quick]

All step the very same tasks on the same actions, except native ones (ours and EnvPool's), which are their own. All may
use every CPU. Rows whose package isn't installed beside us are left out. `--as WHO ROW` is one of those who take turns.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from common import (
    Party,
    answer,
    asked,
    asked_as,
    compared,
    cpu_seconds,
    made,
    made_line,
    median_of,
    peer_python,
    publish,
    spread,
    table,
    take_turns,
    versions,
)

REQUIREMENTS = [
    "torch==2.13.0", "stable-baselines3==2.9.2", "gymnasium[mujoco]==1.4.0", "envpool==1.2.5", "mujoco==3.17.0",
    "ale-py==0.12.1", "opencv-python-headless",
]  # fmt: skip
# `module` must be there, `extra` brings it; `envpool` is the task's name there, `actions` their type
ROWS: dict[str, dict[str, Any]] = {
    f"cartpole-{num}": {
        "title": f"CartPole-v1 x {num}",
        "env": "CartPole-v1",
        "num": num,
        "envpool": ("CartPole-v1", {}),
        "cheap": True,
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
    "sleeping-8": {"title": "an environment that sleeps 1 ms per step, x 8", "env": "tasks:Sleeps", "num": 8},
}
OURS = ("auto", "process", "serial")
PROCESS_EACH = ("gymnasium-async", "sb3-subproc")  # a process for each copy
MOST_PROCESSES = 64  # of which each takes some 40 MB
TITLES = {
    **{name: f"zhixing, `{name}`" for name in OURS},
    "gymnasium-sync": "Gymnasium's SyncVectorEnv",
    "gymnasium-async": "Gymnasium's AsyncVectorEnv",
    "sb3-dummy": "SB3's DummyVecEnv",
    "sb3-subproc": "SB3's SubprocVecEnv",
    "envpool": "EnvPool",
}


# --- those who take turns: an environment with `step(actions)`, and what is to be told of it ------------------------


def ours(row: Mapping[str, Any], backend: str) -> tuple[Any, dict[str, Any]]:
    from zhixing import envs

    env = envs.make_vector(row["env"], row["num"], backend)
    env.reset(seed=0)
    chosen = f"{env.backend}, {env.workers}" if env.backend in ("process", "mixed") else env.backend
    return env, {"chosen": chosen}


def gymnasium(row: Mapping[str, Any], kind: str) -> tuple[Any, dict[str, Any]]:
    from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

    from zhixing import envs

    make = {"sync": SyncVectorEnv, "async": AsyncVectorEnv}[kind]
    env = make([envs.RegisteredEnv(row["env"])] * row["num"], autoreset_mode=AutoresetMode.SAME_STEP)
    env.reset(seed=0)
    return env, versions("gymnasium")


def sb3(row: Mapping[str, Any], kind: str) -> tuple[Any, dict[str, Any]]:
    from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv

    from zhixing import envs

    task = envs.RegisteredEnv(row["env"])
    env = {"dummy": DummyVecEnv, "subproc": SubprocVecEnv}[kind]([lambda: task()] * row["num"])
    env.reset()
    return env, versions("stable-baselines3")


def envpool(row: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    import envpool

    name, options = row["envpool"]
    threads = min(row["num"], len(os.sched_getaffinity(0)))
    env = envpool.make_gymnasium(name, num_envs=row["num"], num_threads=threads, seed=0, **options)
    env.reset()
    return env, versions("envpool")


def ready(who: str, row: Mapping[str, Any]) -> tuple[Callable[[], dict[str, float]], dict[str, Any]]:
    import numpy as np

    library, _, kind = who.partition("-")
    makers: dict[str, Any] = {"gymnasium": gymnasium, "sb3": sb3}
    if library in makers:
        env, told = makers[library](row, kind)
    else:
        env, told = envpool(row) if who == "envpool" else ours(row, who)
    space = env.action_space
    if who == "envpool" or library == "sb3":  # the space of one environment
        space.seed(0)
        actions = [np.stack([space.sample() for _ in range(row["num"])]) for _ in range(64)]
        if who == "envpool" and actions[0].dtype == np.int64:
            actions = [batch.astype(np.int32) for batch in actions]
    else:
        space.seed(0)
        actions = [space.sample() for _ in range(64)]

    def measure() -> dict[str, float]:
        steps, before, start = 0, cpu_seconds(), time.perf_counter()
        while (spent := time.perf_counter() - start) < row["seconds"]:
            env.step(actions[steps % 64])
            steps += 1
        done = steps * row["num"]
        return {"steps_per_second": done / spent, "steps_per_cpu_second": done / (cpu_seconds() - before)}

    return measure, told


# --- comparing ---------------------------------------------------------------------------------------------------


def parties(row: Mapping[str, Any], peer: Path) -> dict[str, Path]:
    """Who can do a row, and by which interpreter."""
    here = Path(sys.executable)
    found = dict.fromkeys((*OURS, "gymnasium-sync", "gymnasium-async"), here)
    found |= dict.fromkeys(("sb3-dummy", "sb3-subproc"), peer)
    found |= {"envpool": peer} if "envpool" in row else {}
    return {who: python for who, python in found.items() if row["num"] <= MOST_PROCESSES or who not in PROCESS_EACH}


def compare(row: Mapping[str, Any], peer: Path, repeats: int) -> dict[str, Any]:
    with ExitStack() as stack:
        joined = {
            who: stack.enter_context(Party(python, __file__, who, row)) for who, python in parties(row, peer).items()
        }
        told = {who: party.told for who, party in joined.items()}
        runs = take_turns(joined, repeats)
    rates, thrift = (
        {who: [run[way] for run in its] for who, its in runs.items()}
        for way in ("steps_per_second", "steps_per_cpu_second")
    )
    found: dict[str, Any] = {}
    for who, its in rates.items():
        found[who] = {
            **told[who],
            "steps_per_second": round(median_of(its)),
            "steps_per_cpu_second": round(median_of(thrift[who])),
            "all": [round(rate) for rate in its],
        }
        if who not in OURS:
            found[who] |= {way: compared(rates[way], its) for way in ("auto", "process")}
            # of all processes together: on a busy machine this says more
            found[who] |= {f"{way}_cpu": compared(thrift[way], thrift[who]) for way in ("auto", "process")}
    ideal = [row["num"] * rate for rate in rates["serial"]]
    if row["env"] == "tasks:Sleeps":
        found["process"]["of_ideal"] = compared(rates["process"], ideal)
    return {"title": row["title"], "who": found}


def tell(results: Mapping[str, Any]) -> str:
    lines = []
    for row in results["rows"].values():
        for who, found in row["who"].items():
            title = TITLES[who]
            if "chosen" in found and who == "auto":
                title += f" (selected {found['chosen']})"
            cells = [spread(found[way]) if way in found else ["", ""] for way in ("auto", "process")]
            lines.append([row["title"], title, f"{found['steps_per_second']:,}", *cells[0], *cells[1]])
        ideal = row["who"]["process"].get("of_ideal")
        if ideal:
            lines.append([row["title"], "zhixing, `process` relative to N x `serial`", "", "", "", *spread(ideal)])
        for who in [who for who in TITLES if who not in row["who"]]:
            why = f"not run with more than {MOST_PROCESSES} processes" if who in PROCESS_EACH else "not supported"
            lines.append([row["title"], TITLES[who], why, "", "", "", ""])
    head = ["environment", "library", "steps/s", "`auto`, ratio", "range", "`process`, ratio", "range"]
    notes = [f"Skipped: {text}." for text in results["left_out"].values()]
    return "\n".join([table(head, lines, 2), "", *notes, made_line(results["repeats"], results["made"])])


def main() -> None:
    options = asked(__doc__, list(ROWS), repeats=5, quick_rows=("cartpole-8", "sleeping-8"))
    rows, left_out = {}, {}
    for name in options.rows:
        module = ROWS[name].get("module")
        if module is None or find_spec(module) is not None:
            rows[name] = {**ROWS[name], "seconds": 0.3 if options.quick else 1.0}
        else:
            left_out[name] = f"{ROWS[name]['title']}, which requires `pip install 'zhixing[{ROWS[name]['extra']}]'`"
    peer = peer_python("vectors", REQUIREMENTS)
    found = {}
    for name, row in rows.items():
        found[name] = compare(row, peer, options.repeats)
        for who, one in found[name]["who"].items():
            print(
                f"{name}: {who} {one['steps_per_second']:,} steps/s, {one['steps_per_cpu_second']:,} per s of the CPU"
            )
    results = {"rows": found, "left_out": left_out, "repeats": options.repeats, "made": made()}
    publish("collecting", results, tell(results), options.quick)


if __name__ == "__main__":
    if (call := asked_as()) is not None:
        answer(lambda: ready(*call))
    else:
        main()

"""Steps per second of collecting in real worlds, here and in Gymnasium's AsyncVectorEnv, and bytes of a replay.

    python benchmarks/worlds_speed.py [--pairs 4] [--seconds 2] [--rows ALE/Pong-v5,HalfCheetah-v5]

Both run the very same tasks behind the same wrappers, on the same actions; they take turns, and a ratio is that of
neighbours. Replays hold 100 000 steps of 84 x 84 pictures in stacks of 4: ours is filled and its arrays counted, of
Stable-Baselines3's the arrays that it is known to allocate are added up, with and without `optimize_memory_usage`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import AsyncVectorEnv, AutoresetMode

from zhixing import UserError, envs
from zhixing.buffers import Buffer, NStep, Uniform
from zhixing.core.batch import Batch
from zhixing.core.spaces import Spaces

RESULTS = Path(__file__).resolve().parent / "results" / "worlds_speed.json"
# task, copies, our back ends; the first is what presets choose
ROWS: dict[str, tuple[int, tuple[str, ...]]] = {
    "ALE/Pong-v5": (8, ("process", "native")),
    "HalfCheetah-v5": (8, ("process",)),
    "mario/1-1": (4, ("process",)),
}
STEPS, STACK, SIDE, EPISODE = 100_000, 4, 84, 1_000


def rate(env: Any, actions: Any, seconds: float) -> float:
    """Steps per second over all copies."""
    steps, start = 0, time.perf_counter()
    while (spent := time.perf_counter() - start) < seconds:
        env.step(actions[steps % len(actions)])
        steps += 1
    return steps * env.num_envs / spent


def compare(name: str, num: int, backends: tuple[str, ...], pairs: int, seconds: float) -> dict[str, Any]:
    task = envs.RegisteredEnv(name)
    sides: dict[str, Any] = {"gymnasium": AsyncVectorEnv([task] * num, autoreset_mode=AutoresetMode.SAME_STEP)}
    for backend in backends:
        sides[backend] = envs.make_vector(name, num, backend)
    space = sides[backends[0]].action_space
    space.seed(0)
    actions = [space.sample() for _ in range(1_000)]
    rates: dict[str, list[float]] = {side: [] for side in sides}
    for env in sides.values():
        env.reset(seed=0)
        rate(env, actions, seconds / 4)
    for _ in range(pairs):
        for side, env in sides.items():
            rates[side].append(rate(env, actions, seconds))
    for env in sides.values():
        env.close()
    peer = rates["gymnasium"]
    row: dict[str, Any] = {"task": name, "copies": num, "gymnasium": summary(peer)}
    for backend in backends:
        ratios = [mine / its for mine, its in zip(rates[backend], peer, strict=True)]
        row[backend] = {**summary(rates[backend]), "ratio": summary(ratios, 2)}
    return row


def summary(values: list[float], digits: int = 0) -> dict[str, float]:
    parts: dict[str, Callable[[list[float]], float]] = {"median": statistics.median, "least": min, "most": max}
    return {name: round(of(values), digits) for name, of in parts.items()}


def replay_bytes(num: int = 8) -> dict[str, Any]:
    spaces = Spaces(Box(0, 255, (STACK, SIDE, SIDE), np.uint8), Discrete(6))
    buffer = Buffer(spaces.fields(), STEPS, num, sampler=Uniform(), view=NStep(1, 0.99), frame_stack=STACK)
    rng = np.random.default_rng(0)
    frames = rng.integers(0, 256, (64, num, SIDE, SIDE), np.uint8)
    no = np.zeros(num, bool)
    stack = np.repeat(frames[0][:, None], STACK, 1)
    for step in range(STEPS // num):
        after = np.concatenate([stack[:, 1:], frames[step % 64][:, None]], 1)
        over = no | ((step + 1) % EPISODE == 0)
        batch = {"obs": stack, "action": no.astype(np.int64), "reward": no.astype(np.float32)}
        buffer.add(Batch(**batch, terminated=over, truncated=no, next_obs=after))
        stack = np.repeat(frames[step % 64][:, None], STACK, 1) if over[0] else after
    ours = arrays_in(buffer.ring, set())
    observations = STEPS * STACK * SIDE * SIDE
    further = STEPS * (8 + 4 + 4 + 4)  # actions as int64; rewards, dones and timeouts as float32
    return {
        "steps": STEPS,
        "ours": ours,
        "sb3": 2 * observations + further,
        "sb3_optimized": observations + further,
        "ratio": round((2 * observations + further) / ours, 2),
        "ratio_optimized": round((observations + further) / ours, 2),
    }


def arrays_in(thing: Any, seen: set[int]) -> int:
    """Bytes of all arrays and tensors that a thing holds, each counted once."""
    if id(thing) in seen:
        return 0
    seen.add(id(thing))
    if hasattr(thing, "nbytes"):
        where = thing.__array_interface__["data"][0] if isinstance(thing, np.ndarray) else thing.data_ptr()
        if where in seen:
            return 0
        seen.add(where)
        return int(thing.nbytes)
    if isinstance(thing, dict):
        return sum(arrays_in(part, seen) for part in thing.values())
    if isinstance(thing, (list, tuple)):
        return sum(arrays_in(part, seen) for part in thing)
    return sum(arrays_in(part, seen) for part in vars(thing).values()) if hasattr(thing, "__dict__") else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--rows", default=",".join(ROWS))
    chosen = parser.parse_args()
    rows = []
    for name in chosen.rows.split(","):
        try:
            rows.append(compare(name, *ROWS[name], chosen.pairs, chosen.seconds))
            print(json.dumps(rows[-1]), flush=True)
        except UserError as error:
            print(f"left out: {error}")
    replay = replay_bytes()
    print(json.dumps(replay))
    told = {
        "date": datetime.date.today().isoformat(),
        "machine": f"{platform.machine()}, {len(os.sched_getaffinity(0))} CPUs, load {os.getloadavg()[0]:.1f}",
        "versions": {name: version(name) for name in ("gymnasium", "numpy")},
        "collection": rows,
        "replay": replay,
    }
    RESULTS.write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

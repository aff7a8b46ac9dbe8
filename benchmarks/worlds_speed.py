"""Collecting from games and simulators, compared with Gymnasium's AsyncVectorEnv, and the memory of replay buffers.

    python benchmarks/worlds_speed.py [--pairs 4] [--seconds 2] [--rows ALE/Pong-v5,HalfCheetah-v5]

Both use the same environments, wrappers and actions. Measurements alternate, and ratios are those of neighboring
measurements. Replay buffers hold 100,000 steps with stacks of four 84 x 84 images: zhixing's is filled and measured,
for Stable-Baselines3's the arrays that it allocates are added up, with and without `optimize_memory_usage`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import time
from typing import Any

import numpy as np
from common import HERE, versions, write_results
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import AsyncVectorEnv, AutoresetMode

from zhixing import UserError, envs
from zhixing.buffers import Buffer, NStep, Uniform
from zhixing.core.batch import Batch
from zhixing.core.spaces import Spaces

RESULTS = HERE / "results" / "worlds_speed.json"
# environment, number, zhixing's back ends; the first is that of the presets
ROWS: dict[str, tuple[int, tuple[str, ...]]] = {
    "ALE/Pong-v5": (8, ("process", "native")),
    "HalfCheetah-v5": (8, ("process",)),
    "mario/1-1": (4, ("process",)),
}
STEPS, STACK, SIZE, EPISODE = 100_000, 4, 84, 1_000


def steps_per_second(env: Any, actions: Any, seconds: float) -> float:
    """Return the rate over all environments."""
    steps, start = 0, time.perf_counter()
    while (spent := time.perf_counter() - start) < seconds:
        env.step(actions[steps % len(actions)])
        steps += 1
    return steps * env.num_envs / spent


def compare(name: str, num: int, backends: tuple[str, ...], pairs: int, seconds: float) -> dict[str, Any]:
    env_fn = envs.RegisteredEnv(name)
    sides: dict[str, Any] = {"gymnasium": AsyncVectorEnv([env_fn] * num, autoreset_mode=AutoresetMode.SAME_STEP)}
    for backend in backends:
        sides[backend] = envs.make_vector(name, num, backend)
    space = sides[backends[0]].action_space
    space.seed(0)
    actions = [space.sample() for _ in range(1_000)]
    for env in sides.values():
        env.reset(seed=0)
        steps_per_second(env, actions, seconds / 4)
    rates: dict[str, list[float]] = {side: [] for side in sides}
    for _ in range(pairs):
        for side, env in sides.items():
            rates[side].append(steps_per_second(env, actions, seconds))
    for env in sides.values():
        env.close()
    peer = rates["gymnasium"]
    row: dict[str, Any] = {"task": name, "copies": num, "gymnasium": summarize(peer)}
    for backend in backends:
        ratios = [ours / theirs for ours, theirs in zip(rates[backend], peer, strict=True)]
        row[backend] = {**summarize(rates[backend]), "ratio": summarize(ratios, 2)}
    return row


def summarize(values: list[float], digits: int = 0) -> dict[str, float]:
    functions = {"median": statistics.median, "least": min, "most": max}
    return {name: round(function(values), digits) for name, function in functions.items()}


def measure_replay(num: int = 8) -> dict[str, Any]:
    spaces = Spaces(Box(0, 255, (STACK, SIZE, SIZE), np.uint8), Discrete(6))
    buffer = Buffer(spaces.fields(), STEPS, num, sampler=Uniform(), view=NStep(1, 0.99), frame_stack=STACK)
    rng = np.random.default_rng(0)
    frames = rng.integers(0, 256, (64, num, SIZE, SIZE), np.uint8)
    zeros = np.zeros(num, bool)
    stack = np.repeat(frames[0][:, None], STACK, 1)
    for step in range(STEPS // num):
        next_stack = np.concatenate([stack[:, 1:], frames[step % 64][:, None]], 1)
        terminated = zeros | ((step + 1) % EPISODE == 0)
        fields = {"obs": stack, "action": zeros.astype(np.int64), "reward": zeros.astype(np.float32)}
        buffer.add(Batch(**fields, terminated=terminated, truncated=zeros, next_obs=next_stack))
        stack = np.repeat(frames[step % 64][:, None], STACK, 1) if terminated[0] else next_stack
    ours = bytes_of_arrays(buffer.ring, set())
    observations = STEPS * STACK * SIZE * SIZE
    other_fields = STEPS * (8 + 4 + 4 + 4)  # actions as int64; rewards, dones and timeouts as float32
    return {
        "steps": STEPS,
        "ours": ours,
        "sb3": 2 * observations + other_fields,
        "sb3_optimized": observations + other_fields,
        "ratio": round((2 * observations + other_fields) / ours, 2),
        "ratio_optimized": round((observations + other_fields) / ours, 2),
    }


def bytes_of_arrays(part: Any, seen: set[int]) -> int:
    """Return the size of all arrays and tensors in an object, each counted once."""
    if id(part) in seen:
        return 0
    seen.add(id(part))
    if hasattr(part, "nbytes"):
        address = part.__array_interface__["data"][0] if isinstance(part, np.ndarray) else part.data_ptr()
        if address in seen:
            return 0
        seen.add(address)
        return int(part.nbytes)
    if isinstance(part, dict):
        return sum(bytes_of_arrays(value, seen) for value in part.values())
    if isinstance(part, (list, tuple)):
        return sum(bytes_of_arrays(value, seen) for value in part)
    return sum(bytes_of_arrays(value, seen) for value in vars(part).values()) if hasattr(part, "__dict__") else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=4, help="measurements of each vector environment")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement")
    parser.add_argument("--rows", default=",".join(ROWS), help="comma-separated (default all)")
    args = parser.parse_args()
    rows = []
    for name in args.rows.split(","):
        try:
            rows.append(compare(name, *ROWS[name], args.pairs, args.seconds))
            print(json.dumps(rows[-1]), flush=True)
        except UserError as error:
            print(f"skipped: {error}")
    replay = measure_replay()
    print(json.dumps(replay))
    results = {
        "date": datetime.date.today().isoformat(),
        "machine": f"{platform.machine()}, {len(os.sched_getaffinity(0))} CPUs, load {os.getloadavg()[0]:.1f}",
        "versions": versions("gymnasium", "numpy"),
        "collection": rows,
        "replay": replay,
    }
    write_results(RESULTS, results, indent=2)


if __name__ == "__main__":
    main()

"""Replay buffers: inserts and samples per second and memory, compared with other libraries.

    python benchmarks/replay.py [--repeats 5] [--rows vector-uniform,frames-uniform] [--quick]

All buffers get the same steps, one at a time or in blocks, as training loops insert them; libraries that don't insert
blocks get their steps one by one. Once the buffer is full, 256 transitions are sampled at a time, and a prioritized
buffer gets new priorities for them. Inserting and sampling in alternation, as off-policy training does, is measured
separately, because a buffer may defer work from one to the other. Rates are per second of CPU time on one thread.
Memory is the growth of the process until the buffer is full.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from common import peer_python, versions
from comparison import (
    Measurement,
    Side,
    compare_rows,
    compute_ratios,
    measure_rounds,
    parse_args,
    ratio_cells,
    resident_bytes,
    results_table,
    rounded_median,
    run_script,
)
from peers import sb3, tianshou

# steps are inserted for `num` environments, `block` at a time
VECTOR: dict[str, Any] = {"obs": [17], "dtype": "float32", "num": 1, "block": 1, "capacity": 100_000}
BLOCKS: dict[str, Any] = {**VECTOR, "num": 8, "block": 25}
FRAMES: dict[str, Any] = {"obs": [4, 84, 84], "dtype": "uint8", "num": 1, "block": 1, "capacity": 20_000}
ROWS: dict[str, dict[str, Any]] = {
    "vector-uniform": {"title": "17 floats, uniform", **VECTOR},
    "vector-prioritized": {"title": "17 floats, prioritized", **VECTOR, "prioritized": True},
    "blocks-uniform": {"title": "17 floats, blocks of 25 steps x 8, uniform", **BLOCKS},
    "blocks-prioritized": {"title": "17 floats, blocks of 25 steps x 8, prioritized", **BLOCKS, "prioritized": True},
    "frames-uniform": {"title": "4 frames of 84 x 84, uniform", **FRAMES},
    "frames-prioritized": {"title": "4 frames of 84 x 84, prioritized", **FRAMES, "prioritized": True},
}
BATCH, EPISODE, ALPHA, BETA = 256, 200, 0.6, 0.4
OPERATIONS = {"insert": "inserted/s", "sample": "sampled/s", "both": "insert + sample/s"}
TITLES = {"ours": "zhixing", "sb3": "Stable-Baselines3", "tianshou": "Tianshou", "cpprb": "cpprb"}
CPPRB = ["cpprb==11.0.0"]
PRIORITIES = np.random.default_rng(1).random((16, BATCH)).astype(np.float32)


class Replay(NamedTuple):
    add: Callable[[int], None]  # inserts block i of the stream
    sample: Callable[[int], None]  # samples, and sets priorities i


def make_steps(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the steps of two episodes, which are inserted repeatedly. Stacks start with a repeated frame."""
    rng = np.random.default_rng(0)
    num, shape, dtype = row["num"], tuple(row["obs"]), np.dtype(row["dtype"])
    images = dtype == np.uint8
    steps = []
    for _ in range(2):
        frame = rng.integers(0, 256, (EPISODE + 1, num, *shape[-2:])).astype(dtype) if images else None
        obs = rng.normal(size=(EPISODE + 1, num, *shape)).astype(dtype) if frame is None else None
        for t in range(EPISODE + 1):
            if frame is None:
                assert obs is not None
                current = obs[t]
            else:
                current = np.stack([frame[max(0, t - back)] for back in range(shape[0] - 1, -1, -1)], 1)
            if t:
                steps[-1]["next_obs"] = current
            if t < EPISODE:
                flags = {"terminated": np.full(num, t == EPISODE - 1), "truncated": np.zeros(num, bool)}
                action, reward = rng.integers(0, 6, num), rng.normal(size=num).astype(np.float32)
                steps.append({"obs": current, "action": action, "reward": reward, **flags})
    return steps


def split_blocks(row: Mapping[str, Any], steps: list[Any]) -> list[list[Any]]:
    size = row["block"]
    return [steps[first : first + size] for first in range(0, len(steps), size)]


# --- libraries -------------------------------------------------------------------------------------------------------


def make_box(row: Mapping[str, Any]) -> Any:
    from gymnasium.spaces import Box

    shape = tuple(row["obs"])
    return Box(0, 255, shape, np.uint8) if row["dtype"] == "uint8" else Box(-9.0, 9.0, shape, np.float32)


def make_ours(row: Mapping[str, Any], capacity: int) -> Replay:
    import torch
    from gymnasium.spaces import Discrete

    from zhixing import Batch
    from zhixing.buffers import Buffer, NStep, Prioritized, Uniform
    from zhixing.core.spaces import Spaces

    sampler = Prioritized(ALPHA, BETA, BETA) if row.get("prioritized") else Uniform()
    fields = Spaces(make_box(row), Discrete(6)).fields()
    stack = row["obs"][0] if row["dtype"] == "uint8" else 1
    buffer = Buffer(fields, capacity, row["num"], sampler=sampler, view=NStep(1, 0.99), frame_stack=stack)
    steps, rng = make_steps(row), np.random.default_rng(0)
    if row["block"] > 1:
        blocks = split_blocks(row, steps)
        steps = [{name: np.stack([step[name] for step in block]) for name in block[0]} for block in blocks]
    priorities = torch.from_numpy(PRIORITIES)

    def add(t: int) -> None:
        buffer.add(Batch(**steps[t % len(steps)]))

    def sample(i: int) -> None:
        batch = buffer.sample(BATCH, rng)
        buffer.set_priority(batch.index, priorities[i % 16])

    return Replay(add, sample)


def make_sb3(row: Mapping[str, Any], capacity: int) -> Replay:
    from gymnasium.spaces import Discrete
    from stable_baselines3.common.buffers import ReplayBuffer

    images = row["dtype"] == "uint8"
    # storing observations once excludes its handling of time limits
    options = {"optimize_memory_usage": images, "handle_timeout_termination": not images}
    buffer = ReplayBuffer(capacity, make_box(row), Discrete(6), "cpu", row["num"], **options)
    infos: list[dict] = [{} for _ in range(row["num"])]
    steps = [
        (step["obs"], step["next_obs"], step["action"], step["reward"], step["terminated"], infos)
        for step in make_steps(row)
    ]
    blocks = split_blocks(row, steps)

    def add(t: int) -> None:
        for step in blocks[t % len(blocks)]:
            buffer.add(*step)

    return Replay(add, lambda i: buffer.sample(BATCH))


def make_tianshou(row: Mapping[str, Any], capacity: int) -> Replay:
    from tianshou.data import (
        Batch,
        PrioritizedReplayBuffer,
        PrioritizedVectorReplayBuffer,
        ReplayBuffer,
        VectorReplayBuffer,
    )

    prioritized = row.get("prioritized", False)
    options: dict[str, Any] = {"alpha": ALPHA, "beta": BETA} if prioritized else {}
    if row["dtype"] == "uint8":  # as in its Atari examples
        options |= {"stack_num": 4, "ignore_obs_next": True, "save_only_last_obs": True}
    if row["num"] > 1:
        kind = PrioritizedVectorReplayBuffer if prioritized else VectorReplayBuffer
        buffer = kind(capacity, row["num"], **options)
    else:
        buffer = (PrioritizedReplayBuffer if prioritized else ReplayBuffer)(capacity, **options)
    names = {"obs": "obs", "action": "act", "reward": "rew", "next_obs": "obs_next"}
    steps = [
        {names.get(name, name): array if row["num"] > 1 else array[0] for name, array in step.items()}
        for step in make_steps(row)
    ]
    blocks = split_blocks(row, steps)

    def add(t: int) -> None:
        for step in blocks[t % len(blocks)]:
            buffer.add(Batch(**step))

    def sample(i: int) -> None:
        _, index = buffer.sample(BATCH)
        if prioritized:
            buffer.update_weight(index, PRIORITIES[i % 16])

    return Replay(add, sample)


def make_cpprb(row: Mapping[str, Any], capacity: int) -> Replay:
    import cpprb

    images, prioritized, num = row["dtype"] == "uint8", row.get("prioritized", False), row["num"]
    steps = make_steps(row)
    if images:  # the frames of a stack must be the last dimension
        for step in steps:
            for name in ("obs", "next_obs"):
                step[name] = np.ascontiguousarray(step[name].transpose(0, 2, 3, 1))
    obs = {"shape": steps[0]["obs"].shape[1:], "dtype": np.dtype(row["dtype"])}
    fields: dict[str, Any] = {"obs": obs, "act": {"dtype": np.int64}, "rew": {}, "done": {}}
    options: dict[str, Any] = {"alpha": ALPHA} if prioritized else {}
    if num == 1:
        options["next_of"] = "obs"  # with one environment, next observations aren't stored twice
    else:
        fields["next_obs"] = obs
    if images:
        options["stack_compress"] = "obs"
    buffer = (cpprb.PrioritizedReplayBuffer if prioritized else cpprb.ReplayBuffer)(capacity, fields, **options)
    names = {"obs": "obs", "action": "act", "reward": "rew", "next_obs": "next_obs", "terminated": "done"}
    blocks = [
        {theirs: np.concatenate([step[ours] for step in block]) for ours, theirs in names.items()}
        for block in split_blocks(row, steps)
    ]

    def add(t: int) -> None:
        block = blocks[t % len(blocks)]
        buffer.add(**block)
        if block["done"][-1]:
            buffer.on_episode_end()

    def sample(i: int) -> None:
        if prioritized:
            batch = buffer.sample(BATCH, BETA)
            buffer.update_priorities(batch["indexes"], PRIORITIES[i % 16])
        else:
            buffer.sample(BATCH)

    return Replay(add, sample)


LIBRARIES: dict[str, tuple[Callable[[Mapping[str, Any], int], Replay], str]] = {
    "ours": (make_ours, "numpy"),
    "sb3": (make_sb3, "stable-baselines3"),
    "tianshou": (make_tianshou, "tianshou"),
    "cpprb": (make_cpprb, "cpprb"),
}


# --- measuring -------------------------------------------------------------------------------------------------------


def calls_per_second(function: Callable[[int], None], seconds: float) -> float:
    """Call `function(i)` for some seconds of CPU time. Return the calls per second."""
    done, start = 0, time.process_time()
    while (spent := time.process_time() - start) < seconds:
        for i in range(done, done + 50):
            function(i)
        done += 50
    return done / spent


def setup(name: str, row: Mapping[str, Any]) -> Measurement:
    make, package = LIBRARIES[name]
    small = make(row, 1000)  # imports and caches of the first use aren't memory of the buffer
    per_add = row["num"] * row["block"]
    for t in range(1000 // per_add):
        small.add(t)
    small.sample(0)
    del small
    before = resident_bytes()
    replay = make(row, row["capacity"])
    for t in range(row["capacity"] // per_add):
        replay.add(t)
    replay.sample(0)
    bytes_per_step = (resident_bytes() - before) / row["capacity"]
    next_block = row["capacity"] // per_add

    def measure() -> dict[str, float]:
        def add(i: int) -> None:
            nonlocal next_block
            replay.add(next_block)  # continue the stream, whatever i is
            next_block += 1

        def both(i: int) -> None:
            add(i)
            replay.sample(i)

        inserts, samples, pairs = (calls_per_second(f, row["seconds"]) for f in (add, replay.sample, both))
        return {"insert": inserts * per_add, "sample": samples * BATCH, "both": pairs}

    return Measurement(measure, {"megabytes_per_million": round(bytes_per_step), **versions(package)})


# --- comparing -------------------------------------------------------------------------------------------------------


def library_pythons() -> dict[str, Path]:
    return {
        "ours": Path(sys.executable),
        "sb3": peer_python("sb3", sb3.REQUIREMENTS),
        "tianshou": peer_python("tianshou", tianshou.REQUIREMENTS, tianshou.CONSTRAINED),
        "cpprb": peer_python("cpprb", CPPRB),
    }


def compare(row: Mapping[str, Any], pythons: Mapping[str, Path], repeats: int) -> dict[str, Any]:
    sides = {name: Side(python, name, row) for name, python in pythons.items()}
    if row.get("prioritized"):
        del sides["sb3"]  # has no prioritized replay
    info, runs = measure_rounds(__file__, sides, repeats)
    rates = {name: {op: [run[op] for run in measured] for op in OPERATIONS} for name, measured in runs.items()}
    libraries: dict[str, Any] = {}
    for name in rates:
        medians = {f"{op}_per_second": round(rounded_median(rates[name][op])) for op in OPERATIONS}
        libraries[name] = {**info[name], **medians}
        if name != "ours":
            libraries[name] |= {op: compute_ratios(rates["ours"][op], rates[name][op]) for op in OPERATIONS}
    return {"who": libraries, "naive_megabytes": naive_bytes(row)}


def naive_bytes(row: Mapping[str, Any]) -> int:
    """Return the bytes of a transition with two observations, action, reward and two flags, nothing shared."""
    return 2 * int(np.prod(row["obs"])) * np.dtype(row["dtype"]).itemsize + 8 + 4 + 2


def make_table(results: Mapping[str, Any]) -> str:
    rows = []
    for name, row in results["rows"].items():
        for library, title in TITLES.items():
            measured = row["who"].get(library)
            if measured is None:
                rows.append([ROWS[name]["title"], title, "not supported", *[""] * 9])
                continue
            cells = []
            for op in OPERATIONS:
                ratios = ratio_cells(measured[op]) if op in measured else ["", ""]
                cells += [f"{measured[f'{op}_per_second']:,}", *ratios]
            size = measured["megabytes_per_million"]
            cells.append(f"{size:,} ({size / row['naive_megabytes']:.2f})")
            rows.append([ROWS[name]["title"], title, *cells])
    rates = [cell for title in OPERATIONS.values() for cell in (title, "ratio", "range")]
    head = ["replay", "library", *rates, "MB per million (relative to naive)"]
    return results_table(results, head, rows, 2)


def main() -> None:
    options = parse_args(
        __doc__, list(ROWS), repeats=5, quick_rows=("vector-uniform", "vector-prioritized", "frames-uniform")
    )
    seconds = 0.1 if options.quick else 0.5
    if options.quick:
        for row in ROWS.values():
            row["capacity"] //= 5
    pythons = library_pythons()
    compare_rows(
        "replay",
        options,
        lambda name: compare({**ROWS[name], "seconds": seconds}, pythons, options.repeats),
        make_table,
    )


if __name__ == "__main__":
    run_script(main, setup)

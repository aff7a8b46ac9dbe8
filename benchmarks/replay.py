"""What a replay takes in and gives out per second, and its bytes: ours and those of others, taking turns.

    python benchmarks/replay.py [--repeats 5] [--rows vector-uniform,frames-uniform] [--quick]

Everybody gets the same steps, one after the other or in blocks, as training loops give them (who takes no blocks gets
their steps one by one), and samples 256 once it is full; a prioritized replay is then given new priorities, too. Both
in turns, as off-policy training does it, is measured apart: a replay may put work off from the one to the other. Rates
are per second of the CPU's time, all on one thread. Bytes are the memory that the process has more when the replay is
full. `--as WHO ROW` is one of those who take turns.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from common import (
    Party,
    answer,
    asked,
    asked_as,
    compared,
    made,
    made_line,
    median_of,
    peer_python,
    publish,
    resident_bytes,
    spread,
    table,
    take_turns,
    versions,
)
from peers import sb3, tianshou

# `num` environments, whose steps come in blocks of `block`
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
WAYS = {"insert": "inserted/s", "sample": "sampled/s", "both": "insert + sample/s"}
PEERS = {"sb3": "Stable-Baselines3", "tianshou": "Tianshou", "cpprb": "cpprb"}
CPPRB = ["cpprb==11.0.0"]
PRIORITIES = np.random.default_rng(1).random((16, BATCH)).astype(np.float32)


class Replay(NamedTuple):
    add: Callable[[int], None]  # block number so and so of the stream
    sample: Callable[[int], None]  # with the priorities number so and so


def stream(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Two episodes; their steps come again and again. Stacks begin with a frame repeated and then shift."""
    rng = np.random.default_rng(0)
    num, shape, dtype = row["num"], tuple(row["obs"]), np.dtype(row["dtype"])
    pictures = dtype == np.uint8
    steps = []
    for _ in range(2):
        frame = rng.integers(0, 256, (EPISODE + 1, num, *shape[-2:])).astype(dtype) if pictures else None
        obs = rng.normal(size=(EPISODE + 1, num, *shape)).astype(dtype) if frame is None else None
        for t in range(EPISODE + 1):
            if frame is None:
                assert obs is not None
                now = obs[t]
            else:
                now = np.stack([frame[max(0, t - back)] for back in range(shape[0] - 1, -1, -1)], 1)
            if t:
                steps[-1]["next_obs"] = now
            if t < EPISODE:
                flags = {"terminated": np.full(num, t == EPISODE - 1), "truncated": np.zeros(num, bool)}
                action, reward = rng.integers(0, 6, num), rng.normal(size=num).astype(np.float32)
                steps.append({"obs": now, "action": action, "reward": reward, **flags})
    return steps


def blocks(row: Mapping[str, Any], steps: list[Any]) -> list[list[Any]]:
    size = row["block"]
    return [steps[first : first + size] for first in range(0, len(steps), size)]


# --- those who take turns -------------------------------------------------------------------------------------------


def of_ours(row: Mapping[str, Any], capacity: int) -> Replay:
    import torch
    from gymnasium.spaces import Box, Discrete

    from zhixing import Batch
    from zhixing.buffers import Buffer, NStep, Prioritized, Uniform
    from zhixing.core.spaces import Spaces

    pictures = row["dtype"] == "uint8"
    box = Box(0, 255, tuple(row["obs"]), np.uint8) if pictures else Box(-9.0, 9.0, tuple(row["obs"]), np.float32)
    sampler = Prioritized(ALPHA, BETA, BETA) if row.get("prioritized") else Uniform()
    fields = Spaces(box, Discrete(6)).fields()
    stack = row["obs"][0] if pictures else 1
    buffer = Buffer(fields, capacity, row["num"], sampler=sampler, view=NStep(1, 0.99), frame_stack=stack)
    steps, rng = stream(row), np.random.default_rng(0)
    if row["block"] > 1:
        steps = [{name: np.stack([step[name] for step in block]) for name in block[0]} for block in blocks(row, steps)]
    priorities = torch.from_numpy(PRIORITIES)

    def add(t: int) -> None:
        buffer.add(Batch(**steps[t % len(steps)]))

    def sample(i: int) -> None:
        batch = buffer.sample(BATCH, rng)
        buffer.set_priority(batch.index, priorities[i % 16])

    return Replay(add, sample)


def of_sb3(row: Mapping[str, Any], capacity: int) -> Replay:
    from gymnasium.spaces import Box, Discrete
    from stable_baselines3.common.buffers import ReplayBuffer

    pictures = row["dtype"] == "uint8"
    box = Box(0, 255, tuple(row["obs"]), np.uint8) if pictures else Box(-9.0, 9.0, tuple(row["obs"]), np.float32)
    # its way to keep observations once, which doesn't go with its handling of time limits
    thrifty = {"optimize_memory_usage": pictures, "handle_timeout_termination": not pictures}
    buffer = ReplayBuffer(capacity, box, Discrete(6), "cpu", row["num"], **thrifty)
    infos: list[dict] = [{} for _ in range(row["num"])]
    steps = [
        (step["obs"], step["next_obs"], step["action"], step["reward"], step["terminated"], infos)
        for step in stream(row)
    ]
    parts = blocks(row, steps)

    def add(t: int) -> None:
        for step in parts[t % len(parts)]:
            buffer.add(*step)

    return Replay(add, lambda i: buffer.sample(BATCH))


def of_tianshou(row: Mapping[str, Any], capacity: int) -> Replay:
    from tianshou.data import Batch, PrioritizedReplayBuffer, PrioritizedVectorReplayBuffer, ReplayBuffer
    from tianshou.data import VectorReplayBuffer as VectorBuffer

    pictures, prioritized = row["dtype"] == "uint8", row.get("prioritized", False)
    options: dict[str, Any] = {"alpha": ALPHA, "beta": BETA} if prioritized else {}
    if pictures:  # as in its examples of Atari
        options |= {"stack_num": 4, "ignore_obs_next": True, "save_only_last_obs": True}
    if row["num"] > 1:
        kind = PrioritizedVectorReplayBuffer if prioritized else VectorBuffer
        buffer = kind(capacity, row["num"], **options)
    else:
        buffer = (PrioritizedReplayBuffer if prioritized else ReplayBuffer)(capacity, **options)
    names = {"obs": "obs", "action": "act", "reward": "rew", "next_obs": "obs_next"}
    steps = [
        {names.get(name, name): array if row["num"] > 1 else array[0] for name, array in step.items()}
        for step in stream(row)
    ]

    parts = blocks(row, steps)

    def add(t: int) -> None:
        for step in parts[t % len(parts)]:
            buffer.add(Batch(**step))

    def sample(i: int) -> None:
        _, index = buffer.sample(BATCH)
        if prioritized:
            buffer.update_weight(index, PRIORITIES[i % 16])

    return Replay(add, sample)


def of_cpprb(row: Mapping[str, Any], capacity: int) -> Replay:
    import cpprb

    pictures, prioritized, num = row["dtype"] == "uint8", row.get("prioritized", False), row["num"]
    steps = stream(row)
    if pictures:  # it wants the frames of a stack behind each other
        for step in steps:
            for name in ("obs", "next_obs"):
                step[name] = np.ascontiguousarray(step[name].transpose(0, 2, 3, 1))
    obs = {"shape": steps[0]["obs"].shape[1:], "dtype": np.dtype(row["dtype"])}
    fields: dict[str, Any] = {"obs": obs, "act": {"dtype": np.int64}, "rew": {}, "done": {}}
    options: dict[str, Any] = {"alpha": ALPHA} if prioritized else {}
    if num == 1:
        options["next_of"] = "obs"  # one stream: what follows needn't be kept twice
    else:
        fields["next_obs"] = obs
    if pictures:
        options["stack_compress"] = "obs"
    buffer = (cpprb.PrioritizedReplayBuffer if prioritized else cpprb.ReplayBuffer)(capacity, fields, **options)

    names = {"obs": "obs", "action": "act", "reward": "rew", "next_obs": "next_obs", "terminated": "done"}
    parts = [
        {theirs: np.concatenate([step[ours] for step in block]) for ours, theirs in names.items()}
        for block in blocks(row, steps)
    ]

    def add(t: int) -> None:
        part = parts[t % len(parts)]
        buffer.add(**part)
        if part["done"][-1]:
            buffer.on_episode_end()

    def sample(i: int) -> None:
        if prioritized:
            batch = buffer.sample(BATCH, BETA)
            buffer.update_priorities(batch["indexes"], PRIORITIES[i % 16])
        else:
            buffer.sample(BATCH)

    return Replay(add, sample)


WHO: dict[str, tuple[Callable[[Mapping[str, Any], int], Replay], str]] = {
    "ours": (of_ours, "numpy"),
    "sb3": (of_sb3, "stable-baselines3"),
    "tianshou": (of_tianshou, "tianshou"),
    "cpprb": (of_cpprb, "cpprb"),
}


def rate(work: Callable[[int], None], seconds: float) -> float:
    """How often per second of the CPU's time."""
    done, start = 0, time.process_time()
    while (spent := time.process_time() - start) < seconds:
        for i in range(done, done + 50):
            work(i)
        done += 50
    return done / spent


def ready(who: str, row: Mapping[str, Any]) -> tuple[Callable[[], dict[str, float]], dict[str, Any]]:
    make, package = WHO[who]
    small = make(row, 1000)  # what is imported and cached at the first use is no part of a replay
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
    per_step = (resident_bytes() - before) / row["capacity"]
    at = row["capacity"] // per_add

    def measure() -> dict[str, float]:
        def add(i: int) -> None:
            nonlocal at
            replay.add(at)  # the stream goes on where it stopped
            at += 1

        def both(i: int) -> None:
            add(i)
            replay.sample(i)

        inserted, sampled, turns = (rate(work, row["seconds"]) for work in (add, replay.sample, both))
        return {"insert": inserted * per_add, "sample": sampled * BATCH, "both": turns}

    return measure, {"megabytes_per_million": round(per_step), **versions(package)}


# --- comparing ---------------------------------------------------------------------------------------------------


def pythons() -> dict[str, Path]:
    return {
        "ours": Path(sys.executable),
        "sb3": peer_python("sb3", sb3.REQUIREMENTS),
        "tianshou": peer_python("tianshou", tianshou.REQUIREMENTS, tianshou.CONSTRAINED),
        "cpprb": peer_python("cpprb", CPPRB),
    }


def compare(row: Mapping[str, Any], interpreters: Mapping[str, Path], repeats: int) -> dict[str, Any]:
    fitting = {who: python for who, python in interpreters.items() if not (who == "sb3" and row.get("prioritized"))}
    with ExitStack() as stack:
        joined = {who: stack.enter_context(Party(python, __file__, who, row)) for who, python in fitting.items()}
        told = {who: party.told for who, party in joined.items()}
        runs = take_turns(joined, repeats)
    found: dict[str, Any] = {}
    for who, its in runs.items():
        rates = {way: [run[way] for run in its] for way in WAYS}
        found[who] = {**told[who], **{f"{way}_per_second": round(median_of(rates[way])) for way in rates}}
        if who != "ours":
            for way in rates:
                found[who][way] = compared([run[way] for run in runs["ours"]], rates[way])
    return {"title": row["title"], "who": found, "naive_megabytes": naive(row)}


def naive(row: Mapping[str, Any]) -> int:
    """A million transitions as they come: two observations, action, reward, two flags."""
    return 2 * int(np.prod(row["obs"])) * np.dtype(row["dtype"]).itemsize + 8 + 4 + 2


def tell(results: Mapping[str, Any]) -> str:
    lines = []
    for row in results["rows"].values():
        for who in ("ours", *PEERS):
            found = row["who"].get(who)
            if found is None:
                lines.append([row["title"], PEERS[who], *["not supported", *[""] * 9]])
                continue
            cells = []
            for way in WAYS:
                cells += [f"{found[f'{way}_per_second']:,}", *(spread(found[way]) if way in found else ["", ""])]
            size = found["megabytes_per_million"]
            cells.append(f"{size:,} ({size / row['naive_megabytes']:.2f})")
            lines.append([row["title"], PEERS.get(who, "zhixing"), *cells])
    ways = [cell for name in WAYS.values() for cell in (name, "ratio", "range")]
    head = ["replay", "library", *ways, "MB per million (relative to naive)"]
    return "\n".join([table(head, lines, 2), "", made_line(results["repeats"], results["made"])])


def main() -> None:
    options = asked(
        __doc__, list(ROWS), repeats=5, quick_rows=("vector-uniform", "vector-prioritized", "frames-uniform")
    )
    if options.quick:
        for row in ROWS.values():
            row["capacity"] //= 5
    interpreters = pythons()
    found = {}
    for name in options.rows:
        row = {**ROWS[name], "seconds": 0.1 if options.quick else 0.5}
        found[name] = compare(row, interpreters, options.repeats)
        print(f"{name}: {found[name]['who']}", flush=True)
    results = {"rows": found, "repeats": options.repeats, "made": made()}
    publish("replay", results, tell(results), options.quick)


if __name__ == "__main__":
    if (call := asked_as()) is not None:
        answer(lambda: ready(*call))
    else:
        main()

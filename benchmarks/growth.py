"""How speed and memory grow: with environments, with worker processes and with the size of a replay. Ours alone.

    python benchmarks/growth.py [--repeats 3] [--rows environments,workers,uniform,prioritized] [--quick]

Sizes take turns within a row; each size is a process of its own, whose memory is told without what Python and torch
take. `--as WHO ROW` is one of them.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

from common import (
    Party,
    answer,
    asked,
    asked_as,
    made,
    made_line,
    median_of,
    publish,
    resident_bytes,
    table,
    take_turns,
)

ROWS: dict[str, dict[str, Any]] = {
    "environments": {
        "title": "CartPole-v1, `auto`, actions from a PPO policy",
        "sizes": [1, 4, 16, 64, 256, 1024],
        "of": "environments",
    },
    "serial": {
        "title": "CartPole-v1, `serial`, actions from a PPO policy",
        "sizes": [1, 4, 16, 64, 256, 1024],
        "of": "environments",
        "backend": "serial",
    },
    "workers": {"title": "8 environments that sleep 1 ms per step, `process`", "sizes": [1, 2, 4, 8], "of": "workers"},
    "uniform": {"title": "uniform replay of 17 floats", "sizes": [10**4, 10**5, 10**6, 10**7], "of": "transitions"},
    "prioritized": {
        "title": "prioritized replay of 17 floats",
        "sizes": [10**4, 10**5, 10**6, 10**7],
        "of": "transitions",
        "prioritized": True,
    },
}
BATCH = 256


# --- one size ----------------------------------------------------------------------------------------------------


def acting(row: Mapping[str, Any], num: int) -> Callable[[float], float]:
    """Steps per second of an actor in so many environments."""
    import zhixing as zx

    cfg = zx.config.load(algorithm="ppo", env="CartPole-v1", num_envs=num, num_threads=1)
    env = zx.envs.make_vector("CartPole-v1", num, row.get("backend", "auto"))
    learner = zx.algorithms.get("ppo").make(cfg, env.spaces)
    actor = zx.Actor(learner.policy, env, learner.extra_fields, seed=0)
    steps = max(4, 256 // num)
    return lambda seconds: often(lambda: actor.collect(steps), seconds, time.process_time) * steps * num


def sleeping(row: Mapping[str, Any], workers: int) -> Callable[[float], float]:
    import zhixing as zx

    env = zx.envs.make_vector("tasks:Sleeps", 8, "process", workers)
    env.reset(seed=0)
    actions = env.action_space.sample()
    # waiting takes no time of the CPU
    return lambda seconds: often(lambda: env.step(actions), seconds, time.perf_counter) * 8


def replaying(row: Mapping[str, Any], capacity: int) -> Callable[[float], float]:
    """Transitions sampled per second; the replay is full."""
    import numpy as np
    from gymnasium.spaces import Box, Discrete

    from zhixing import Batch
    from zhixing.buffers import Buffer, NStep, Prioritized, Uniform
    from zhixing.core.spaces import Spaces

    columns, block = 10, 1000
    spaces = Spaces(Box(-9.0, 9.0, (17,), np.float32), Discrete(6))
    sampler = Prioritized() if row.get("prioritized") else Uniform()
    buffer = Buffer(spaces.fields(), capacity, columns, sampler=sampler, view=NStep(1, 0.99))
    rng = np.random.default_rng(0)
    obs = rng.normal(size=(block + 1, columns, 17)).astype(np.float32)
    obs[-1] = obs[0]  # blocks follow each other
    ends = np.zeros((block, columns), bool)
    ends[199::200] = True
    part = {"obs": obs[:-1], "next_obs": obs[1:], "action": np.zeros(ends.shape, np.int64), "terminated": ends}
    steps = Batch(**part, reward=np.ones(ends.shape, np.float32), truncated=np.zeros_like(ends))
    while not buffer.full:
        buffer.add(steps)
    priority = rng.random(BATCH).astype(np.float32)

    def once() -> None:
        batch = buffer.sample(BATCH, rng)
        buffer.set_priority(batch.index.numpy(), priority)

    return lambda seconds: often(once, seconds, time.process_time) * BATCH


def often(work: Callable[[], Any], seconds: float, clock: Callable[[], float]) -> float:
    """How often per second, by that clock."""
    done, start = 0, clock()
    while (spent := clock() - start) < seconds:
        work()
        done += 1
    return done / spent


def ready(of: str, row: Mapping[str, Any]) -> tuple[Callable[[], dict[str, float]], dict[str, Any]]:
    import torch

    import zhixing.training.session  # noqa: F401  what it takes to import isn't growth

    torch.set_num_threads(1)
    before = resident_bytes()
    makers = {"environments": acting, "workers": sleeping, "transitions": replaying}
    work = makers[of](row, row["size"])
    work(row["seconds"])
    told = {"megabytes": round((resident_bytes() - before) / 1e6, 1)}
    return lambda: {"per_second": work(row["seconds"])}, told


# --- all sizes ---------------------------------------------------------------------------------------------------


def grow(row: Mapping[str, Any], repeats: int) -> dict[str, Any]:
    with ExitStack() as stack:
        joined = {
            f"{size:09}": stack.enter_context(Party(Path(sys.executable), __file__, row["of"], {**row, "size": size}))
            for size in row["sizes"]
        }
        told = {name: party.told for name, party in joined.items()}
        runs = take_turns(joined, repeats)
    sizes = {
        str(int(name)): {**told[name], "per_second": round(median_of([one["per_second"] for one in its]))}
        for name, its in runs.items()
    }
    rates = [one["per_second"] for one in sizes.values()]
    # the most that a step towards a larger size costs: below 1 is a fall
    drops = [after / before for before, after in pairwise(rates)]
    found: dict[str, Any] = {"title": row["title"], "of": row["of"], "sizes": sizes, "worst_step": round(min(drops), 2)}
    if row["of"] == "transitions":
        found["cost_ratio"] = round(rates[0] / min(rates), 2)
    if row["of"] == "workers":
        ideal = [int(size) * rates[0] for size in sizes]
        found["of_ideal"] = [round(rate / best, 3) for rate, best in zip(rates, ideal, strict=True)]
    return found


def tell(results: Mapping[str, Any]) -> str:
    lines = []
    for row in results["rows"].values():
        for at, (size, found) in enumerate(row["sizes"].items()):
            first = next(iter(row["sizes"].values()))["per_second"]
            share = f"{row['of_ideal'][at]:.2f} of ideal" if "of_ideal" in row else f"{found['per_second'] / first:.2f}"
            cells = [f"{row['of']}: {int(size):,}", f"{found['per_second']:,}", share, f"{found['megabytes']:,.1f}"]
            lines.append([row["title"], *cells])
    head = ["workload", "size", "steps or samples/s", "relative to the first", "additional MB"]
    return "\n".join([table(head, lines, 2), "", made_line(results["repeats"], results["made"])])


def main() -> None:
    options = asked(__doc__, list(ROWS), repeats=3, quick_rows=("environments", "workers", "uniform", "prioritized"))
    found = {}
    for name in options.rows:
        row = {**ROWS[name], "seconds": 0.1 if options.quick else 0.5}
        if options.quick:
            row["sizes"] = [row["sizes"][0], *row["sizes"][-2:-1]]
        found[name] = grow(row, options.repeats)
        print(f"{name}: {found[name]}", flush=True)
    results = {"rows": found, "repeats": options.repeats, "made": made()}
    publish("growth", results, tell(results), options.quick)


if __name__ == "__main__":
    if (call := asked_as()) is not None:
        answer(lambda: ready(*call))
    else:
        main()

"""How speed and memory change with the number of environments, worker processes and stored transitions.

    python benchmarks/growth.py [--repeats 3] [--rows environments,workers,uniform,prioritized] [--quick]

Measures zhixing only. The sizes of a row are measured in alternation, each in its own process. Memory excludes what
Python and torch take.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from comparison import (
    Measurement,
    Side,
    compare_rows,
    measure_rounds,
    parse_args,
    resident_bytes,
    results_table,
    rounded_median,
    run_script,
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
    "workers": {
        "title": "8 environments that sleep 1 ms per step, `process`",
        "sizes": [1, 2, 4, 8],
        "of": "workers",
    },
    "uniform": {
        "title": "uniform replay of 17 floats",
        "sizes": [10**4, 10**5, 10**6, 10**7],
        "of": "transitions",
    },
    "prioritized": {
        "title": "prioritized replay of 17 floats",
        "sizes": [10**4, 10**5, 10**6, 10**7],
        "of": "transitions",
        "prioritized": True,
    },
}
BATCH = 256


# --- one size: each function returns another that measures a rate for some seconds ---------------------------------


def setup_acting(row: Mapping[str, Any], num: int) -> Callable[[float], float]:
    """Measure environment steps per second of an actor in `num` environments."""
    import zhixing as zx

    cfg = zx.config.load(algorithm="ppo", env="CartPole-v1", num_envs=num, num_threads=1)
    env = zx.envs.make_vector("CartPole-v1", num, row.get("backend", "auto"))
    learner = zx.algorithms.get("ppo").make(cfg, env.spaces)
    actor = zx.Actor(learner.policy, env, learner.extra_fields, seed=0)
    steps = max(4, 256 // num)
    return lambda seconds: calls_per_second(lambda: actor.collect(steps), seconds, time.process_time) * steps * num


def setup_sleeping(row: Mapping[str, Any], workers: int) -> Callable[[float], float]:
    """Measure environment steps per second of 8 environments that sleep."""
    import zhixing as zx

    env = zx.envs.make_vector("sleep_env:SleepEnv", 8, "process", workers)
    env.reset(seed=0)
    actions = env.action_space.sample()
    # wall time, since sleeping takes no CPU time
    return lambda seconds: calls_per_second(lambda: env.step(actions), seconds, time.perf_counter) * 8


def setup_sampling(row: Mapping[str, Any], capacity: int) -> Callable[[float], float]:
    """Measure transitions sampled per second from a full buffer."""
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
    obs[-1] = obs[0]  # the last next observation of a block is the first observation of the next block
    ends = np.zeros((block, columns), bool)
    ends[199::200] = True
    fields = {"obs": obs[:-1], "next_obs": obs[1:], "action": np.zeros(ends.shape, np.int64), "terminated": ends}
    steps = Batch(**fields, reward=np.ones(ends.shape, np.float32), truncated=np.zeros_like(ends))
    while not buffer.full:
        buffer.add(steps)
    priority = rng.random(BATCH).astype(np.float32)

    def sample() -> None:
        batch = buffer.sample(BATCH, rng)
        buffer.set_priority(batch.index.numpy(), priority)

    return lambda seconds: calls_per_second(sample, seconds, time.process_time) * BATCH


def calls_per_second(function: Callable[[], Any], seconds: float, clock: Callable[[], float]) -> float:
    """Call a function for some seconds of a clock. Return the calls per second."""
    done, start = 0, clock()
    while (spent := clock() - start) < seconds:
        function()
        done += 1
    return done / spent


SETUPS = {"environments": setup_acting, "workers": setup_sleeping, "transitions": setup_sampling}


def setup(name: str, row: Mapping[str, Any]) -> Measurement:
    import torch

    import zhixing.training.session  # noqa: F401  the memory of imports doesn't depend on the size

    torch.set_num_threads(1)
    before = resident_bytes()
    rate = SETUPS[row["of"]](row, row["size"])
    rate(row["seconds"])
    info = {"megabytes": round((resident_bytes() - before) / 1e6, 1)}
    return Measurement(lambda: {"per_second": rate(row["seconds"])}, info)


# --- all sizes -------------------------------------------------------------------------------------------------------


def measure_sizes(row: Mapping[str, Any], repeats: int) -> dict[str, Any]:
    names = {size: f"{size:09}" for size in row["sizes"]}  # sorted by name, they are sorted by size
    here = Path(sys.executable)
    sides = {name: Side(here, name, {**row, "size": size}) for size, name in names.items()}
    info, runs = measure_rounds(__file__, sides, repeats)
    sizes = {
        str(size): {**info[name], "per_second": round(rounded_median([run["per_second"] for run in runs[name]]))}
        for size, name in names.items()
    }
    rates = [measured["per_second"] for measured in sizes.values()]
    results: dict[str, Any] = {"of": row["of"], "sizes": sizes}
    # the smallest ratio of a rate to that of the next smaller size
    results["worst_step"] = round(min(after / before for before, after in pairwise(rates)), 2)
    if row["of"] == "transitions":
        results["cost_ratio"] = round(rates[0] / min(rates), 2)
    if row["of"] == "workers":
        results["of_ideal"] = [round(rate / (size * rates[0]), 3) for size, rate in zip(names, rates, strict=True)]
    return results


def make_table(results: Mapping[str, Any]) -> str:
    rows = []
    for name, row in results["rows"].items():
        first = next(iter(row["sizes"].values()))["per_second"]
        for i, (size, measured) in enumerate(row["sizes"].items()):
            rate = measured["per_second"]
            relative = f"{row['of_ideal'][i]:.2f} of ideal" if "of_ideal" in row else f"{rate / first:.2f}"
            cells = [f"{row['of']}: {int(size):,}", f"{rate:,}", relative, f"{measured['megabytes']:,.1f}"]
            rows.append([ROWS[name]["title"], *cells])
    head = ["workload", "size", "steps or samples/s", "relative to the first", "additional MB"]
    return results_table(results, head, rows, 2)


def main() -> None:
    options = parse_args(
        __doc__, list(ROWS), repeats=3, quick_rows=("environments", "workers", "uniform", "prioritized")
    )
    seconds = 0.1 if options.quick else 0.5
    if options.quick:
        for row in ROWS.values():
            row["sizes"] = [row["sizes"][0], *row["sizes"][-2:-1]]
    compare_rows(
        "growth", options, lambda name: measure_sizes({**ROWS[name], "seconds": seconds}, options.repeats), make_table
    )


if __name__ == "__main__":
    run_script(main, setup)

"""Collecting with Ray workers: how speed scales with their number, and the cost of their messages.

    python benchmarks/scaling.py [--seconds 3] [--rounds 3] [--workers 1,2,4] [--parts ours,rllib] [--quick]

The environment sleeps 1 ms per step, so workers don't compete for CPUs: speed below K times that of one worker is lost
to communication. Numbers of workers are measured in alternation, and ratios are those of the same round. The part
`rllib` also trains PPO with the same number of workers in zhixing and in RLlib. The part `ours` requires the extra
`ray`.
"""

from __future__ import annotations

import argparse
import datetime
import os
import pickle
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import scaling_rllib
import torch
from common import ROOT, read_results, table, write_page, write_results
from comparison import results_file

import zhixing as zx
from zhixing.buffers import Buffer, NStep, Prioritized
from zhixing.buffers.rollout import Rollout
from zhixing.distributed.cluster import Cluster
from zhixing.distributed.collector import DistributedCollector, make_distributed_collector
from zhixing.distributed.worker import WorkerResult, policy_weights

PAGE = ROOT / "docs" / "scaling.md"
STEPS = 100  # of each environment per message
# assumptions of the estimate: steps per second of a worker, and the bandwidth of the driver's machine
WORKER_RATES = {"vector of 17": 1_000, "84x84x4 image": 300}
BYTES_PER_SECOND = 1.25e9  # 10 Gb/s
WORKERS_PER_MACHINE, ENVS_PER_WORKER = 32, 4


# --- scaling ---------------------------------------------------------------------------------------------------------


def make_collector(workers: int, num_envs: int | None = None, **options: Any) -> DistributedCollector:
    """Start IMPALA's workers; with 0 workers, collect in this process."""
    cfg = zx.config.load(
        algorithm="impala",
        env={"name": "sleep_env:SleepEnv", **options},
        num_threads=1,
        num_envs=num_envs or max(1, workers),
        vector={"backend": "serial"},
        distributed={"workers": workers},
        actors=1,
    )
    env = zx.envs.make_vector("sleep_env:SleepEnv", 1, backend="serial", options=options)
    learner = zx.algorithms.get("impala").make(cfg, env.spaces)
    collector = make_distributed_collector(cfg, learner, env.spaces, (), Path(tempfile.gettempdir()))
    env.close()
    collector.start()
    return collector


def steps_per_second(collector: DistributedCollector, collect: Callable[[int], Any], seconds: float) -> float:
    collect(STEPS)  # the first call resets the environments
    before, start = collector.env_steps, time.perf_counter()
    while time.perf_counter() - start < seconds:
        collect(STEPS)
    return (collector.env_steps - before) / (time.perf_counter() - start)


def measure_scaling(worker_counts: list[int], rounds: int, seconds: float) -> dict[str, Any]:
    """Measure steps per second by number of workers, also as a fraction of the ideal: K times one worker."""
    local, local_rates = make_collector(0), []
    rates: dict[str, dict[int, list[float]]] = {
        mode: {k: [] for k in worker_counts} for mode in ("synchronous", "asynchronous")
    }
    collectors = {k: make_collector(k) for k in worker_counts}
    for _ in range(rounds):
        local_rates.append(steps_per_second(local, local.collect, seconds))
        for k, collector in collectors.items():
            rates["synchronous"][k].append(steps_per_second(collector, collector.collect, seconds))
    for collector in collectors.values():
        collector.close()
    collectors = {k: make_collector(k) for k in worker_counts}
    for _ in range(rounds):
        for k, collector in collectors.items():
            rates["asynchronous"][k].append(steps_per_second(collector, collector.collect_from_worker, seconds))
            # let all workers finish, so they are idle while others are measured
            for _ in range(k):
                collector.pool.wait()
            collector._idle = list(range(k))
    for collector in (*collectors.values(), local):
        collector.close()
    results: dict[str, Any] = {"no workers": {"steps_per_second": round(statistics.median(local_rates))}}
    fewest = worker_counts[0]
    for mode, by_count in rates.items():
        for k in worker_counts:
            fractions = [rate / (k / fewest * base) for rate, base in zip(by_count[k], by_count[fewest], strict=True)]
            results[f"{k}, {mode}"] = {
                "steps_per_second": round(statistics.median(by_count[k])),
                "efficiency": round(statistics.median(fractions), 3),
                "lowest": round(min(fractions), 3),
                "highest": round(max(fractions), 3),
            }
    return results


# --- messages --------------------------------------------------------------------------------------------------------


def message_bytes(content: Any) -> int:
    """Return the size of pickled content, with arrays out of band, as Ray transfers it."""
    buffers: list[pickle.PickleBuffer] = []
    rest = pickle.dumps(content, protocol=5, buffer_callback=buffers.append)
    return len(rest) + sum(buffer.raw().nbytes for buffer in buffers)


def median_seconds(function: Callable[[], Any], seconds: float = 1.0) -> float:
    """Call a function repeatedly for some seconds. Return the median time, which disturbances affect least."""
    function()
    times, start = [], time.perf_counter()
    while time.perf_counter() - start < seconds or len(times) < 3:
        before = time.perf_counter()
        function()
        times.append(time.perf_counter() - before)
    return statistics.median(times)


def to_batch(result: WorkerResult) -> zx.Batch:
    assert result.rollout is not None
    return Rollout.join([result.rollout]).to("cpu")


def measure_rollout(ray: Any, **options: Any) -> dict[str, float]:
    """Measure the bytes of weights and of a step, and the driver's time to send, receive and learn."""
    collector = make_collector(1, ENVS_PER_WORKER, seconds=0.0, **options)
    learner, steps = collector.learner, STEPS * ENVS_PER_WORKER
    weights = policy_weights(learner)
    collector.pool.submit(0, collector.pool.put(weights), "collect", STEPS, "collect", 0)
    _, result = collector.pool.wait()
    stored = ray.put(result)
    measured = {
        "bytes_of_weights": message_bytes(weights),
        "bytes_per_step": round(message_bytes(result) / steps, 1),
        "put_weights_ms": round(1e3 * median_seconds(lambda: collector.pool.put(policy_weights(learner))), 3),
        "take_us_per_step": round(1e6 * median_seconds(lambda: Rollout.join([ray.get(stored).rollout])) / steps, 3),
        "learn_us_per_step": round(1e6 * median_seconds(lambda: learner.update(to_batch(result))) / steps, 3),
    }
    collector.close()
    return measured


def measure_messages(cluster: Cluster) -> dict[str, Any]:
    """Measure messages with each kind of observation, and messages without data."""
    results: dict[str, Any] = {
        "vector of 17": measure_rollout(cluster.ray, size=17),
        "84x84x4 image": measure_rollout(cluster.ray, image=True),
    }
    collector = make_collector(1, 1)

    def call(times: int) -> None:
        for _ in range(times):
            collector.pool.submit(0, None, "process_id")
        for _ in range(times):
            collector.pool.wait()

    results["message"] = {
        "there_and_back_ms": round(1e3 * median_seconds(lambda: call(1)), 3),
        "driver_ms": round(10 * median_seconds(lambda: call(100)), 3),
    }
    collector.close()
    return results


def measure_replay() -> dict[str, Any]:
    """Measure a prioritized buffer of a million vectors of 17 numbers, filled as by workers of 4 environments."""
    env = zx.envs.make_vector("sleep_env:SleepEnv", 1, backend="serial", options={"size": 17, "seconds": 0.0})
    columns, rng = 1000, np.random.default_rng(0)
    buffer = Buffer(env.spaces.fields(), 1_000_000, columns, sampler=Prioritized(), view=NStep(1, 0.99))
    env.close()
    envs = np.arange(4)
    shape = STEPS, len(envs)
    obs = rng.normal(size=(STEPS + 1, len(envs), 17)).astype(np.float32)
    ends = np.zeros(shape, bool)
    steps = zx.Batch(
        obs=obs[:-1],
        next_obs=obs[1:],
        action=np.zeros(shape, np.int64),
        reward=np.ones(shape, np.float32),
        terminated=ends,
        truncated=ends,
    )
    priority = rng.random(shape)

    def add() -> None:
        buffer.add(steps, envs, priority)
        envs[:] = (envs + 4) % columns

    while len(buffer) < 200_000:
        add()
    add_seconds = median_seconds(add) / steps.terminated.size

    def sample() -> None:
        batch = buffer.sample(256, rng)
        buffer.set_priority(batch.index, torch.ones(256))

    return {
        "add_us_per_step": round(1e6 * add_seconds, 3),
        "sample_256_and_rate_ms": round(1e3 * median_seconds(sample), 3),
    }


# --- tables ----------------------------------------------------------------------------------------------------------


def estimate_limits(results: Mapping[str, Any]) -> list[list[str]]:
    """Estimate the limit of each component alone, in steps per second and in workers."""
    rows = []
    steps_per_message = STEPS * ENVS_PER_WORKER
    for kind, worker_rate in WORKER_RATES.items():
        rollout, message, replay = results["messages"][kind], results["messages"]["message"], results["replay"]
        weights, bytes_per_step, take_us = (
            rollout[name] for name in ("bytes_of_weights", "bytes_per_step", "take_us_per_step")
        )
        message_us, put_us = 1e3 * message["driver_ms"], 1e3 * rollout["put_weights_ms"]
        limits = {
            "learner, one thread, one pass": 1e6 / rollout["learn_us_per_step"],
            "driver, synchronous": 1e6 / (message_us / steps_per_message + take_us),
            "driver, asynchronous: new weights with each message": 1e6
            / ((message_us + put_us) / steps_per_message + take_us),
            "driver, copying alone": 1e6 / take_us,
            "network in: steps": BYTES_PER_SECOND / bytes_per_step,
            # Ray sends the same weights once to each machine
            "network out, synchronous": BYTES_PER_SECOND / (weights / WORKERS_PER_MACHINE / steps_per_message),
            "network out, asynchronous": BYTES_PER_SECOND / (weights / steps_per_message),
        }
        if kind == "vector of 17":
            limits["replay: insertion"] = 1e6 / replay["add_us_per_step"]
            limits["replay: one sample of 256 per 256 steps"] = 256e3 / replay["sample_256_and_rate_ms"]
        for component, limit in sorted(limits.items(), key=lambda item: item[1]):
            rows.append([kind, component, f"{limit:,.0f}", f"{limit / worker_rate:,.1f}"])
    return rows


def make_tables(results: Mapping[str, Any]) -> dict[str, str]:
    """Return the tables of docs/scaling.md by name."""
    rows = [
        [name, f"{row['steps_per_second']:,}", *(str(row.get(key, "")) for key in ("efficiency", "lowest", "highest"))]
        for name, row in results["sleeping_1_ms"].items()
    ]
    scaling = table(["workers", "steps/s", "fraction of ideal", "lowest", "highest"], rows, 1)
    rows = [[kind, *(f"{value:,}" for value in results["messages"][kind].values())] for kind in WORKER_RATES]
    head = ["observation", "bytes of weights", "bytes per step", "put weights, ms"]
    messages = table([*head, "receive, µs/step", "learn, µs/step"], rows, 1)
    message, replay = results["messages"]["message"], results["replay"]
    note = (
        f"A message without data takes {message['there_and_back_ms']} ms round trip and occupies the driver for "
        f"{message['driver_ms']} ms. A prioritized replay takes {replay['add_us_per_step']} µs to insert a step and "
        f"{replay['sample_256_and_rate_ms']} ms to sample 256 and set their priorities."
    )
    return {
        "workers": f"{scaling}\n\n{results['made']}; {results['machine']}",
        "messages": f"{messages}\n\n{note}",
        "estimate": table(["observation", "component", "limit, steps/s", "workers"], estimate_limits(results), 2),
    }


def make_rllib_table(results: Mapping[str, Any]) -> str:
    return f"{scaling_rllib.make_table(results['by_task'])}\n\n{results['made']}; {results['machine']}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", default="1,2,4", help="numbers of workers")
    parser.add_argument("--parts", default="ours,rllib", help="parts left out keep their last results")
    parser.add_argument("--quick", action="store_true", help="one short round; write to benchmarks/results/quick")
    args = parser.parse_args()
    worker_counts, parts = [int(k) for k in args.workers.split(",")], args.parts.split(",")
    if unknown := set(parts) - {"ours", "rllib"}:
        parser.error(f"--parts: unknown {', '.join(sorted(unknown))}; choose from ours, rllib")
    rounds, fraction = (1, 0.1) if args.quick else (args.rounds, 1.0)
    torch.set_num_threads(1)
    machine = {
        "made": datetime.date.today().isoformat(),
        "machine": f"{os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}, Python {platform.python_version()}, "
        f"torch {version('torch')}, ray {version('ray')}",
    }
    results = {} if args.quick else read_results(results_file("scaling", quick=False))
    if "ours" in parts:
        cluster = Cluster()
        results |= machine
        results["sleeping_1_ms"] = measure_scaling(worker_counts, rounds, fraction * args.seconds)
        results["messages"] = measure_messages(cluster)
        results["replay"] = measure_replay()
        cluster.close()
    if "rllib" in parts:
        results["rllib"] = {**machine, "by_task": scaling_rllib.compare_with_rllib(worker_counts, rounds, fraction)}
    write_results(results_file("scaling", args.quick), results)
    tables = make_tables(results) if "ours" in parts else {}
    if "rllib" in parts:
        tables["rllib"] = make_rllib_table(results["rllib"])
    for name, text in tables.items():
        print(f"\n{text}")
        if not args.quick:
            write_page(PAGE, name, text)


if __name__ == "__main__":
    main()

"""How collecting grows with workers on Ray, and what their messages weigh: the figures of docs/scaling.md.

    python benchmarks/scaling.py [--seconds 3] [--rounds 3] [--workers 1,2,4] [--parts ours,rllib] [--quick]

The task sleeps 1 ms per step and computes nothing, so that workers don't compete for the CPUs: what is lost against
K times one worker is what they cost each other and the driver. Numbers of workers take turns; a ratio is one of the
same round. The part `rllib` trains PPO with as many workers in RLlib, too. Needs the extra `ray`.
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
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from beside_rllib import beside_rllib, beside_table
from common import HERE, ROOT, read_results, write_page, write_results

import zhixing as zx
from zhixing.buffers import Buffer, NStep, Prioritized
from zhixing.buffers.rollout import Rollout
from zhixing.distributed.cluster import Cluster
from zhixing.distributed.collector import DistributedCollector, make_distributed_collector
from zhixing.distributed.worker import WorkerResult, policy_weights

RESULTS = HERE / "results" / "scaling.json"
PAGE = ROOT / "docs" / "scaling.md"
STEPS = 100  # of each environment per message
# what is assumed on paper: steps per second of a worker, and the network of the driver's machine
PACE = {"vector of 17": 1_000, "84x84x4 image": 300}
BYTES_PER_SECOND = 1.25e9  # 10 Gb/s
PER_MACHINE, ENVS = 32, 4  # workers, and environments of each


def actor_of(workers: int, num: int | None = None, algorithm: str = "impala", **options: Any) -> DistributedCollector:
    cfg = zx.config.load(
        algorithm=algorithm,
        env={"name": "tasks:Sleeps", **options},
        num_threads=1,
        num_envs=num or max(1, workers),
        vector={"backend": "serial"},
        distributed={"workers": workers},
        **({"actors": 1} if algorithm == "impala" else {}),
    )
    env = zx.envs.make_vector("tasks:Sleeps", 1, backend="serial", options=options)
    learner = zx.algorithms.get(algorithm).make(cfg, env.spaces)
    actor = make_distributed_collector(cfg, learner, env.spaces, (), Path(tempfile.gettempdir()))
    env.close()
    actor.start()
    return actor


def steps_per_second(actor: DistributedCollector, collect: Callable[[], Any], seconds: float) -> float:
    collect()  # the first one resets the environments
    before, start = actor.env_steps, time.perf_counter()
    while time.perf_counter() - start < seconds:
        collect()
    return (actor.env_steps - before) / (time.perf_counter() - start)


def scaling(counts: list[int], rounds: int, seconds: float) -> dict[str, Any]:
    """Steps per second by number of workers, and which share that is of K times one worker in the same round."""
    rates: dict[str, dict[int, list[float]]] = {way: {k: [] for k in counts} for way in ("synchronous", "asynchronous")}
    alone = []
    actors = {k: actor_of(k) for k in counts}
    local = actor_of(0)
    for _ in range(rounds):
        alone.append(steps_per_second(local, lambda: local.collect(STEPS), seconds))
        for k, actor in actors.items():
            rates["synchronous"][k].append(steps_per_second(actor, lambda actor=actor: actor.collect(STEPS), seconds))
    for actor in actors.values():
        actor.close()
    actors = {k: actor_of(k) for k in counts}
    for _ in range(rounds):
        for k, actor in actors.items():
            # those that wait are asked for nothing, but go on to the end of what they are at
            rates["asynchronous"][k].append(
                steps_per_second(actor, lambda actor=actor: actor.collect_from_worker(STEPS), seconds)
            )
            for _ in range(k):
                actor.pool.wait()
            actor._idle = list(range(k))
    for actor in (*actors.values(), local):
        actor.close()
    found: dict[str, Any] = {"no workers": {"steps_per_second": round(statistics.median(alone))}}
    for way, by_count in rates.items():
        for k in counts:
            shares = [mine / (k / counts[0] * one) for mine, one in zip(by_count[k], by_count[counts[0]], strict=True)]
            found[f"{k}, {way}"] = {
                "steps_per_second": round(statistics.median(by_count[k])),
                "efficiency": round(statistics.median(shares), 3),
                "lowest": round(min(shares), 3),
                "highest": round(max(shares), 3),
            }
    return found


def size(thing: Any) -> int:
    """Bytes as they travel: arrays apart from what describes them."""
    buffers: list[pickle.PickleBuffer] = []
    rest = pickle.dumps(thing, protocol=5, buffer_callback=buffers.append)
    return len(rest) + sum(buffer.raw().nbytes for buffer in buffers)


def timed(work: Callable[[], Any], seconds: float = 1.0) -> float:
    """Seconds that it takes: the median, since others use the machine."""
    work()
    spent, start = [], time.perf_counter()
    while time.perf_counter() - start < seconds or len(spent) < 3:
        begin = time.perf_counter()
        work()
        spent.append(time.perf_counter() - begin)
    return statistics.median(spent)


def rollout_message(ray: Any, **options: Any) -> dict[str, float]:
    """Bytes of weights and of a step, and what the driver does with them."""
    actor = actor_of(1, ENVS, seconds=0.0, **options)
    learner, steps = actor.learner, STEPS * ENVS
    weights = policy_weights(learner)
    actor.pool.submit(0, actor.pool.put(weights), "collect", STEPS, "collect", 0)
    _, turn = actor.pool.wait()
    stored = ray.put(turn)
    found = {
        "bytes_of_weights": size(weights),
        "bytes_per_step": round(size(turn) / steps, 1),
        "put_weights_ms": round(1e3 * timed(lambda: actor.pool.put(policy_weights(learner))), 3),
        "take_us_per_step": round(1e6 * timed(lambda: Rollout.join([ray.get(stored).rollout])) / steps, 3),
        "learn_us_per_step": round(1e6 * timed(lambda: learner.update(joined(turn))) / steps, 3),
    }
    actor.close()
    return found


def joined(turn: WorkerResult) -> zx.Batch:
    assert turn.rollout is not None
    return Rollout.join([turn.rollout]).to("cpu")


def messages(cluster: Cluster) -> dict[str, Any]:
    """Of each kind of observation, and of a message without any."""
    found: dict[str, Any] = {
        "vector of 17": rollout_message(cluster.ray, size=17),
        "84x84x4 image": rollout_message(cluster.ray, picture=True),
    }
    actor = actor_of(1, 1)

    def ask() -> None:
        actor.pool.submit(0, None, "process_id")
        actor.pool.wait()

    def ask_many() -> None:
        for _ in range(100):
            actor.pool.submit(0, None, "process_id")
        for _ in range(100):
            actor.pool.wait()

    found["message"] = {"there_and_back_ms": round(1e3 * timed(ask), 3), "driver_ms": round(10 * timed(ask_many), 3)}
    actor.close()
    return found


def replay() -> dict[str, Any]:
    """A prioritized replay of a million transitions of 17 numbers, filled and sampled as by workers."""
    env = zx.envs.make_vector("tasks:Sleeps", 1, backend="serial", options={"size": 17, "seconds": 0.0})
    columns, rng = 1000, np.random.default_rng(0)
    buffer = Buffer(env.spaces.fields(), 1_000_000, columns, sampler=Prioritized(), view=NStep(1, 0.99))
    env.close()
    ids = np.arange(4)
    shape = STEPS, len(ids)
    obs = rng.normal(size=(STEPS + 1, len(ids), 17)).astype(np.float32)
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

    def fill() -> None:
        buffer.add(steps, ids, priority)
        ids[:] = (ids + 4) % columns

    while len(buffer) < 200_000:
        fill()
    added = timed(fill) / steps.terminated.size

    def learn() -> None:
        batch = buffer.sample(256, rng)
        buffer.set_priority(batch.index, torch.ones(256))

    return {"add_us_per_step": round(1e6 * added, 3), "sample_256_and_rate_ms": round(1e3 * timed(learn), 3)}


def estimate(results: dict[str, Any]) -> list[list[str]]:
    """Where each part is full, in steps per second and in workers, if the others weren't."""
    rows = []
    per_message = STEPS * ENVS
    for kind, pace in PACE.items():
        found, message, stored = results["messages"][kind], results["messages"]["message"], results["replay"]
        weights, bytes_per_step = found["bytes_of_weights"], found["bytes_per_step"]
        take, message_us, put_us = found["take_us_per_step"], 1e3 * message["driver_ms"], 1e3 * found["put_weights_ms"]
        limits = {
            "learner, one thread, one pass": 1e6 / found["learn_us_per_step"],
            "driver, synchronous": 1e6 / (message_us / per_message + take),
            "driver, asynchronous: new weights with each message": 1e6 / ((message_us + put_us) / per_message + take),
            "driver, copying alone": 1e6 / take,
            "network in: steps": BYTES_PER_SECOND / bytes_per_step,
            # Ray sends the same weights once to each machine
            "network out, synchronous": BYTES_PER_SECOND / (weights / PER_MACHINE / per_message),
            "network out, asynchronous": BYTES_PER_SECOND / (weights / per_message),
        }
        if kind == "vector of 17":
            limits["replay: insertion"] = 1e6 / stored["add_us_per_step"]
            limits["replay: one sample of 256 per 256 steps"] = 256e3 / stored["sample_256_and_rate_ms"]
        for part, limit in sorted(limits.items(), key=lambda pair: pair[1]):
            rows.append([kind, part, f"{limit:,.0f}", f"{limit / pace:,.1f}"])
    return rows


def table(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows])


def write_tables(results: dict[str, Any]) -> None:
    rows = [
        [name, f"{one['steps_per_second']:,}", *(str(one.get(key, "")) for key in ("efficiency", "lowest", "highest"))]
        for name, one in results["sleeping_1_ms"].items()
    ]
    made = f"\n\n{results['made']}; {results['machine']}"
    write_page(PAGE, "workers", table(["workers", "steps/s", "fraction of ideal", "lowest", "highest"], rows) + made)
    rows = [[kind, *(f"{value:,}" for value in results["messages"][kind].values())] for kind in PACE]
    head = [
        "observation",
        "bytes of weights",
        "bytes per step",
        "put weights, ms",
        "receive, µs/step",
        "learn, µs/step",
    ]
    message, stored = results["messages"]["message"], results["replay"]
    note = (
        f"A message without data takes {message['there_and_back_ms']} ms round trip and occupies the driver for "
        f"{message['driver_ms']} ms. A prioritized replay takes {stored['add_us_per_step']} µs to insert a step and "
        f"{stored['sample_256_and_rate_ms']} ms to sample 256 and set their priorities."
    )
    write_page(PAGE, "messages", f"{table(head, rows)}\n\n{note}")
    write_page(PAGE, "estimate", table(["observation", "component", "limit, steps/s", "workers"], estimate(results)))


def write_beside(found: dict[str, Any]) -> None:
    write_page(PAGE, "beside rllib", f"{beside_table(found['by_task'])}\n\n{found['made']}; {found['machine']}")


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--seconds", type=float, default=3.0)
    words.add_argument("--rounds", type=int, default=3)
    words.add_argument("--workers", default="1,2,4")
    words.add_argument("--parts", default="ours,rllib", help="what isn't named keeps its last figures")
    words.add_argument("--quick", action="store_true", help="one round of a tenth; the page stays as it is")
    asked = words.parse_args()
    counts, parts = [int(k) for k in asked.workers.split(",")], asked.parts.split(",")
    if wrong := set(parts) - {"ours", "rllib"}:
        words.error(f"unknown: {', '.join(sorted(wrong))}; there are ours, rllib")
    rounds, share = (1, 0.1) if asked.quick else (asked.rounds, 1.0)
    torch.set_num_threads(1)
    made = {
        "made": datetime.date.today().isoformat(),
        "machine": f"{os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}, Python {platform.python_version()}, "
        f"torch {version('torch')}, ray {version('ray')}",
    }
    results = {} if asked.quick else read_results(RESULTS)
    if "ours" in parts:
        results |= {**made, **ours(counts, rounds, share * asked.seconds)}
    if "rllib" in parts:
        results["rllib"] = {**made, "by_task": beside_rllib(counts, rounds, share)}
    write_results(RESULTS.parent / "quick" / RESULTS.name if asked.quick else RESULTS, results)
    if not asked.quick:
        if "ours" in parts:
            write_tables(results)
        if "rllib" in parts:
            write_beside(results["rllib"])


def ours(counts: list[int], rounds: int, seconds: float) -> dict[str, Any]:
    cluster = Cluster()
    results = {
        "sleeping_1_ms": scaling(counts, rounds, seconds),
        "messages": messages(cluster),
        "replay": replay(),
    }
    cluster.close()
    for part, found in results.items():
        print(part)
        for name, figures in found.items():
            print(f"  {name}: {figures}")
    return results


if __name__ == "__main__":
    main()

"""Train a row with d3rlpy: `python d3rlpy.py ROW`, with the row as JSON. Prints one line of JSON.

Its `env_steps` are updates: training reads a dataset, and only the final evaluation steps an environment.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

TITLE = "d3rlpy"
REQUIREMENTS = ["torch==2.13.0", "d3rlpy==2.8.1", "gymnasium[classic-control]"]
CONSTRAINED = False  # requires another version of gymnasium


def iql(row: dict[str, Any]) -> Any:
    from d3rlpy.algos import IQLConfig

    return IQLConfig(
        expectile=row["expectile"],
        weight_temp=row["beta"],
        max_weight=row["max_weight"],
        value_encoder_factory=encoder(row),
        **common(row),
    )


def cql(row: dict[str, Any]) -> Any:
    from d3rlpy.algos import CQLConfig

    return CQLConfig(
        temp_learning_rate=row["lr"],
        initial_temperature=row["temperature"],
        alpha_learning_rate=0.0,  # keeps the weight of the penalty fixed
        initial_alpha=1.0,
        alpha_threshold=0.0,
        conservative_weight=2.0 * row["penalty"],  # d3rlpy doesn't halve squared errors, zhixing does
        n_action_samples=row["penalty_samples"],
        soft_q_backup=False,
        **common(row),
    )


ALGORITHMS = {"iql": iql, "cql": cql}


def common(row: dict[str, Any]) -> dict[str, Any]:
    from d3rlpy.preprocessing import MinMaxActionScaler

    return {
        "actor_learning_rate": row["lr"],
        "critic_learning_rate": row["lr"],
        "actor_encoder_factory": encoder(row),
        "critic_encoder_factory": encoder(row),
        "batch_size": row["batch_size"],
        "gamma": row["gamma"],
        "tau": row["tau"],
        "action_scaler": MinMaxActionScaler(minimum=np.array(row["action_low"]), maximum=np.array(row["action_high"])),
    }


def encoder(row: dict[str, Any]) -> Any:
    from d3rlpy.models.encoders import VectorEncoderFactory

    return VectorEncoderFactory(hidden_units=row["hidden_sizes"], activation=row["activation"])


def mean_return(algorithm: Any, row: dict[str, Any]) -> float:
    import gymnasium as gym

    env, total = gym.make(row["env"]), 0.0
    for episode in range(row["episodes"]):
        obs, _ = env.reset(seed=10_000 + episode)
        done = False
        while not done:
            obs, reward, terminated, truncated, _ = env.step(algorithm.predict(obs[None].astype(np.float32))[0])
            total += float(reward)
            done = terminated or truncated
    return total / row["episodes"]


def main() -> None:
    from measurement import print_measurement, take_snapshot

    sys.path.remove(str(Path(__file__).resolve().parent))  # otherwise `import d3rlpy` finds this file
    os.environ["TQDM_DISABLE"] = "1"
    import d3rlpy
    import structlog
    import torch
    from d3rlpy.optimizers import OptimizerWrapper

    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    row = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    d3rlpy.seed(row["seed"])
    with np.load(row["arrays"]) as arrays:
        data = d3rlpy.dataset.MDPDataset(**arrays)
    algorithm = ALGORITHMS[row["algorithm"]](row).create(device="cpu:0")
    snapshots: list[Any] = []

    def stopwatch(algo: Any, epoch: int, step: int) -> None:
        if step in (row["warmup_steps"], steps):
            snapshots.append(take_snapshot(step, step))

    steps = row["warmup_steps"] + row["measured_steps"]
    algorithm.fit(
        data,
        n_steps=steps,
        n_steps_per_epoch=steps,
        logger_adapter=d3rlpy.logging.NoopAdapterFactory(),
        show_progress=False,
        callback=stopwatch,
    )
    optimizers = [part._optim for part in vars(algorithm.impl.modules).values() if isinstance(part, OptimizerWrapper)]
    sizes = {id(p): p.numel() for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    versions = {TITLE: version("d3rlpy")}
    print_measurement(snapshots, sum(sizes.values()), versions, mean_return=mean_return(algorithm, row))


if __name__ == "__main__":
    main()

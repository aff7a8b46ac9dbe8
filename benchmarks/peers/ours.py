"""Train a row with zhixing: `python ours.py ROW`, with the row as JSON. Prints one line of JSON."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping
from typing import Any

import torch
from measurement import Snapshot, print_measurement, take_snapshot, use_one_core

import zhixing as zx

NEVER = 10**9


class Stopwatch(zx.Callback):
    """Takes snapshots at the end of the warm-up and at the end of training."""

    def __init__(self, warmup_steps: int, workers: int) -> None:
        self.warmup_steps, self.workers = warmup_steps, workers
        self.snapshots: list[Snapshot] = []

    def iteration_end(self, loop: zx.TrainingLoop, metrics: Mapping[str, torch.Tensor]) -> None:
        if loop.steps == self.warmup_steps or loop.progress >= 1.0:
            steps = sum(int(optimizer.steps[0]) for optimizer in loop.learner.optimizers().values())
            self.snapshots.append(take_snapshot(loop.steps, steps, self.workers))


def settings(row: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a row, all that a preset could change."""
    common = {
        "algorithm": row["algorithm"],
        "env": row["env"],
        "seed": row["seed"],
        "env_steps": row["warmup_steps"] + row["measured_steps"],
        "num_envs": row.get("num_envs", 1),
        "vector": {"backend": row.get("backend", "auto")},
        "distributed": {"workers": row.get("workers", 0)},
        "net": {"hidden_sizes": row["hidden_sizes"], "activation": row["activation"]},
        "lr": row["lr"],
        "gamma": row["gamma"],
        "num_threads": 1,
        "compile": row.get("compile", False),
        "device": "cpu",
        "tensorboard": False,
        "log_every": NEVER,
        "eval_every": 0,
        "eval_episodes": 1,
        "checkpoint_every": 0,
    }
    return {**common, **ALGORITHMS[row["algorithm"]](row)}


def ppo(row: dict[str, Any]) -> dict[str, Any]:
    names = ("rollout_steps", "minibatch_size", "epochs", "gae_lambda", "clip_range", "value_coef", "entropy_coef")
    return {
        "lr_schedule": "constant",
        "max_grad_norm": row["max_grad_norm"],
        "value_clip_range": row.get("value_clip_range"),
        **{name: row[name] for name in names},
    }


def off_policy(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "train_every": 1,
        "updates_per_step": 1.0,
        "learning_starts": row["random_steps"],
        "batch_size": row["batch_size"],
        "replay": {"capacity": row["replay_capacity"], "n_step": 1},
    }


def dqn(row: dict[str, Any]) -> dict[str, Any]:
    return {
        **off_policy(row),
        "max_grad_norm": row["max_grad_norm"],
        "target_update_interval": row["target_update_interval"],
        "tau": row.get("tau", 1.0),
        "loss": row.get("loss", "huber"),
        "epsilon_start": row["epsilon"],
        "epsilon_end": row["epsilon"],
    }


def continuous(row: dict[str, Any]) -> dict[str, Any]:
    names = ("policy_delay", "exploration_noise", "target_policy_noise", "target_noise_clip")
    return {**off_policy(row), "tau": row["tau"], **{name: row[name] for name in names if name in row}}


def qmix(row: dict[str, Any]) -> dict[str, Any]:
    names = ("mixer_size", "hyper_size", "target_update_interval", "max_grad_norm")
    return {
        "env": {"name": row["env"], "N": row["num_agents"], "max_cycles": row["episode_steps"]},
        "net": {"hidden_sizes": row["hidden_sizes"], "activation": row["activation"], "recurrent": "none"},
        "share_weights": True,
        "last_action": False,
        "td_lambda": 0.0,
        "train_every": row["rollout_steps"],
        "updates_per_step": row["updates_per_iteration"] / (row["num_envs"] * row["rollout_steps"]),
        "learning_starts": 0,
        "batch_size": row["batch_episodes"],
        "replay": {"capacity": row["replay_capacity"], "n_step": 1},
        "tau": 1.0,
        "epsilon_start": row["epsilon"],
        "epsilon_end": row["epsilon"],
        **{name: row[name] for name in names},
    }


def offline(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "dataset": row["data"],
        "offline_updates": row["warmup_steps"] + row["measured_steps"],
        **{name: row[name] for name in ("batch_size", "tau")},
    }


def iql(row: dict[str, Any]) -> dict[str, Any]:
    names = ("expectile", "beta", "max_weight")
    return {**offline(row), **{name: row[name] for name in names}, "actor_lr_schedule": "constant"}


def cql(row: dict[str, Any]) -> dict[str, Any]:
    names = ("penalty", "penalty_samples")
    return {**offline(row), **{name: row[name] for name in names}, "alpha": None}


ALGORITHMS = {"ppo": ppo, "dqn": dqn, "sac": continuous, "td3": continuous, "qmix": qmix, "iql": iql, "cql": cql}


def main() -> None:
    row = json.loads(sys.argv[1])
    if row.get("one_core"):
        use_one_core()
    stopwatch = Stopwatch(row["warmup_steps"], row.get("workers", 0))
    with tempfile.TemporaryDirectory() as folder:
        session = zx.Session(zx.config.load(**settings(row)), f"{folder}/run", [stopwatch], quiet=True)
        session.run()
        extra: dict[str, float] = {}
        if session.learner.executor is not None:
            extra["compile_seconds"] = session.learner.executor.compile_seconds
        if "data" in row:
            extra["optimizer_steps"] = row["measured_steps"]  # libraries split an update between different optimizers
            extra["mean_return"] = zx.evaluate(f"{folder}/run", row["episodes"], 10_000).mean_return
    parameters = sum(p.numel() for optimizer in session.learner.optimizers().values() for p in optimizer.parameters)
    print_measurement(stopwatch.snapshots, parameters, {"zhixing": zx.__version__}, **extra)


if __name__ == "__main__":
    main()

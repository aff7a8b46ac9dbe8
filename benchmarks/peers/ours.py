"""A row of the benchmark done by zhixing: `python ours.py ROW`, the row as JSON. Prints one line of JSON."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping
from typing import Any

import telling
import torch

import zhixing as zx
from zhixing.core.optimizer import Optimizer
from zhixing.training.callbacks import Callback
from zhixing.training.loop import TrainingLoop

NEVER = 10**9


class Stopwatch(Callback):
    """Runs from the end of the warm-up to the end of the last iteration."""

    def __init__(self, warmup_steps: int, workers: int) -> None:
        self.warmup_steps = warmup_steps
        self.workers = workers
        self.marks: list[telling.Mark] = []

    def iteration_end(self, loop: TrainingLoop, metrics: Mapping[str, torch.Tensor]) -> None:
        if loop.steps == self.warmup_steps or loop.progress >= 1.0:
            optimizers = [part for part in vars(loop.learner).values() if isinstance(part, Optimizer)]
            steps = sum(int(part.steps[0]) for part in optimizers)
            self.marks.append(telling.mark(loop.steps, steps, self.workers))


def settings(row: dict[str, Any]) -> dict[str, Any]:
    """The row in our words, complete, so that no preset has a say."""
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
        "log_every_steps": NEVER,
        "eval_every_steps": 0,
        "eval_episodes": 1,
        "checkpoint_every_steps": 0,
    }
    return {**common, **ALGORITHMS[row["algorithm"]](row)}


def ppo(row: dict[str, Any]) -> dict[str, Any]:
    names = ("rollout_steps", "minibatch_size", "epochs", "gae_lambda", "clip_range", "value_coef", "entropy_coef")
    own = {"max_grad_norm": row["max_grad_norm"], "value_clip_range": row.get("value_clip_range")}
    return {"anneal_lr": False, **own, **{name: row[name] for name in names}}


def dqn(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "max_grad_norm": row["max_grad_norm"],
        "train_every": 1,
        "updates_per_step": 1.0,
        "learning_starts": row["random_steps"],
        "batch_size": row["batch_size"],
        "replay": {"capacity": row["replay_capacity"], "n_step": 1},
        "target_update_interval": row["target_update_interval"],
        "tau": row.get("tau", 1.0),
        "loss": row.get("loss", "huber"),
        "epsilon_start": row["epsilon"],
        "epsilon_end": row["epsilon"],
    }


def continuous(row: dict[str, Any]) -> dict[str, Any]:
    own = {
        name: row[name]
        for name in ("policy_delay", "exploration_noise", "target_policy_noise", "target_noise_clip")
        if name in row
    }
    return {
        "train_every": 1,
        "updates_per_step": 1.0,
        "learning_starts": row["random_steps"],
        "batch_size": row["batch_size"],
        "replay": {"capacity": row["replay_capacity"], "n_step": 1},
        "tau": row["tau"],
        **own,
    }


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


def from_data(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "dataset": row["data"],
        "offline_updates": row["warmup_steps"] + row["measured_steps"],
        **{name: row[name] for name in ("batch_size", "tau")},
    }


def iql(row: dict[str, Any]) -> dict[str, Any]:
    own = {name: row[name] for name in ("expectile", "beta", "max_weight")}
    return {**from_data(row), **own, "actor_lr_decay": False}


def cql(row: dict[str, Any]) -> dict[str, Any]:
    own = {name: row[name] for name in ("penalty", "penalty_samples")}
    return {**from_data(row), **own, "alpha": None}


ALGORITHMS = {"ppo": ppo, "dqn": dqn, "sac": continuous, "td3": continuous, "qmix": qmix, "iql": iql, "cql": cql}


def main() -> None:
    row = json.loads(sys.argv[1])
    if row.get("one_core"):
        telling.one_core()
    stopwatch = Stopwatch(row["warmup_steps"], row.get("workers", 0))
    with tempfile.TemporaryDirectory() as folder:
        session = zx.Session(zx.config.load(**settings(row)), f"{folder}/run", [stopwatch], quiet=True)
        session.run()
        told: dict[str, float] = {}
        if session.learner.executor is not None:
            told["compile_seconds"] = session.learner.executor.compile_seconds
        if "data" in row:
            told["optimizer_steps"] = row["measured_steps"]  # how many optimizers share an update is nobody's business
            told["mean_return"] = zx.evaluate(f"{folder}/run", row["episodes"], 10_000).mean_return
    optimizers = [part for part in vars(session.learner).values() if isinstance(part, Optimizer)]
    parameters = sum(p.numel() for part in optimizers for p in part.parameters)
    telling.tell(stopwatch.marks, parameters, {"zhixing": zx.__version__}, **told)


if __name__ == "__main__":
    main()

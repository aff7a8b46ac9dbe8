"""Train a row with Stable-Baselines3: `python sb3.py ROW`, with the row as JSON. Prints one line of JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

TITLE = "Stable-Baselines3"
REQUIREMENTS = ["torch==2.13.0", "stable-baselines3==2.9.2", "gymnasium==1.4.0"]

# SBX has the same interface: `library` is one of the two packages, `activations` are functions for it
Row = dict[str, Any]


def ppo(library: Any, row: Row, activations: Row) -> Any:
    return library.PPO(
        n_steps=row["rollout_steps"],
        batch_size=row["minibatch_size"],
        n_epochs=row["epochs"],
        gae_lambda=row["gae_lambda"],
        clip_range=row["clip_range"],
        vf_coef=row["value_coef"],
        ent_coef=row["entropy_coef"],
        normalize_advantage=True,
        max_grad_norm=row["max_grad_norm"],
        **common(row, {"pi": row["hidden_sizes"], "vf": row["hidden_sizes"]}, activations),
    )


def dqn(library: Any, row: Row, activations: Row) -> Any:
    return library.DQN(
        target_update_interval=row["target_update_interval"],  # in environment steps; there is one per update
        exploration_initial_eps=row["epsilon"],
        exploration_final_eps=row["epsilon"],
        **({"max_grad_norm": row["max_grad_norm"]} if "max_grad_norm" in row else {}),
        **off_policy(row, activations, tau=1.0),
    )


def sac(library: Any, row: Row, activations: Row) -> Any:
    return library.SAC(**off_policy(row, activations, row["tau"]))


def td3(library: Any, row: Row, activations: Row) -> Any:
    import numpy as np
    from stable_baselines3.common.noise import NormalActionNoise

    return library.TD3(
        policy_delay=row["policy_delay"],
        target_policy_noise=row["target_policy_noise"],
        target_noise_clip=row["target_noise_clip"],
        action_noise=NormalActionNoise(np.zeros(1), np.full(1, row["exploration_noise"])),
        **off_policy(row, activations, row["tau"]),
    )


ALGORITHMS = {"ppo": ppo, "dqn": dqn, "sac": sac, "td3": td3}


def off_policy(row: Row, activations: Row, tau: float) -> Row:
    return {
        "train_freq": 1,
        "gradient_steps": 1,
        "learning_starts": row["random_steps"],
        "batch_size": row["batch_size"],
        "buffer_size": row["replay_capacity"],
        "tau": tau,
        **common(row, row["hidden_sizes"], activations),
    }


def common(row: Row, net_arch: Any, activations: Row) -> Row:
    from stable_baselines3.common.env_util import make_vec_env

    return {
        "policy": "MlpPolicy",
        "env": make_vec_env(row["env"], n_envs=row["num_envs"], seed=row["seed"]),
        "learning_rate": row["lr"],
        "gamma": row["gamma"],
        "policy_kwargs": {
            "net_arch": net_arch,
            "activation_fn": activations[row["activation"]],
            "optimizer_kwargs": {"eps": row["adam_epsilon"]},
        },
        "seed": row["seed"],
        "device": "cpu",
        "verbose": 0,
    }


def train(model: Any, row: Row, optimizer_steps: Callable[[], int]) -> list[Any]:
    """Train. Return snapshots at the end of the warm-up and at the end of training."""
    from measurement import take_snapshot
    from stable_baselines3.common.callbacks import BaseCallback

    snapshots: list[Any] = []

    class Stopwatch(BaseCallback):
        def _on_rollout_start(self) -> None:
            if self.num_timesteps == row["warmup_steps"]:
                self._take_snapshot()

        def _on_step(self) -> bool:
            return True

        def _on_training_end(self) -> None:
            self._take_snapshot()

        def _take_snapshot(self) -> None:
            snapshots.append(take_snapshot(model.num_timesteps, optimizer_steps()))

    model.learn(row["warmup_steps"] + row["measured_steps"], callback=Stopwatch(), log_interval=10**9)
    return snapshots


def main() -> None:
    import stable_baselines3
    import torch
    from measurement import print_measurement
    from torch import nn

    row = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    model = ALGORITHMS[row["algorithm"]](stable_baselines3, row, {"tanh": nn.Tanh, "relu": nn.ReLU})
    if hasattr(model, "actor"):
        optimizers = [model.actor.optimizer, model.critic.optimizer, getattr(model, "ent_coef_optimizer", None)]
    else:
        optimizers = [model.policy.optimizer]
    groups = [group["params"] for optimizer in optimizers if optimizer for group in optimizer.param_groups]
    states = [optimizer.state for optimizer in optimizers if optimizer]

    def optimizer_steps() -> int:
        return sum(int(state[group[0]]["step"]) for state, group in zip(states, groups, strict=True))

    snapshots = train(model, row, optimizer_steps)
    parameters = sum(p.numel() for group in groups for p in group)
    print_measurement(snapshots, parameters, {TITLE: stable_baselines3.__version__})


if __name__ == "__main__":
    main()

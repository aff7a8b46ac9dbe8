"""A row of the benchmark done by Stable-Baselines3: `python sb3.py ROW`, the row as JSON. Prints one line of JSON."""

from __future__ import annotations

import json
import platform
import sys
import time
from typing import Any

TITLE = "Stable-Baselines3"
REQUIREMENTS = ["torch==2.13.0", "stable-baselines3==2.9.2", "gymnasium==1.4.0"]


def ppo(row: dict[str, Any]) -> Any:
    from stable_baselines3 import PPO

    return PPO(
        n_steps=row["steps_per_iteration"],
        batch_size=row["minibatch_size"],
        n_epochs=row["epochs"],
        gae_lambda=row["gae_lambda"],
        clip_range=row["clip"],
        vf_coef=row["value_coef"],
        ent_coef=row["entropy_coef"],
        normalize_advantage=True,
        **common(row, {"pi": row["hidden_sizes"], "vf": row["hidden_sizes"]}),
    )


def dqn(row: dict[str, Any]) -> Any:
    from stable_baselines3 import DQN

    return DQN(
        train_freq=1,
        gradient_steps=1,
        learning_starts=row["random_steps"],
        batch_size=row["batch_size"],
        buffer_size=row["replay_capacity"],
        target_update_interval=row["sync_every_updates"],  # in environment steps: here one for each update
        tau=1.0,
        exploration_initial_eps=row["epsilon"],
        exploration_final_eps=row["epsilon"],
        **common(row, row["hidden_sizes"]),
    )


def sac(row: dict[str, Any]) -> Any:
    from stable_baselines3 import SAC

    return SAC(**continuous(row))


def td3(row: dict[str, Any]) -> Any:
    import numpy as np
    from stable_baselines3 import TD3
    from stable_baselines3.common.noise import NormalActionNoise

    return TD3(
        policy_delay=row["actor_delay"],
        target_policy_noise=row["smoothing"],
        target_noise_clip=row["smoothing_clip"],
        action_noise=NormalActionNoise(np.zeros(1), np.full(1, row["noise"])),
        **continuous(row),
    )


def continuous(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "train_freq": 1,
        "gradient_steps": 1,
        "learning_starts": row["random_steps"],
        "batch_size": row["batch_size"],
        "buffer_size": row["replay_capacity"],
        "tau": row["tau"],
        **common(row, row["hidden_sizes"]),
    }


ALGORITHMS = {"ppo": ppo, "dqn": dqn, "sac": sac, "td3": td3}


def common(row: dict[str, Any], net_arch: Any) -> dict[str, Any]:
    from stable_baselines3.common.env_util import make_vec_env
    from torch import nn

    return {
        "policy": "MlpPolicy",
        "env": make_vec_env(row["env"], n_envs=row["num_envs"], seed=row["seed"]),
        "learning_rate": row["lr"],
        "gamma": row["gamma"],
        **({"max_grad_norm": row["max_grad_norm"]} if "max_grad_norm" in row else {}),
        "policy_kwargs": {
            "net_arch": net_arch,
            "activation_fn": {"tanh": nn.Tanh, "relu": nn.ReLU}[row["activation"]],
            "optimizer_kwargs": {"eps": row["adam_epsilon"]},
        },
        "seed": row["seed"],
        "device": "cpu",
        "verbose": 0,
    }


def main() -> None:
    import gymnasium
    import stable_baselines3
    import torch
    from stable_baselines3.common.callbacks import BaseCallback

    row = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    model = ALGORITHMS[row["algorithm"]](row)
    if hasattr(model, "actor"):
        optimizers = [model.actor.optimizer, model.critic.optimizer, getattr(model, "ent_coef_optimizer", None)]
    else:
        optimizers = [model.policy.optimizer]
    groups = [group["params"] for optimizer in optimizers if optimizer for group in optimizer.param_groups]
    states = [optimizer.state for optimizer in optimizers if optimizer]
    parameters = [p for group in groups for p in group]
    marks: list[tuple[float, float, int, int]] = []  # seconds, of the CPU, environment steps, optimizer steps

    def mark() -> None:
        steps = sum(int(state[group[0]]["step"]) for state, group in zip(states, groups, strict=True))
        marks.append((time.perf_counter(), time.process_time(), model.num_timesteps, steps))

    class Stopwatch(BaseCallback):
        """Runs from the first iteration after the warm-up to the end of the last."""

        def _on_rollout_start(self) -> None:
            if self.num_timesteps == row["warmup_steps"]:
                mark()

        def _on_step(self) -> bool:
            return True

        def _on_training_end(self) -> None:
            mark()

    model.learn(row["warmup_steps"] + row["measured_steps"], callback=Stopwatch(), log_interval=10**9)
    seconds, cpu_seconds, env_steps, optimizer_steps = (end - begin for begin, end in zip(*marks, strict=True))
    result = {
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "env_steps": env_steps,
        "optimizer_steps": optimizer_steps,
        "parameters": sum(p.numel() for p in parameters),
        "threads": torch.get_num_threads(),
        "versions": {
            TITLE: stable_baselines3.__version__,
            "torch": torch.__version__,
            "gymnasium": gymnasium.__version__,
            "python": platform.python_version(),
        },
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()

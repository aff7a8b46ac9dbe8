"""The studies: which algorithms are trained where, for how long, and what they are compared with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

SLOW = {"seeds": 3, "episodes": 30}  # of rows whose runs take more than an hour
# Environments without a time limit get one on both sides: a greedy policy may never end an episode.
TIME_LIMITS = {"CliffWalking-v1": 200, "MinAtar/Breakout-v1": 5_000, "MinAtar/SpaceInvaders-v1": 5_000}


@dataclass(frozen=True)
class Row:
    """One algorithm in one environment."""

    algorithm: str
    env: str  # Gymnasium id
    env_steps: int
    name: str = ""  # in tables; by default the algorithm
    peer: str | None = None  # class in Stable-Baselines3 or its contrib package
    settings: Mapping[str, Any] = field(default_factory=dict)  # ours
    num_envs: int | None = None  # of both sides; None is the number in our preset and in the peer's settings
    seeds: int = 5  # 0, 1, ...
    episodes: int = 100  # of the final evaluation

    @property
    def title(self) -> str:
        return self.name or self.algorithm

    @property
    def key(self) -> str:
        return f"{self.title}-{self.env}".replace("/", "-").replace(" ", "-")


@dataclass(frozen=True)
class Study:
    rows: list[Row]
    settings: Mapping[str, Any] = field(default_factory=dict)  # ours, for every row
    peer_settings: str = "defaults"  # or "zoo": those of RL Baselines3 Zoo
    extras: bool = True  # whether the environments need more than zhixing's own dependencies


# budgets on-policy and off-policy
DISCRETE = {
    "LunarLander-v3": (300_000, 100_000),
    "Acrobot-v1": (100_000, 100_000),
    "MountainCar-v0": (100_000, 100_000),
    "Taxi-v4": (200_000, 200_000),
    "CliffWalking-v1": (200_000, 200_000),
    "MinAtar/Breakout-v1": (500_000, 300_000),
    "MinAtar/SpaceInvaders-v1": (500_000, 300_000),
    "MiniGrid-Empty-8x8-v0": (200_000, 200_000),
    "MiniGrid-DoorKey-5x5-v0": (200_000, 200_000),
}
CONTINUOUS = {
    "MountainCarContinuous-v0": (100_000, 100_000),
    "InvertedDoublePendulum-v5": (300_000, 100_000),
    "Reacher-v5": (300_000, 100_000),
    "Swimmer-v5": (300_000, 100_000),
}


def on_policy(algorithm: str, peer: str) -> list[Row]:
    budgets = {**DISCRETE, **CONTINUOUS}
    return [Row(algorithm, env, steps, peer=peer, num_envs=8) for env, (steps, _) in budgets.items()]


def off_policy(algorithm: str, peer: str, envs: Mapping[str, tuple[int, int]]) -> list[Row]:
    return [Row(algorithm, env, steps, peer=peer, num_envs=1) for env, (_, steps) in envs.items()]


DEFAULTS = [
    *on_policy("ppo", "PPO"),
    *on_policy("a2c", "A2C"),
    *on_policy("trpo", "TRPO"),
    # half the steps, each of which takes ten times as long
    *(
        replace(row, env_steps=row.env_steps // 2, name="recurrent ppo", settings={"net.recurrent": "lstm"}, seeds=3)
        for row in on_policy("ppo", "RecurrentPPO")
    ),
    *off_policy("dqn", "DQN", DISCRETE),
    *off_policy("qrdqn", "QRDQN", DISCRETE),
    *off_policy("sac", "SAC", CONTINUOUS),
    *off_policy("td3", "TD3", CONTINUOUS),
    # 20 updates per step: no peer has the algorithm, and a longer run takes hours
    *(Row("redq", env, 20_000, num_envs=1, **SLOW) for env in CONTINUOUS),
]
MUJOCO = [
    *(Row("ppo", f"{name}-v5", 1_000_000, peer="PPO") for name in ("HalfCheetah", "Hopper", "Walker2d", "Ant")),
    *(Row("sac", f"{name}-v5", 1_000_000, peer="SAC", **SLOW) for name in ("Hopper", "HalfCheetah")),
    *(Row("td3", f"{name}-v5", 1_000_000, peer="TD3", **SLOW) for name in ("Hopper", "HalfCheetah")),
]
SIMBA = {"net.kind": "simba", "net.hidden_sizes": [128], "critic_hidden_sizes": [512, 512], "normalize_obs": True}
SIMBA |= {"lr": 1e-4, "optimizer": "adamw", "weight_decay": 0.01, "updates_per_step": 2.0}  # Lee et al. (2024)
EFFICIENT = [
    row
    for name in ("HalfCheetah", "Hopper", "Walker2d", "Ant")
    for row in (
        Row("crossq", f"{name}-v5", 200_000, peer="CrossQ", num_envs=1, **SLOW),
        Row("tqc", f"{name}-v5", 200_000, peer="TQC", num_envs=1, **SLOW),
        Row("droq", f"{name}-v5", 200_000, num_envs=1, **SLOW),
        Row("sac", f"{name}-v5", 200_000, name="sac simba", num_envs=1, settings=SIMBA, **SLOW),
    )
]
STUDIES = {
    "defaults": Study(DEFAULTS, settings={"preset": False}),
    "mujoco": Study(MUJOCO, peer_settings="zoo"),
    "efficient": Study(EFFICIENT),
    "smoke": Study(
        [
            Row("ppo", "CartPole-v1", 1_024, num_envs=2, seeds=2, episodes=4, settings={"rollout_steps": 64}),
            Row("dqn", "CartPole-v1", 600, num_envs=1, seeds=1, episodes=4, settings={"learning_starts": 100}),
        ],
        settings={"preset": False},
        extras=False,
    ),
}

"""A custom task in torch: thousands of environments as a few tensors, on the learner's device.

A task is a class with pure functions of the state `[k,N]` of N environments. It is checked before training starts. Run
it with `python torch_task.py`.

Or on the command line, in the folder of this file:

    zhixing train ppo --env torch_task:Dock env.thrust=0.5 num_envs=256 env_steps=200000 --out runs/dock
"""

from typing import ClassVar

import numpy as np
import torch
from gymnasium.spaces import Box, Discrete
from torch import Tensor

import zhixing as zx
from zhixing.envs.torch_native import TorchEnv, Transition, uniform

GOAL = 0.9  # mean return: 1 for docking gently, 0 for crashing or running out of time


class Dock(TorchEnv):
    """Bring a spaceship to a stop at the dock, x = 0. Actions: brake, wait, accelerate."""

    observation_space = Box(-4.0, 4.0, (2,), np.float32)  # x and speed
    action_space = Discrete(3)
    max_episode_steps = 60
    logged_info_keys: ClassVar[tuple[str, ...]] = ("speed",)

    def __init__(self, thrust: float = 0.3) -> None:
        self.thrust = thrust  # options are set as env.thrust=0.5

    def initial_state(self, num_envs: int, rng: torch.Generator) -> Tensor:
        return torch.cat([uniform(-2.0, -1.0, (1, num_envs), rng), uniform(0.0, 0.5, (1, num_envs), rng)])

    def transition(self, state: Tensor, action: Tensor) -> Transition:
        x, speed = state
        speed = (speed + 0.1 * self.thrust * (action - 1)).clamp(-2.0, 2.0)
        x = (x + 0.1 * speed).clamp(-4.0, 4.0)
        arrived = x >= 0.0
        reward = (arrived & (speed < 0.3)).float()  # faster is a crash
        return Transition(torch.stack([x, speed]), reward, arrived)

    def observe(self, state: Tensor) -> dict[str, Tensor]:
        return {"obs": state.T}  # also "mask" for invalid actions, "state" and "alive" for several agents

    def info(self, state: Tensor) -> dict[str, Tensor]:
        return {"speed": state[1]}

    def render(self, state: Tensor) -> np.ndarray:
        """Optional, for videos: an image of one environment."""
        image = np.full((32, 128, 3), 20, np.uint8)
        image[:, 96:] = (60, 60, 90)  # the dock
        ship = int(np.clip(96 + 32 * float(state[0]), 8, 120))
        image[12:20, ship - 8 : ship] = (240, 200, 80)
        return image


def main() -> dict:
    return zx.train(
        "ppo", env="torch_task:Dock", env_steps=300_000, stop_return=GOAL, num_envs=128, rollout_steps=32,
        minibatch_size=1024, lr=2e-3, gamma=0.99, eval_every=20_000,
    )  # fmt: skip


if __name__ == "__main__":
    result = main()
    print(f"{100 * result['final_return']:.0f} % of the ships docked after {result['env_steps']:,} steps")

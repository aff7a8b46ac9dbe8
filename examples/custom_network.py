"""A custom network: any `nn.Module` from observations, here a dict of them, to features `[B,n]`.

Name it `module:Class`. Its constructor takes the observation space; the learner adds the output heads.

Run it with `python custom_network.py`.
"""

import gymnasium as gym
import numpy as np
import torch
from gymnasium.spaces import Box, Dict, Discrete
from torch import Tensor, nn

import zhixing as zx

GOAL = 9.0  # mean return; the best is 10, random actions get 2.5


class Quadrants(gym.Env):
    """Name the bright quadrant of an image if `rule` is 0, the opposite quadrant if it is 1."""

    observation_space = Dict({"image": Box(0, 255, (1, 8, 8), np.uint8), "rule": Discrete(2)})
    action_space = Discrete(4)

    def _next_obs(self) -> dict:
        self.bright, self.rule = int(self.np_random.integers(4)), int(self.np_random.integers(2))
        image = self.np_random.integers(0, 100, (1, 8, 8), np.uint8)
        row, column = divmod(self.bright, 2)
        image[0, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4] += 100
        return {"image": image, "rule": self.rule}

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[dict, dict]:
        super().reset(seed=seed)
        self.steps = 0
        return self._next_obs(), {}

    def step(self, action: int) -> tuple[dict, float, bool, bool, dict]:
        correct = self.bright if self.rule == 0 else 3 - self.bright
        self.steps += 1
        return self._next_obs(), float(action == correct), False, self.steps == 10, {}


class Net(nn.Module):
    """Observations keep their dtype and shape and gain a batch dimension."""

    def __init__(self, space: Dict) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Conv2d(1, 8, 4, stride=4), nn.ReLU(), nn.Flatten())  # [B,1,8,8] -> [B,32]
        self.rule = nn.Embedding(int(space["rule"].n), 8)
        self.torso = nn.Sequential(nn.Linear(32 + 8, 64), nn.ReLU())

    def forward(self, obs: dict[str, Tensor]) -> Tensor:
        image = self.image(obs["image"].float() / 255)
        return self.torso(torch.cat([image, self.rule(obs["rule"])], -1))


def main() -> dict:
    return zx.train(
        "ppo", env="custom_network:Quadrants", net__kind="custom_network:Net", env_steps=40_000, stop_return=GOAL,
        num_envs=8, rollout_steps=64, minibatch_size=128, lr=2e-3, gamma=0.0,
        num_threads=1, vector__backend="serial", eval_every=1_000,
    )  # fmt: skip


if __name__ == "__main__":
    result = main()
    print(f"{result['final_return']:.2f} of 10 correct")

"""Your own network: any `nn.Module` that turns observations, here a dict of them, into features `[B,n]`.

It is named `module:Class` and made with the observation space; the learner adds its heads.

Run it with `python own_network.py`.
"""

import gymnasium as gym
import numpy as np
import torch
from gymnasium.spaces import Box, Dict, Discrete
from torch import Tensor, nn

import zhixing as zx

GOAL = 9.0  # of 10 right answers per episode; guessing finds 2.5


class Quadrants(gym.Env):
    """One quadrant of a picture is bright. Under rule 0 it is the right answer, under rule 1 its opposite is."""

    observation_space = Dict({"picture": Box(0, 255, (1, 8, 8), np.uint8), "rule": Discrete(2)})
    action_space = Discrete(4)

    def _seen(self) -> dict:
        self.bright, self.rule = int(self.np_random.integers(4)), int(self.np_random.integers(2))
        picture = self.np_random.integers(0, 100, (1, 8, 8), np.uint8)
        row, column = divmod(self.bright, 2)
        picture[0, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4] += 100
        return {"picture": picture, "rule": self.rule}

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[dict, dict]:
        super().reset(seed=seed)
        self.steps = 0
        return self._seen(), {}

    def step(self, action: int) -> tuple[dict, float, bool, bool, dict]:
        right = self.bright if self.rule == 0 else 3 - self.bright
        self.steps += 1
        return self._seen(), float(action == right), False, self.steps == 10, {}


class Net(nn.Module):
    """Observations arrive as the environment gives them, with a leading dimension: bytes stay bytes."""

    def __init__(self, space: Dict) -> None:
        super().__init__()
        self.eye = nn.Sequential(nn.Conv2d(1, 8, 4, stride=4), nn.ReLU(), nn.Flatten())  # [B,1,8,8] -> [B,32]
        self.rule = nn.Embedding(int(space["rule"].n), 8)
        self.mind = nn.Sequential(nn.Linear(32 + 8, 64), nn.ReLU())

    def forward(self, obs: dict[str, Tensor]) -> Tensor:
        seen = self.eye(obs["picture"].float() / 255)
        return self.mind(torch.cat([seen, self.rule(obs["rule"])], -1))


def main() -> dict:
    return zx.train(
        "ppo", env="own_network:Quadrants", net__kind="own_network:Net", env_steps=40_000, stop_return=GOAL,
        num_envs=8, rollout_steps=64, minibatch_size=128, lr=2e-3, gamma=0.0,
        num_threads=1, vector__backend="serial", eval_every_steps=1_000,
    )  # fmt: skip


if __name__ == "__main__":
    result = main()
    print(f"{result['final_return']:.2f} of 10 right")

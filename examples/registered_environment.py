"""An environment that a package registers with Gymnasium: `package:Id-v0` imports the package first. This file is one.

Run it with `python registered_environment.py`, or:

    zhixing train ppo --env registered_environment:Corridor-v0 env_steps=5000
"""

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Discrete

import zhixing as zx

GOAL = 0.9  # mean return; random actions get about 0.2


class Corridor(gym.Env):
    """Reach the right end. Actions: left, right."""

    observation_space, action_space = Box(0, 6, (1,)), Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.position = 0
        return np.float32([0]), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.position = max(0, self.position + (1 if action else -1))
        return np.float32([self.position]), float(self.position == 6), self.position == 6, False, {}


gym.register("Corridor-v0", "registered_environment:Corridor", max_episode_steps=20)


def main() -> dict:
    return zx.train(
        "ppo", "registered_environment:Corridor-v0", num_envs=8, lr=3e-3, eval_every=1_024, stop_return=GOAL
    )


if __name__ == "__main__":
    main()

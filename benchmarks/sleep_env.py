"""An environment whose steps only wait."""

from __future__ import annotations

import time
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Discrete


class SleepEnv(gym.Env):
    """A step sleeps for `seconds`. Observations are `size` zeros, or with `image` a stack of four; 200 steps long."""

    def __init__(self, seconds: float = 1e-3, size: int = 4, image: bool = False) -> None:
        self.observation_space = Box(0, 255, (4, 84, 84), np.uint8) if image else Box(-1.0, 1.0, (size,), np.float32)
        self.action_space = Discrete(4)
        self.seconds, self.t = seconds, 0
        self.obs = np.zeros(self.observation_space.shape, self.observation_space.dtype)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.t = 0
        return self.obs, {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        time.sleep(self.seconds)
        self.t += 1
        return self.obs, 1.0, False, self.t == 200, {}

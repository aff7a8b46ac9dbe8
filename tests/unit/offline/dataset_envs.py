"""An environment with bytes as observations, for data with other numbers."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box


class Bytes(gym.Env):
    observation_space = Box(0, 255, (16,), np.uint8)
    action_space = Box(-1.0, 1.0, (1,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        return np.zeros(16, np.uint8), {}

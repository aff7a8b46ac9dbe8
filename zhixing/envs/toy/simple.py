"""Tasks that any algorithm learns within seconds: one with discrete actions, one with continuous ones."""

from __future__ import annotations

import numpy as np
from gymnasium.spaces import Box, Discrete

from zhixing.envs.toy.base import PIXELS, Array, ToyEnv


class Match(ToyEnv):
    """A cue is shown, the action that equals it earns 1. Ten steps: random play earns 2.5, the best 10."""

    episode_steps = 10
    cues = 4

    def __init__(self, render_mode: str | None = None) -> None:
        super().__init__(render_mode)
        self.observation_space = Box(0.0, 1.0, (self.cues,), np.float32)
        self.action_space = Discrete(self.cues)

    def begin(self) -> Array:
        return np.array([self.np_random.integers(self.cues)])

    def act(self, action: int) -> tuple[float, bool]:
        reward = float(action == self.values[0])
        self.values = self.begin()
        return reward, False

    def observe(self) -> Array:
        return np.eye(self.cues, dtype=np.float32)[int(self.values[0])]

    def render(self) -> Array:
        """The cue's column is bright."""
        picture = np.full((PIXELS, PIXELS, 3), 40, np.uint8)
        width, cue = PIXELS // self.cues, int(self.values[0])
        picture[:, cue * width : (cue + 1) * width] = (240, 200, 60)
        return picture


class Reach(ToyEnv):
    """Move to a target on a line, at most 0.3 per step; each step costs the distance left, for 20 steps.

    Going straight there earns -0.80 on average (the sum over k of (2 - 0.3k)^3 / 12), uniformly random actions -14.0.
    """

    episode_steps = 20
    stride = 0.3

    def __init__(self, render_mode: str | None = None) -> None:
        super().__init__(render_mode)
        self.observation_space = Box(-1.0, 1.0, (2,), np.float32)  # position, target
        self.action_space = Box(-1.0, 1.0, (1,), np.float32)

    def begin(self) -> Array:
        return self.np_random.uniform(-1.0, 1.0, 2)

    def act(self, action: Array) -> tuple[float, bool]:
        move = self.stride * float(np.clip(action[0], -1.0, 1.0))
        self.values[0] = np.clip(self.values[0] + move, -1.0, 1.0)
        return -abs(float(self.values[0] - self.values[1])), False

    def observe(self) -> Array:
        return self.values.astype(np.float32)

    def render(self) -> Array:
        """The target is a green line, the position a white dot."""
        picture = np.full((PIXELS, PIXELS, 3), 40, np.uint8)
        position, target = ((self.values + 1.0) / 2.0 * (PIXELS - 5)).astype(int)
        picture[:, target : target + 5] = (60, 180, 90)
        picture[PIXELS // 2 - 2 : PIXELS // 2 + 3, position : position + 5] = 255
        return picture

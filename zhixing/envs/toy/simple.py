"""Environments that algorithms learn within seconds: one with discrete actions, one with continuous actions."""

from __future__ import annotations

import numpy as np
from gymnasium.spaces import Box, Discrete

from zhixing.envs.toy.base import PIXELS, Array, ToyEnv


class Match(ToyEnv):
    """The reward is 1 if the action equals the observed cue.

    An episode has ten steps. The best return is 10; random actions get 2.5.
    """

    episode_steps = 10
    cues = 4

    def __init__(self, render_mode: str | None = None) -> None:
        super().__init__(render_mode)
        self.observation_space = Box(0.0, 1.0, (self.cues,), np.float32)
        self.action_space = Discrete(self.cues)

    def initial_state(self) -> Array:
        return np.array([self.np_random.integers(self.cues)])

    def transition(self, action: int) -> tuple[float, bool]:
        reward = float(action == self.state[0])
        self.state = self.initial_state()
        return reward, False

    def get_obs(self) -> Array:
        return np.eye(self.cues, dtype=np.float32)[int(self.state[0])]

    def render(self) -> Array:
        """Draw the cue as a bright column."""
        image = np.full((PIXELS, PIXELS, 3), 40, np.uint8)
        width, cue = PIXELS // self.cues, int(self.state[0])
        image[:, cue * width : (cue + 1) * width] = (240, 200, 60)
        return image


class Reach(ToyEnv):
    """Move to a target on a line, by at most 0.3 per step. The reward is minus the distance to the target. 20 steps.

    The mean return of moving straight to the target is -0.80 (the sum over k of -(2 - 0.3k)^3 / 12), that of uniformly
    random actions -14.0.
    """

    episode_steps = 20
    stride = 0.3

    def __init__(self, render_mode: str | None = None) -> None:
        super().__init__(render_mode)
        self.observation_space = Box(-1.0, 1.0, (2,), np.float32)  # position, target
        self.action_space = Box(-1.0, 1.0, (1,), np.float32)

    def initial_state(self) -> Array:
        return self.np_random.uniform(-1.0, 1.0, 2)

    def transition(self, action: Array) -> tuple[float, bool]:
        move = self.stride * float(np.clip(action[0], -1.0, 1.0))
        self.state[0] = np.clip(self.state[0] + move, -1.0, 1.0)
        return -abs(float(self.state[0] - self.state[1])), False

    def get_obs(self) -> Array:
        return self.state.astype(np.float32)

    def render(self) -> Array:
        """Draw the target as a green line and the position as a white dot."""
        image = np.full((PIXELS, PIXELS, 3), 40, np.uint8)
        position, target = ((self.state + 1.0) / 2.0 * (PIXELS - 5)).astype(int)
        image[:, target : target + 5] = (60, 180, 90)
        image[PIXELS // 2 - 2 : PIXELS // 2 + 3, position : position + 5] = 255
        return image

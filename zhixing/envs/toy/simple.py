"""Environments that algorithms learn within seconds: with discrete actions, with continuous ones, and with both."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.spaces import Box, Dict, Discrete

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


class Throw(ToyEnv):
    """Choose the observed basket of four and throw at the observed distance. Actions are hybrid.

    The reward is 0 for a wrong basket, else 1 minus the error of the distance, but at least 0. An episode has ten
    steps. The best return is 10. Returns of other policies: random actions 10 / 4 * 5 / 12 = 1.04; the right distance
    to random baskets 2.5; the right basket, but always distance 0, 5.
    """

    episode_steps = 10
    baskets = 4

    def __init__(self, render_mode: str | None = None) -> None:
        super().__init__(render_mode)
        self.observation_space = Box(-1.0, 1.0, (self.baskets + 1,), np.float32)
        self.action_space = Dict({"basket": Discrete(self.baskets), "distance": Box(-1.0, 1.0, (), np.float32)})

    def initial_state(self) -> Array:
        return np.array([self.np_random.integers(self.baskets), self.np_random.uniform(-1.0, 1.0)])

    def transition(self, action: dict[str, Any]) -> tuple[float, bool]:
        error = abs(float(action["distance"]) - self.state[1])
        reward = max(0.0, 1.0 - error) * float(action["basket"] == self.state[0])
        self.state = self.initial_state()
        return reward, False

    def get_obs(self) -> Array:
        return np.append(np.eye(self.baskets)[int(self.state[0])], self.state[1]).astype(np.float32)

    def render(self) -> Array:
        """Draw the basket as a bright square in its column, at the height of the distance."""
        image = np.full((PIXELS, PIXELS, 3), 40, np.uint8)
        width, basket = PIXELS // self.baskets, int(self.state[0])
        height = int((1.0 - self.state[1]) / 2.0 * (PIXELS - width))
        image[height : height + width, basket * width : (basket + 1) * width] = (240, 200, 60)
        return image

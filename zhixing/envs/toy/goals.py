"""A task whose every episode has a goal of its own, told in the observation, and no reward before it is reached."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.spaces import Dict, Discrete, MultiBinary

from zhixing.envs.toy.base import PIXELS, Array, ToyEnv


class BitFlip(ToyEnv):
    """Flip one of n bits per step until they equal the goal: 0 for the step that gets there, which ends the episode,
    -1 for any other, at most n of them (Andrychowicz et al., 2017, section 3.1).

    With k bits to flip the best return is 1 - k, on average 1 - n/2 (-6.5 for 15 bits; k is never 0). Random play
    almost never gets there: -15.0 for 15 bits.
    """

    def __init__(self, bits: int, render_mode: str | None = None) -> None:
        super().__init__(render_mode)
        self.bits = self.episode_steps = bits
        parts = ("observation", "achieved_goal", "desired_goal")
        self.observation_space = Dict({part: MultiBinary(bits) for part in parts})
        self.action_space = Discrete(bits)

    def begin(self) -> Array:
        """Two rows: the bits and the goal."""
        while True:
            values = self.np_random.integers(0, 2, (2, self.bits), np.int8)
            if (values[0] != values[1]).any():
                return values

    def act(self, action: int) -> tuple[float, bool]:
        self.values[0, action] ^= 1
        reached = bool((self.values[0] == self.values[1]).all())
        return (0.0 if reached else -1.0), reached

    def compute_reward(self, achieved_goal: Array, desired_goal: Array, info: Any) -> Array:
        """Of goals `[n]` or many of them `[...,n]`."""
        return np.where(self.compute_terminated(achieved_goal, desired_goal, info), 0.0, -1.0)

    def compute_terminated(self, achieved_goal: Array, desired_goal: Array, info: Any) -> Array:
        equal: Array = (achieved_goal == desired_goal).all(-1)
        return equal

    def observe(self) -> dict[str, Array]:
        bits, goal = self.values.copy()
        return {"observation": bits, "achieved_goal": bits.copy(), "desired_goal": goal}

    def tell(self) -> dict[str, Any]:
        return {"is_success": bool((self.values[0] == self.values[1]).all())}

    def render(self) -> Array:
        """The bits above, the goal below; ones are bright."""
        columns = np.arange(PIXELS) * self.bits // PIXELS
        rows = np.repeat(self.values[:, columns], PIXELS // 2, axis=0)
        return np.where(rows[..., None] == 1, (240, 200, 60), (40, 40, 40)).astype(np.uint8)

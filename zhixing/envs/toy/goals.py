"""An environment with a different goal in each episode and a sparse reward."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.spaces import Dict, Discrete, MultiBinary

from zhixing.envs.toy.base import PIXELS, Array, ToyEnv


class BitFlip(ToyEnv):
    """Flip one of n bits per step until they equal the goal (Andrychowicz et al., 2017, section 3.1).

    The step that reaches the goal has reward 0 and terminates the episode. All other steps have reward -1. Episodes are
    truncated after n steps.

    If k bits differ from the goal, the best return is 1 - k, on average 1 - n/2 (-6.5 for 15 bits; k is never 0).
    Random actions almost never reach the goal: their mean return is -15.0 for 15 bits.
    """

    def __init__(self, bits: int, render_mode: str | None = None) -> None:
        super().__init__(render_mode)
        self.bits = self.episode_steps = bits
        parts = ("observation", "achieved_goal", "desired_goal")
        self.observation_space = Dict({part: MultiBinary(bits) for part in parts})
        self.action_space = Discrete(bits)

    def initial_state(self) -> Array:
        """Return two rows: the bits and the goal."""
        while True:
            state = self.np_random.integers(0, 2, (2, self.bits), np.int8)
            if (state[0] != state[1]).any():
                return state

    def transition(self, action: int) -> tuple[float, bool]:
        self.state[0, action] ^= 1
        reached = bool((self.state[0] == self.state[1]).all())
        return (0.0 if reached else -1.0), reached

    def compute_reward(self, achieved_goal: Array, desired_goal: Array, info: Any) -> Array:
        """Return the rewards `[...]` of achieved and desired goals `[..., n]`."""
        return np.where(self.compute_terminated(achieved_goal, desired_goal, info), 0.0, -1.0)

    def compute_terminated(self, achieved_goal: Array, desired_goal: Array, info: Any) -> Array:
        equal: Array = (achieved_goal == desired_goal).all(-1)
        return equal

    def get_obs(self) -> dict[str, Array]:
        bits, goal = self.state.copy()
        return {"observation": bits, "achieved_goal": bits.copy(), "desired_goal": goal}

    def get_info(self) -> dict[str, Any]:
        return {"is_success": bool((self.state[0] == self.state[1]).all())}

    def render(self) -> Array:
        """Draw the bits at the top and the goal at the bottom; ones are bright."""
        columns = np.arange(PIXELS) * self.bits // PIXELS
        rows = np.repeat(self.state[:, columns], PIXELS // 2, axis=0)
        return np.where(rows[..., None] == 1, (240, 200, 60), (40, 40, 40)).astype(np.uint8)

"""An environment with image observations."""

from __future__ import annotations

import numpy as np
from gymnasium.spaces import Box, Discrete

from zhixing.envs.toy.base import PIXELS, Array, ToyEnv

SIDE = 32  # of an observation, in pixels


class PixelCatch(ToyEnv):
    """Catch falling balls with a paddle. Observations are grayscale images [32, 32, 1].

    The image is a grid of 8 x 8 cells of 4 x 4 pixels. The ball (white) starts in a random cell of the top row and
    falls by one cell per step. Actions move the paddle (gray, in the bottom row) one cell left, not at all, or one cell
    right. When the ball reaches the bottom row, the reward is 1 if the paddle is there, and a new ball appears. An
    episode has 28 steps and therefore four balls.

    Every ball can be reached, so the best return is 4. A policy that ignores the image gets 0.5, because the ball's
    column is one of eight with equal probability; so do random actions.
    """

    episode_steps = 28
    cells = 8  # per row and per column

    def __init__(self, render_mode: str | None = None) -> None:
        super().__init__(render_mode)
        self.observation_space = Box(0, 255, (SIDE, SIDE, 1), np.uint8)
        self.action_space = Discrete(3)

    def initial_state(self) -> Array:
        """Return the ball's row and column, and the paddle's column."""
        return np.array([0, *self.np_random.integers(self.cells, size=2)])

    def transition(self, action: int) -> tuple[float, bool]:
        row, column, paddle = self.state
        paddle = min(max(paddle + int(action) - 1, 0), self.cells - 1)
        row += 1
        caught = row == self.cells - 1 and column == paddle
        if row == self.cells - 1:
            row, column = 0, self.np_random.integers(self.cells)
        self.state = np.array([row, column, paddle])
        return float(caught), False

    def get_obs(self) -> Array:
        return self._draw(SIDE)

    def render(self) -> Array:
        """Draw the observation, enlarged."""
        return np.repeat(self._draw(PIXELS), 3, axis=-1)

    def _draw(self, side: int) -> Array:
        image = np.zeros((side, side, 1), np.uint8)
        row, column, paddle = self.state * (side // self.cells)
        size = side // self.cells
        image[row : row + size, column : column + size] = 255
        image[-size:, paddle : paddle + size] = 128
        return image

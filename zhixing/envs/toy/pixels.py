"""A task that is seen as a picture."""

from __future__ import annotations

import numpy as np
from gymnasium.spaces import Box, Discrete

from zhixing.envs.toy.base import PIXELS, Array, ToyEnv

SIDE = 32  # pixels of what the agent sees


class PixelCatch(ToyEnv):
    """Catch falling balls with a paddle, seen as a grey picture of 32 by 32. Both are squares of 4 by 4 pixels: the
    ball white, the paddle, in the lowest row, grey. A ball appears anywhere at the top and falls by its own size per
    step; actions move the paddle left, not at all, or right, by as much. The step that takes the ball down to the
    paddle's row earns 1 if the paddle is there, and shows the next ball. 28 steps: four balls.

    A ball can always be reached, so that the best return is 4. Whoever doesn't look earns 0.5, since the ball's column
    is any of eight, whatever is done; so does random play.
    """

    episode_steps = 28
    cells = 8  # to a row, and rows

    def __init__(self, render_mode: str | None = None) -> None:
        super().__init__(render_mode)
        self.observation_space = Box(0, 255, (SIDE, SIDE, 1), np.uint8)
        self.action_space = Discrete(3)

    def begin(self) -> Array:
        """The ball's row and column, and the paddle's column."""
        return np.array([0, *self.np_random.integers(self.cells, size=2)])

    def act(self, action: int) -> tuple[float, bool]:
        row, column, paddle = self.values
        paddle = min(max(paddle + int(action) - 1, 0), self.cells - 1)
        row += 1
        caught = row == self.cells - 1 and column == paddle
        if row == self.cells - 1:
            row, column = 0, self.np_random.integers(self.cells)
        self.values = np.array([row, column, paddle])
        return float(caught), False

    def observe(self) -> Array:
        return self._picture(SIDE)

    def render(self) -> Array:
        """What the agent sees, larger."""
        return np.repeat(self._picture(PIXELS), 3, axis=-1)

    def _picture(self, side: int) -> Array:
        picture = np.zeros((side, side, 1), np.uint8)
        row, column, paddle = self.values * (side // self.cells)
        size = side // self.cells
        picture[row : row + size, column : column + size] = 255
        picture[-size:, paddle : paddle + size] = 128
        return picture

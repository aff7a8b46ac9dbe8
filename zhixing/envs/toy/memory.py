"""Tasks that show too little at each step: only an agent that remembers does well."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.envs.classic_control.cartpole import CartPoleEnv
from gymnasium.spaces import Box, Discrete

from zhixing.envs.toy.base import PIXELS, Array, ToyEnv
from zhixing.errors import UserError


class Recall(ToyEnv):
    """One of four cues is shown at the first step, nothing at the `delay` steps after it, then the question: the action
    that equals the cue earns 1, and the episode terminates. Other actions do nothing.

    Whoever remembers earns 1, whoever doesn't 0.25, as does random play.
    """

    cues = 4

    def __init__(self, delay: int = 10, render_mode: str | None = None) -> None:
        if delay < 0:
            raise UserError(f"env.delay={delay}: toy/recall needs a delay of 0 steps or more")
        super().__init__(render_mode)
        self.delay = delay
        self.observation_space = Box(0.0, 1.0, (self.cues + 1,), np.float32)  # the cue, and whether to answer now
        self.action_space = Discrete(self.cues)

    @property
    def asked(self) -> bool:
        return self.steps == self.delay + 1

    def begin(self) -> Array:
        return np.array([self.np_random.integers(self.cues)])

    def act(self, action: int) -> tuple[float, bool]:
        return float(self.asked and action == self.values[0]), self.asked

    def observe(self) -> Array:
        shown = np.zeros(self.cues + 1, np.float32)
        shown[-1] = self.asked
        if self.steps == 0:
            shown[int(self.values[0])] = 1.0
        return shown

    def render(self) -> Array:
        """The cue's column is bright while it is shown; all is green when the answer is due."""
        picture = np.full((PIXELS, PIXELS, 3), (60, 180, 90) if self.asked else 40, np.uint8)
        if self.steps == 0:
            width, cue = PIXELS // self.cues, int(self.values[0])
            picture[:, cue * width : (cue + 1) * width] = (240, 200, 60)
        return picture


class CartPoleNoVelocity(ToyEnv):
    """Gymnasium's CartPole-v1 that shows the cart's position and the pole's angle, not how fast they change.

    The best return is 500, random play earns about 22.
    """

    metadata = CartPoleEnv.metadata
    episode_steps = 500
    seen = (0, 2)  # of position, velocity, angle, angular velocity

    def __init__(self, render_mode: str | None = None) -> None:
        super().__init__(render_mode)
        whole = CartPoleEnv(render_mode=render_mode)
        assert isinstance(whole.observation_space, Box)
        high = whole.observation_space.high[list(self.seen)]
        self.observation_space, self.action_space = Box(-high, high), whole.action_space
        self.env: Any = whole

    def begin(self) -> Array:
        self.env.np_random = self.np_random
        self.env.reset()
        return np.array(self.env.state)

    def act(self, action: int) -> tuple[float, bool]:
        # what that task keeps besides its state is only to warn of steps after the end
        self.env.state, self.env.steps_beyond_terminated = self.values.copy(), None
        _, reward, terminated, _, _ = self.env.step(action)
        self.values = np.array(self.env.state)
        return float(reward), terminated

    def observe(self) -> Array:
        return self.values[list(self.seen)].astype(np.float32)

    def render(self) -> Any:
        self.env.state = self.values
        return self.env.render()

    def close(self) -> None:
        self.env.close()

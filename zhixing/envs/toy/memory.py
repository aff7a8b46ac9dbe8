"""Partially observable environments, which need memory."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.envs.classic_control.cartpole import CartPoleEnv
from gymnasium.spaces import Box, Discrete

from zhixing.envs.toy.base import PIXELS, Array, ToyEnv
from zhixing.errors import UserError


class Recall(ToyEnv):
    """Recall a cue that was observed only at the start of the episode.

    The first observation is one of four cues. The next `delay` observations are zeros. The one after them asks for an
    answer: the reward is 1 if the next action equals the cue, and the episode terminates. Earlier actions have no
    effect.

    The best return is 1. Without memory it is 0.25, as with random actions.
    """

    cues = 4

    def __init__(self, delay: int = 10, render_mode: str | None = None) -> None:
        if delay < 0:
            raise UserError(f"toy/recall: env.delay={delay}: must be at least 0")
        super().__init__(render_mode)
        self.delay = delay
        self.observation_space = Box(0.0, 1.0, (self.cues + 1,), np.float32)  # one-hot cue, and whether to answer now
        self.action_space = Discrete(self.cues)

    @property
    def answer_due(self) -> bool:
        return self.steps == self.delay + 1

    def initial_state(self) -> Array:
        return np.array([self.np_random.integers(self.cues)])

    def transition(self, action: int) -> tuple[float, bool]:
        return float(self.answer_due and action == self.state[0]), self.answer_due

    def get_obs(self) -> Array:
        obs = np.zeros(self.cues + 1, np.float32)
        obs[-1] = self.answer_due
        if self.steps == 0:
            obs[int(self.state[0])] = 1.0
        return obs

    def render(self) -> Array:
        """Draw the cue as a bright column, and a green image when the answer is due."""
        image = np.full((PIXELS, PIXELS, 3), (60, 180, 90) if self.answer_due else 40, np.uint8)
        if self.steps == 0:
            width, cue = PIXELS // self.cues, int(self.state[0])
            image[:, cue * width : (cue + 1) * width] = (240, 200, 60)
        return image


class CartPoleNoVelocity(ToyEnv):
    """CartPole-v1 that observes the cart's position and the pole's angle, but not their velocities.

    The best return is 500; random actions get about 22.
    """

    metadata = CartPoleEnv.metadata
    episode_steps = 500
    observed = (0, 2)  # indices of position and angle; 1 and 3 are their velocities

    def __init__(self, render_mode: str | None = None) -> None:
        super().__init__(render_mode)
        cartpole = CartPoleEnv(render_mode=render_mode)
        assert isinstance(cartpole.observation_space, Box)
        high = cartpole.observation_space.high[list(self.observed)]
        self.observation_space, self.action_space = Box(-high, high), cartpole.action_space
        self.env: Any = cartpole

    def initial_state(self) -> Array:
        self.env.np_random = self.np_random
        self.env.reset()
        return np.array(self.env.state)

    def transition(self, action: int) -> tuple[float, bool]:
        # its only other attribute is used just to warn of steps after the end
        self.env.state, self.env.steps_beyond_terminated = self.state.copy(), None
        _, reward, terminated, _, _ = self.env.step(action)
        self.state = np.array(self.env.state)
        return float(reward), terminated

    def get_obs(self) -> Array:
        return self.state[list(self.observed)].astype(np.float32)

    def render(self) -> Any:
        self.env.state = self.state
        return self.env.render()

    def close(self) -> None:
        self.env.close()

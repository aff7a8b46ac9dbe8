"""Base class of the toy environments."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import gymnasium as gym
import numpy as np

Array = np.ndarray[Any, Any]
Step = tuple[Any, Any, bool, bool, dict[str, Any]]
PIXELS = 64  # side of a rendered image


class ToyEnv(gym.Env[Any, Any]):
    """An environment whose whole state is the array `state`, the step count and the random generator."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012  (as in gym.Env)
    episode_steps: int | None = None  # time limit, at which episodes are truncated
    state: Array

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode
        self.steps = 0

    @abstractmethod
    def initial_state(self) -> Array:
        """Sample the state at the start of an episode."""

    @abstractmethod
    def transition(self, action: Any) -> tuple[Any, bool]:
        """Update the state. Return the reward, which is an array if there are several agents, and `terminated`."""

    @abstractmethod
    def get_obs(self) -> Any: ...

    def get_info(self) -> dict[str, Any]:
        return {}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.steps = 0
        self.state = self.initial_state()
        return self.get_obs(), self.get_info()

    def step(self, action: Any) -> Step:
        reward, terminated = self.transition(action)
        self.steps += 1
        truncated = self.episode_steps is not None and self.steps >= self.episode_steps
        return self.get_obs(), reward, terminated, truncated, self.get_info()

    def state_dict(self) -> dict[str, Any]:
        rng = dict(self.np_random.bit_generator.state)
        return {"values": self.state.copy(), "steps": self.steps, "rng": rng}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state, self.steps = state["values"].copy(), int(state["steps"])
        self.np_random.bit_generator.state = state["rng"]

"""What toy tasks share: their whole state is a few numbers, so that they save and restore it exactly."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import gymnasium as gym
import numpy as np

Array = np.ndarray[Any, Any]
Step = tuple[Any, Any, bool, bool, dict[str, Any]]
PIXELS = 64  # side of a picture


class ToyEnv(gym.Env[Any, Any]):
    """Its whole state is `values` (numbers), the step count and the generator."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012  (declared so by gym.Env)
    episode_steps: int | None = None  # a time limit: episodes are truncated there
    values: Array

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode
        self.steps = 0

    @abstractmethod
    def begin(self) -> Array:
        """Values at the start of an episode."""

    @abstractmethod
    def act(self, action: Any) -> tuple[Any, bool]:
        """Change the values, give the reward (of several agents one each) and whether the episode terminates."""

    @abstractmethod
    def observe(self) -> Any: ...

    def tell(self) -> dict[str, Any]:
        """What a step's info holds."""
        return {}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.steps = 0
        self.values = self.begin()
        return self.observe(), self.tell()

    def step(self, action: Any) -> Step:
        reward, terminated = self.act(action)
        self.steps += 1
        truncated = self.episode_steps is not None and self.steps >= self.episode_steps
        return self.observe(), reward, terminated, truncated, self.tell()

    def state_dict(self) -> dict[str, Any]:
        rng = dict(self.np_random.bit_generator.state)
        return {"values": self.values.copy(), "steps": self.steps, "rng": rng}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values, self.steps = state["values"].copy(), int(state["steps"])
        self.np_random.bit_generator.state = state["rng"]

"""An environment for videos, which keeps the picture of the end of an episode. Free of torch, for worker processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import gymnasium as gym

from zhixing.envs.registry import RegisteredEnv


@dataclass(frozen=True)
class FinalFrameEnv(RegisteredEnv):
    def __call__(self) -> gym.Env[Any, Any]:
        return KeepFinalFrame(super().__call__())


class KeepFinalFrame(gym.Wrapper[Any, Any, Any, Any]):
    """Keeps a picture of the end of an episode until it is asked for, or a later step is taken."""

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        super().__init__(env)
        self.end: Any = None
        if hasattr(env, "state_dict") and hasattr(env, "load_state_dict"):  # for those who look ahead from its states
            self.state_dict, self.load_state_dict = env.state_dict, env.load_state_dict

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        obs, reward, terminated, truncated, info = self.env.step(action)
        self.end = self.env.render() if terminated or truncated else None
        return obs, reward, terminated, truncated, info

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        if seed is not None:  # it isn't the reset that follows an end
            self.end = None
        return self.env.reset(seed=seed, options=options)

    def render(self) -> Any:
        end, self.end = self.end, None
        return self.env.render() if end is None else end

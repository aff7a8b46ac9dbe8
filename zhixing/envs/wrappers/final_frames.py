"""An environment for videos, which keeps the last frame of an episode. Imports no torch, for worker processes."""

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
    """Keeps the last frame of an episode until `render` returns it or the next step is taken.

    Vector environments reset an environment right after the end of an episode, so its last frame would be lost.
    """

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        super().__init__(env)
        self.final_frame: Any = None
        if hasattr(env, "state_dict") and hasattr(env, "load_state_dict"):  # for policies that search from saved states
            self.state_dict, self.load_state_dict = env.state_dict, env.load_state_dict

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        obs, reward, terminated, truncated, info = self.env.step(action)
        self.final_frame = self.env.render() if terminated or truncated else None
        return obs, reward, terminated, truncated, info

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        if seed is not None:  # not the automatic reset after an episode
            self.final_frame = None
        return self.env.reset(seed=seed, options=options)

    def render(self) -> Any:
        frame, self.final_frame = self.final_frame, None
        return self.env.render() if frame is None else frame

"""Tasks for tests, each with a known answer. Named on the command line as `tasks:Forever` and so on."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete


class Known(gym.Env):
    """A row of states, one reward of 1 per step, whatever is done. It ends after `length` steps."""

    length = 5
    terminates = False

    def __init__(self, continuous: bool = False) -> None:
        self.observation_space = Box(0.0, 1.0, (self.length,), np.float32)
        self.action_space = Box(-1.0, 1.0, (1,), np.float32) if continuous else Discrete(2)
        self.t = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.t = 0
        return self._obs(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.t += 1
        ended = self.t == self.length
        return self._obs(), 1.0, ended and self.terminates, ended and not self.terminates, {}

    def _obs(self) -> np.ndarray:
        return np.ones(self.length, np.float32)


class Forever(Known):
    """One state; only a clock that the agent can't see ends it. Its value is 1 / (1 - gamma)."""


class Dies(Known):
    """Its states are told apart and the last step terminates. Value of state i: the sum of gamma^k, k < length - i."""

    terminates = True

    def _obs(self) -> np.ndarray:
        return np.eye(self.length, dtype=np.float32)[min(self.t, self.length - 1)]


class Many(gym.Env):
    """A dict of everything that can be observed; the right answer is in it. `kind` is the kind of action."""

    def __init__(self, kind: str = "discrete") -> None:
        self.kind = kind
        self.observation_space = Dict(
            {
                "cue": Discrete(3),
                "noise": Box(-5.0, 5.0, (2,), np.float64),
                "more": Dict({"picture": Box(0, 255, (12, 12, 1), np.uint8), "bits": MultiDiscrete([2, 3])}),
            }
        )
        spaces = {
            "discrete": Discrete(3, start=1),
            "multi": MultiDiscrete([3, 2]),
            "continuous": Box(np.float32([-2.0]), np.float32([4.0])),
        }
        self.action_space = spaces[kind]

    def _obs(self) -> dict[str, Any]:
        r = self.np_random
        self.cue = int(r.integers(3))
        picture = np.full((12, 12, 1), 80 * self.cue, np.uint8)
        bits = np.array([r.integers(2), r.integers(3)])
        return {"cue": self.cue, "noise": r.normal(size=2).clip(-5, 5), "more": {"picture": picture, "bits": bits}}

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[dict, dict]:
        super().reset(seed=seed)
        self.t = 0
        return self._obs(), {}

    def step(self, action: Any) -> tuple[dict, float, bool, bool, dict]:
        assert self.action_space.contains(action if self.kind != "discrete" else int(action)), action
        if self.kind == "discrete":
            reward = float(int(action) - 1 == self.cue)
        elif self.kind == "multi":
            reward = float(int(action[0]) == self.cue and int(action[1]) == 0)
        else:
            reward = -abs(float(action[0]) - (self.cue - 1))
        self.t += 1
        return self._obs(), reward, False, self.t == 8, {"solved": reward > 0.9}


class Masked(gym.Env):
    """Two of four actions are forbidden at each step; a forbidden one raises. The higher of the others pays."""

    observation_space = Box(0.0, 1.0, (4,), np.float32)
    action_space = Discrete(4)

    def _see(self) -> tuple[np.ndarray, dict]:
        self.mask = np.zeros(4, np.int8)
        self.mask[self.np_random.permutation(4)[:2]] = 1
        return self.mask.astype(np.float32), {"action_mask": self.mask}

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.t = 0
        return self._see()

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        if not self.mask[int(action)]:
            raise RuntimeError(f"action {action} is forbidden, the mask is {self.mask}")
        reward = float(int(action) == int(np.flatnonzero(self.mask).max()))
        self.t += 1
        obs, info = self._see()
        return obs, reward, False, self.t == 10, info


class Raises(Known):
    """Breaks at its third step."""

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        if self.t == 2:
            raise ZeroDivisionError("the third step is broken")
        return super().step(action)


class Explodes(Known):
    """Pays so much that squares overflow."""

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        obs, _, terminated, truncated, info = super().step(action)
        return obs, 1e38, terminated, truncated, info

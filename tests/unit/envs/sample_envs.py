"""Environments with one special behavior each, in a module that worker processes can import."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, Text, Tuple


class Counter(gym.Env):
    """Observations are [episode, step]. Terminates at step `death`, truncates at step `limit`."""

    observation_space = Box(0, np.inf, (2,), np.float64)
    action_space = Discrete(8)

    def __init__(self, death: int = 10**9, limit: int = 10**9) -> None:
        self.death, self.limit, self.episode, self.steps = death, limit, -1, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.episode, self.steps = self.episode + 1, 0
        return np.array([self.episode, 0.0]), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        info = {"length": self.steps, "score": np.float32(0.5), "won": np.True_, "text": "no", "array": np.ones(3)}
        obs = np.array([self.episode, self.steps], float)
        return obs, float(action), self.steps >= self.death, self.steps >= self.limit, info


class MixedObs(gym.Env):
    """A dict of an image, float64 numbers and an integer, with action masks and random episode ends."""

    observation_space = Dict(
        {
            "image": Box(0, 255, (5, 4, 3), np.uint8),
            "position": Box(-np.inf, np.inf, (2,), np.float64),
            "kind": Discrete(3),
            "action_mask": Box(0, 1, (4,), np.int8),
        }
    )
    action_space = Discrete(4)

    def _obs(self) -> dict[str, Any]:
        rng = self.np_random
        mask = rng.integers(0, 2, 4).astype(np.int8)
        mask[0] = 1
        return {
            "image": rng.integers(0, 256, (5, 4, 3), np.uint8),
            "position": self.position,
            "kind": rng.integers(3),
            "action_mask": mask,
        }

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.position = self.np_random.normal(size=2)
        return self._obs(), {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.position = self.position + 0.1 * action + self.np_random.normal(size=2)
        ends = self.np_random.random(2) < 0.05
        return self._obs(), float(self.position.sum()), bool(ends[0]), bool(ends[1]), {"x": float(self.position[0])}


class PettingZooStyle(gym.Env):
    observation_space = Dict({"observation": Box(0, 9, (2,), np.float32), "action_mask": Box(0, 1, (3,), np.int8)})
    action_space = Discrete(3)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        return {"observation": np.array([1, 2], np.float32), "action_mask": np.array([1, 0, 1], np.int8)}, {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        obs = {"observation": np.array([3, 4], np.float32), "action_mask": np.array([0, 1, 0], np.int8)}
        return obs, 1.0, action == 2, False, {}


class InfoMask(Counter):
    """The action mask is in `info`, and missing after the last step of an episode."""

    action_space = Discrete(3)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        obs, _ = super().reset(seed=seed)
        return obs, {"action_mask": np.array([1, 1, 0], np.int8)}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        obs, reward, terminated, truncated, _ = super().step(action)
        info = {} if terminated else {"action_mask": np.array([0, 0, 1], np.int8)}
        return obs, reward, terminated, truncated, info


class TupleObs(Counter):
    observation_space = Tuple((Discrete(9), Dict({"deep": Tuple((Box(0, 9, (1,), np.float32), Discrete(2)))})))

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        return (4, {"deep": (np.array([0.5], np.float32), 1)}), {}


class TextObs(Counter):
    observation_space = Text(5)


class WrongShape(Counter):
    observation_space = Box(0, 1, (3,))


class Continuous(gym.Env):
    """Keeps and modifies the actions it receives, and asserts that no later step overwrites them."""

    observation_space = Box(-np.inf, np.inf, (2,), np.float64)
    action_space = Box(-2, 2, (2,), np.float64)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.position = self.np_random.normal(size=2) + (options or {}).get("shift", 0.0)
        self.last_action = self.copy = np.zeros(2)
        return self.position, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert np.array_equal(self.last_action, self.copy)
        action *= 2
        self.last_action, self.copy = action, action.copy()
        self.position = self.position + action + self.np_random.normal(size=2)
        return self.position, 0.0, bool(self.np_random.random() < 0.02), False, {}


class Unrestorable(Counter):
    """Can't be restored: every step uses a new unseeded generator."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        obs, *rest = super().step(action)
        return obs + np.random.default_rng().random(2), *rest


class Stateful(Counter):
    """Can save and restore its state."""

    def state_dict(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if isinstance(value, int)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


class Crasher(Counter):
    """Action 7 raises an error, 6 kills the process, 5 exits it."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if action == 7:
            raise ZeroDivisionError("the wheels came off")
        if action == 6:
            os.kill(os.getpid(), signal.SIGKILL)
        if action == 5:
            os._exit(3)
        return super().step(action)


class Sleeper(Counter):
    """Sleeps `always` seconds plus 0.05 s times the action."""

    def __init__(self, always: float = 0.0) -> None:
        super().__init__()
        self.always = always

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        time.sleep(self.always + 0.05 * int(action))
        return super().step(action)


class ProcessInfo(Counter):
    """Episodes of one step, whose info describes the process."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        obs, reward, *_ = super().step(action)
        return obs, reward, True, False, {"torch": "torch" in sys.modules, "pid": os.getpid()}


def not_an_env() -> int:
    return 3


number = 3

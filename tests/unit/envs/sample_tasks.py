"""Tasks that show one behaviour each. Worker processes import them from here."""

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
    """Shows [episode, step]; terminated at `death`, truncated at `limit`."""

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
        info = {"length": self.steps, "score": np.float32(0.5), "won": np.True_, "text": "no", "many": np.ones(3)}
        obs = np.array([self.episode, self.steps], float)
        return obs, float(action), self.steps >= self.death, self.steps >= self.limit, info


class Mixed(gym.Env):
    """A dict of a picture, float64 numbers and a choice, with masks and random ends."""

    observation_space = Dict(
        {
            "picture": Box(0, 255, (5, 4, 3), np.uint8),
            "place": Box(-np.inf, np.inf, (2,), np.float64),
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
            "picture": rng.integers(0, 256, (5, 4, 3), np.uint8),
            "place": self.place,
            "kind": rng.integers(3),
            "action_mask": mask,
        }

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.place = self.np_random.normal(size=2)
        return self._obs(), {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.place = self.place + 0.1 * action + self.np_random.normal(size=2)
        ends = self.np_random.random(2) < 0.05
        return self._obs(), float(self.place.sum()), bool(ends[0]), bool(ends[1]), {"x": float(self.place[0])}


class PettingManner(gym.Env):
    observation_space = Dict({"observation": Box(0, 9, (2,), np.float32), "action_mask": Box(0, 1, (3,), np.int8)})
    action_space = Discrete(3)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        return {"observation": np.array([1, 2], np.float32), "action_mask": np.array([1, 0, 1], np.int8)}, {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        obs = {"observation": np.array([3, 4], np.float32), "action_mask": np.array([0, 1, 0], np.int8)}
        return obs, 1.0, action == 2, False, {}


class InfoMask(Counter):
    """The mask is in info, and missing once the episode is over."""

    action_space = Discrete(3)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        obs, _ = super().reset(seed=seed)
        return obs, {"action_mask": np.array([1, 1, 0], np.int8)}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        obs, reward, terminated, truncated, _ = super().step(action)
        info = {} if terminated else {"action_mask": np.array([0, 0, 1], np.int8)}
        return obs, reward, terminated, truncated, info


class Pair(Counter):
    observation_space = Tuple((Discrete(9), Dict({"deep": Tuple((Box(0, 9, (1,), np.float32), Discrete(2)))})))

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        return (4, {"deep": (np.array([0.5], np.float32), 1)}), {}


class Words(Counter):
    observation_space = Text(5)


class WrongShape(Counter):
    observation_space = Box(0, 1, (3,))


class Chaser(gym.Env):
    """Continuous; keeps the action it gets, changes it, and asks that no later step has written into it."""

    observation_space = Box(-np.inf, np.inf, (2,), np.float64)
    action_space = Box(-2, 2, (2,), np.float64)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.place = self.np_random.normal(size=2) + (options or {}).get("shift", 0.0)
        self.kept = self.copy = np.zeros(2)
        return self.place, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert np.array_equal(self.kept, self.copy)
        action *= 2
        self.kept, self.copy = action, action.copy()
        self.place = self.place + action + self.np_random.normal(size=2)
        return self.place, 0.0, bool(self.np_random.random() < 0.02), False, {}


class Secretive(Counter):
    """Its randomness can't be restored: it comes from outside."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        obs, *rest = super().step(action)
        return obs + np.random.default_rng().random(2), *rest


class Stateful(Counter):
    """Can save its state."""

    def state_dict(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if isinstance(value, int)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


class Trouble(Counter):
    """Action 7 raises, 6 kills the process, 5 leaves it."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if action == 7:
            raise ZeroDivisionError("the wheels came off")
        if action == 6:
            os.kill(os.getpid(), signal.SIGKILL)
        if action == 5:
            os._exit(3)
        return super().step(action)


class Sleeper(Counter):
    """Sleeps as many twentieths of a second as the action says, and `always`."""

    def __init__(self, always: float = 0.0) -> None:
        super().__init__()
        self.always = always

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        time.sleep(self.always + 0.05 * int(action))
        return super().step(action)


class Spy(Counter):
    """Tells what its process has imported."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        obs, reward, *_ = super().step(action)
        return obs, reward, True, False, {"torch": "torch" in sys.modules, "pid": os.getpid()}


def not_an_env() -> int:
    return 3


number = 3

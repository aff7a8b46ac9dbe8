"""Environments with one fault each, in a module that worker processes and the command line can import."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Discrete, MultiDiscrete, Sequence

Step = tuple[Any, Any, Any, Any, Any]


class Valid(gym.Env):
    """A random walk with drift, truncated after 20 steps. It has no fault."""

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012
    observation_space: Any = Box(-1e5, 1e5, (2,), np.float32)
    action_space: Any = Discrete(3)

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode
        self.t = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, Any]:
        super().reset(seed=seed)
        self.t, self.position = 0, self.np_random.normal(size=2)
        return self.get_obs(), {}

    def get_obs(self) -> Any:
        return self.position.astype(np.float32)

    def step(self, action: Any) -> Step:
        if self.t >= 20:
            raise RuntimeError("the episode is over")
        self.t += 1
        self.position = self.position + self.np_random.normal(size=2) + int(np.sum(action))
        return self.get_obs(), float(self.position[0]), False, self.t == 20, {"far": float(self.position[1])}

    def render(self) -> Any:
        return np.zeros((8, 8, 3), np.uint8)


class UnsupportedSpace(Valid):
    observation_space = Sequence(Discrete(3))


class MissingActionSpace(Valid):
    action_space = None


class WrongShape(Valid):
    def get_obs(self) -> Any:
        obs = super().get_obs()
        return obs[:1] if self.t > 2 else obs


class WrongDtype(Valid):
    observation_space = Box(0, 255, (2,), np.uint8)

    def get_obs(self) -> Any:
        return np.array([0.5, 0.25], np.float32) if self.t > 2 else np.zeros(2, np.uint8)


class TooLargeForDtype(Valid):
    observation_space = Box(0, 255, (2,), np.uint8)

    def get_obs(self) -> Any:
        return np.array([7, 300 if self.t > 2 else 3])


class InvalidDiscreteObs(Valid):
    observation_space = Discrete(3)

    def get_obs(self) -> Any:
        return 3 if self.t > 2 else 2


class OutOfBounds(Valid):
    def get_obs(self) -> Any:
        return super().get_obs() + (2e5 if self.t > 2 else 0)


class NanObs(Valid):
    def get_obs(self) -> Any:
        return super().get_obs() * (np.nan if self.t > 2 else 1)


class NanFinalObs(Valid):
    def get_obs(self) -> Any:
        return super().get_obs() * (np.nan if self.t == 20 else 1)


class InfFirstObs(Valid):
    """The first observation of an unseeded episode is infinite."""

    episodes = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, Any]:
        obs, info = super().reset(seed=seed)
        self.episodes = 0 if seed is not None else self.episodes + 1
        return obs * (np.inf if self.episodes else 1), info


class NanReward(Valid):
    def step(self, action: Any) -> Step:
        obs, reward, *rest = super().step(action)
        return obs, np.nan if self.t > 2 else reward, *rest


class TextReward(Valid):
    def step(self, action: Any) -> Step:
        obs, _, *rest = super().step(action)
        return obs, "high", *rest


class ArrayReward(Valid):
    """Rewards have shape (1,), as in vector environments."""

    def step(self, action: Any) -> Step:
        obs, reward, *rest = super().step(action)
        return obs, np.array([reward]), *rest


class ThreeRewards(Valid):
    def step(self, action: Any) -> Step:
        obs, reward, *rest = super().step(action)
        return obs, np.full(3, reward), *rest


class NoneReward(Valid):
    def step(self, action: Any) -> Step:
        obs, _, *rest = super().step(action)
        return obs, None, *rest


class SequenceActions(Valid):
    action_space = Sequence(Discrete(3))


class OldReset(Valid):
    """As in the old Gym: `reset` returns no info."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return super().reset(seed=seed)[0]


class OldSignature(Valid):
    def reset(self) -> Any:  # type: ignore[override]
        return super().reset()[0]


class OldStep(Valid):
    """As in the old Gym: one flag `done`."""

    def step(self, action: Any) -> Any:
        obs, reward, terminated, truncated, info = super().step(action)
        return obs, reward, terminated or truncated, info


class Unseeded(Valid):
    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, Any]:
        return super().reset(seed=None if seed is None else time.perf_counter_ns() % 2**31)


class CarriesOverState(Valid):
    """Each episode starts from the last position of the previous episode, whatever the seed."""

    last: Any = 0.0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, Any]:
        super().reset(seed=seed)
        self.position = self.position + self.last
        return self.get_obs(), {}

    def step(self, action: Any) -> Step:
        result = super().step(action)
        self.last = self.position
        return result


class SharedState(Valid):
    """All instances share their position."""

    shared = np.zeros(2)

    @property
    def position(self) -> Any:
        return SharedState.shared

    @position.setter
    def position(self, value: Any) -> None:
        SharedState.shared = value


class NeverEnds(Valid):
    def step(self, action: Any) -> Step:
        self.t = min(self.t, 18)
        return super().step(action)


class ContinuesAfterEnd(Valid):
    def step(self, action: Any) -> Step:
        self.t %= 20
        return super().step(action)


class TextFlag(Valid):
    def step(self, action: Any) -> Step:
        obs, reward, _, truncated, info = super().step(action)
        return obs, reward, "no" if self.t == 20 else False, truncated, info


class NoneInfo(Valid):
    def step(self, action: Any) -> Step:
        return *super().step(action)[:4], None


class Masked(Valid):
    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, Any]:
        return super().reset(seed=seed)[0], {"action_mask": self.mask()}

    def step(self, action: Any) -> Step:
        *rest, info = super().step(action)
        return *rest, {**info, "action_mask": self.mask()}

    def mask(self) -> Any:
        return np.ones(3, np.int8)


class MaskForbidsAll(Masked):
    def mask(self) -> Any:
        return np.full(3, self.t < 3, np.int8)


class MaskWrongShape(Masked):
    def mask(self) -> Any:
        return np.ones(3 if self.t < 3 else 1, np.int8)


class MaskForbidsComponent(Masked):
    """Forbids both actions of the first component."""

    action_space = MultiDiscrete([2, 3])

    def mask(self) -> Any:
        return np.array([1, 1, 0, 1, 1] if self.t < 3 else [0, 0, 1, 1, 1], np.int8)


class FloatImage(Valid):
    def render(self) -> Any:
        return np.zeros((8, 8), np.float32)


class IncompleteState(Valid):
    """`state_dict` omits the random generator."""

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position.copy(), "t": self.t}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.reset(seed=0)
        self.position, self.t = state["position"].copy(), state["t"]


class PrivateGenerator(Valid):
    """Uses a generator other than `np_random`, whose state can't be saved from outside."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, Any]:
        if seed is not None:
            self.rng = np.random.default_rng(seed)
        return super().reset(seed=seed)

    def get_obs(self) -> Any:
        return (self.position + self.rng.random(2)).astype(np.float32)


class Failing(Valid):
    """Fails in a random step, with a given probability if the action isn't 0. `how` is the kind of failure."""

    def __init__(self, how: str = "raise", probability: float = 1 / 40) -> None:
        super().__init__()
        self.how, self.probability = how, probability

    def step(self, action: Any) -> Step:
        obs, reward, terminated, truncated, info = super().step(action)
        sample = self.np_random.random()
        if sample < self.probability and int(action) > 0:
            if self.how == "raise":
                raise ZeroDivisionError(f"sampled {sample:.9f} with action {action} at {self.position[0]:.6f}")
            if self.how == "nan":
                reward = np.nan
            elif self.how == "shape":
                obs = obs[:1]
            elif self.how == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            elif self.how == "leave":
                os._exit(3)
            elif self.how == "hang":
                time.sleep(1000)
        return obs, reward, terminated, truncated, info

"""Tasks that are right but for one thing each. Worker processes import them from here, the command line by name."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete, Sequence

Step = tuple[Any, Any, Any, Any, Any]


class Sound(gym.Env):
    """A walk by chance and by action, cut after 20 steps. Nothing is wrong with it."""

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012
    observation_space: Any = Box(-1e5, 1e5, (2,), np.float32)
    action_space: Any = Discrete(3)

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode
        self.t = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, Any]:
        super().reset(seed=seed)
        self.t, self.place = 0, self.np_random.normal(size=2)
        return self.see(), {}

    def see(self) -> Any:
        return self.place.astype(np.float32)

    def step(self, action: Any) -> Step:
        if self.t >= 20:
            raise RuntimeError("the episode is over")
        self.t += 1
        self.place = self.place + self.np_random.normal(size=2) + int(np.sum(action))
        return self.see(), float(self.place[0]), False, self.t == 20, {"far": float(self.place[1])}

    def render(self) -> Any:
        return np.zeros((8, 8, 3), np.uint8)


class Strange(Sound):
    observation_space = Sequence(Discrete(3))


class NoSpace(Sound):
    action_space = None


class WrongShape(Sound):
    """From the third step on."""

    def see(self) -> Any:
        obs = super().see()
        return obs[:1] if self.t > 2 else obs


class WrongKind(Sound):
    """Bytes that are none."""

    observation_space = Box(0, 255, (2,), np.uint8)

    def see(self) -> Any:
        return np.array([0.5, 0.25], np.float32) if self.t > 2 else np.zeros(2, np.uint8)


class TooLarge(Sound):
    """Numbers that bytes can't hold."""

    observation_space = Box(0, 255, (2,), np.uint8)

    def see(self) -> Any:
        return np.array([7, 300 if self.t > 2 else 3])


class NoSuchChoice(Sound):
    observation_space = Discrete(3)

    def see(self) -> Any:
        return 3 if self.t > 2 else 2


class Outside(Sound):
    def see(self) -> Any:
        return super().see() + (2e5 if self.t > 2 else 0)


class NanObs(Sound):
    def see(self) -> Any:
        return super().see() * (np.nan if self.t > 2 else 1)


class NanLast(Sound):
    """Only the last observation of an episode."""

    def see(self) -> Any:
        return super().see() * (np.nan if self.t == 20 else 1)


class NanFirst(Sound):
    """The first one of every episode but the first."""

    episodes = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, Any]:
        obs, info = super().reset(seed=seed)
        self.episodes = 0 if seed is not None else self.episodes + 1
        return obs * (np.inf if self.episodes else 1), info


class NanReward(Sound):
    def step(self, action: Any) -> Step:
        obs, reward, *rest = super().step(action)
        return obs, np.nan if self.t > 2 else reward, *rest


class WordReward(Sound):
    def step(self, action: Any) -> Step:
        obs, _, *rest = super().step(action)
        return obs, "much", *rest


class RewardInArray(Sound):
    """Its rewards have the shape (1,), as with many vectors of one."""

    def step(self, action: Any) -> Step:
        obs, reward, *rest = super().step(action)
        return obs, np.array([reward]), *rest


class RewardOfThree(Sound):
    def step(self, action: Any) -> Step:
        obs, reward, *rest = super().step(action)
        return obs, np.full(3, reward), *rest


class NoReward(Sound):
    def step(self, action: Any) -> Step:
        obs, _, *rest = super().step(action)
        return obs, None, *rest


class Binary(Sound):
    action_space = MultiBinary(3)


class OldReset(Sound):
    """As in the old Gym: nothing beside the observation."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return super().reset(seed=seed)[0]


class OldSignature(Sound):
    def reset(self) -> Any:  # type: ignore[override]
        return super().reset()[0]


class OldStep(Sound):
    """As in the old Gym: one flag for the end."""

    def step(self, action: Any) -> Any:
        obs, reward, terminated, truncated, info = super().step(action)
        return obs, reward, terminated or truncated, info


class Unseeded(Sound):
    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, Any]:
        return super().reset(seed=None if seed is None else time.perf_counter_ns() % 2**31)


class Remembers(Sound):
    """Each episode begins where the last one ended, whatever the seed."""

    left: Any = 0.0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, Any]:
        super().reset(seed=seed)
        self.place = self.place + self.left
        return self.see(), {}

    def step(self, action: Any) -> Step:
        result = super().step(action)
        self.left = self.place
        return result


class Shares(Sound):
    """All copies write into the same place."""

    shared = np.zeros(2)

    @property
    def place(self) -> Any:
        return Shares.shared

    @place.setter
    def place(self, value: Any) -> None:
        Shares.shared = value


class NeverEnds(Sound):
    def step(self, action: Any) -> Step:
        self.t = min(self.t, 18)
        return super().step(action)


class GoesOn(Sound):
    def step(self, action: Any) -> Step:
        self.t %= 20
        return super().step(action)


class EndsByWord(Sound):
    def step(self, action: Any) -> Step:
        obs, reward, _, truncated, info = super().step(action)
        return obs, reward, "no" if self.t == 20 else False, truncated, info


class NoDict(Sound):
    def step(self, action: Any) -> Step:
        return *super().step(action)[:4], None


class Masks(Sound):
    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, Any]:
        return super().reset(seed=seed)[0], {"action_mask": self.mask()}

    def step(self, action: Any) -> Step:
        *rest, info = super().step(action)
        return *rest, {**info, "action_mask": self.mask()}

    def mask(self) -> Any:
        return np.ones(3, np.int8)


class MaskForbidsAll(Masks):
    def mask(self) -> Any:
        return np.full(3, self.t < 3, np.int8)


class MaskOfWrongShape(Masks):
    def mask(self) -> Any:
        return np.ones(3 if self.t < 3 else 1, np.int8)


class MaskForbidsAGroup(Masks):
    """Two choices of the first kind, three of the second: none of the first is left."""

    action_space = MultiDiscrete([2, 3])

    def mask(self) -> Any:
        return np.array([1, 1, 0, 1, 1] if self.t < 3 else [0, 0, 1, 1, 1], np.int8)


class BadPicture(Sound):
    def render(self) -> Any:
        return np.zeros((8, 8), np.float32)


class ForgetsToRestore(Sound):
    """Says that it can be put back, but leaves its chance behind."""

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place.copy(), "t": self.t}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.reset(seed=0)
        self.place, self.t = state["place"].copy(), state["t"]


class OwnChance(Sound):
    """Repeats itself, but its generator can't be looked into."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, Any]:
        if seed is not None:
            self.own = np.random.default_rng(seed)
        return super().reset(seed=seed)

    def see(self) -> Any:
        return (self.place + self.own.random(2)).astype(np.float32)


class Fails(Sound):
    """In one of about 60 steps, as its own chance and the action say it: `how` it fails."""

    def __init__(self, how: str = "raise", chance: float = 1 / 40) -> None:
        super().__init__()
        self.how, self.chance = how, chance

    def step(self, action: Any) -> Step:
        obs, reward, terminated, truncated, info = super().step(action)
        throw = self.np_random.random()
        if throw < self.chance and int(action) > 0:
            if self.how == "raise":
                raise ZeroDivisionError(f"threw {throw:.9f} with action {action} at {self.place[0]:.6f}")
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

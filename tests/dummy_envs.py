"""Tasks for tests, each with a known answer. Named on the command line as `dummy_envs:TruncatingEnv` and so on."""

from __future__ import annotations

import time
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete

from zhixing.core.tree import tree_map


class FixedLengthEnv(gym.Env):
    """A row of states, one reward of 1 per step, whatever is done. It ends after `length` steps.

    With several `agents` all see and earn the same.
    """

    length = 5
    terminates = False

    def __init__(self, continuous: bool = False, agents: int = 1) -> None:
        self.num_agents = agents
        self.observation_space = Box(0.0, 1.0, (self.length,), np.float32)
        self.action_space = Box(-1.0, 1.0, (1,), np.float32) if continuous else Discrete(2)
        self.t = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.t = 0
        return self._all(self._obs()), {}

    def step(self, action: Any) -> tuple[np.ndarray, Any, bool, bool, dict]:
        self.t += 1
        ended = self.t == self.length
        terminated, truncated = ended and self.terminates, ended and not self.terminates
        return self._all(self._obs()), self._all(np.float32(1.0)), terminated, truncated, {}

    def _all(self, value: Any) -> Any:
        return value if self.num_agents == 1 else np.stack([value] * self.num_agents)

    def _obs(self) -> np.ndarray:
        return np.ones(self.length, np.float32)


class TruncatingEnv(FixedLengthEnv):
    """One state; only a clock that the agent can't see ends it. Its value is 1 / (1 - gamma)."""


class EndlessEnv(FixedLengthEnv):
    """No episode ends: neither the task nor a wrapper has a time limit."""

    length = 2

    def step(self, action: Any) -> tuple[np.ndarray, Any, bool, bool, dict]:
        obs, reward, _, _, info = super().step(action)
        return obs, reward, False, False, info


class TerminatingEnv(FixedLengthEnv):
    """Its states are told apart and the last step terminates. Value of state i: the sum of gamma^k, k < length - i."""

    terminates = True

    def _obs(self) -> np.ndarray:
        return np.eye(self.length, dtype=np.float32)[min(self.t, self.length - 1)]


class LeavingAgentEnv(TerminatingEnv):
    """Of two agents the second leaves by the second step; an `individual` reward isn't for it any more then, and what
    the environment still says of it must not count. A `shared` one is, also after it has left."""

    def __init__(self, kind: str = "individual", continuous: bool = False) -> None:
        super().__init__(continuous, agents=2)
        self.reward_kind = kind

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict]:
        return super().reset(seed=seed)[0], self._here()

    def step(self, action: Any) -> tuple[np.ndarray, Any, bool, bool, dict]:
        obs, reward, terminated, truncated, _ = super().step(action)
        return obs, reward, terminated, truncated, self._here()

    def _here(self) -> dict[str, Any]:
        return {"alive": np.array([True, self.t < 2])}


class DictObsEnv(gym.Env):
    """A dict of everything that can be observed; the right answer is in it. `kind` is the kind of action.

    Several `agents` have cues of their own, which the state holds, and share their reward.
    """

    def __init__(self, kind: str = "discrete", agents: int = 1) -> None:
        self.kind, self.num_agents = kind, agents
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

    def _one(self) -> dict[str, Any]:
        r = self.np_random
        cue = int(r.integers(3))
        picture = np.full((12, 12, 1), 80 * cue, np.uint8)
        bits = np.array([r.integers(2), r.integers(3)])
        return {"cue": cue, "noise": r.normal(size=2).clip(-5, 5), "more": {"picture": picture, "bits": bits}}

    def _see(self) -> tuple[dict, dict]:
        seen = [self._one() for _ in range(self.num_agents)]
        self.cues = [one["cue"] for one in seen]
        if self.num_agents == 1:
            return seen[0], {}
        obs = tree_map(lambda *leaves: np.stack(leaves), *seen)
        return obs, {"state": np.eye(3, dtype=np.float32)[self.cues].reshape(-1)}

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[dict, dict]:
        super().reset(seed=seed)
        self.t = 0
        return self._see()

    def _pays(self, action: Any, cue: int) -> float:
        assert self.action_space.contains(action if self.kind != "discrete" else int(action)), action
        if self.kind == "discrete":
            return float(int(action) - 1 == cue)
        if self.kind == "multi":
            return float(int(action[0]) == cue and int(action[1]) == 0)
        return -abs(float(action[0]) - (cue - 1))

    def step(self, action: Any) -> tuple[dict, Any, bool, bool, dict]:
        actions = [action] if self.num_agents == 1 else action
        reward = float(np.mean([self._pays(a, cue) for a, cue in zip(actions, self.cues, strict=True)]))
        self.t += 1
        obs, info = self._see()
        told = {**info, "solved": reward > 0.9}
        return obs, reward if self.num_agents == 1 else [reward] * self.num_agents, False, self.t == 8, told


class MaskedEnv(gym.Env):
    """Most of the actions are forbidden at each step; a forbidden one raises. The highest of the others pays.

    Of four actions two are allowed, of more one to three, chosen anew at each step.
    Of several `agents` the last leaves after five steps: it may only do nothing (action 0) then, and earns nothing.
    """

    def __init__(self, agents: int = 1, actions: int = 4) -> None:
        self.num_agents, self.actions = agents, actions
        self.observation_space = Box(0.0, 1.0, (actions,), np.float32)
        self.action_space = Discrete(actions)

    def _see(self) -> tuple[np.ndarray, dict]:
        self.mask = np.zeros((self.num_agents, self.actions), np.int8)
        for row in self.mask:
            allowed = 2 if self.actions == 4 else int(self.np_random.integers(1, 4))
            row[self.np_random.permutation(self.actions)[:allowed]] = 1
        if self.num_agents == 1:
            return self.mask[0].astype(np.float32), {"action_mask": self.mask[0]}
        self.alive = np.ones(self.num_agents, bool)
        if self.t >= 5:
            self.alive[-1] = False
            self.mask[-1] = np.eye(self.actions)[0]
        return self.mask.astype(np.float32) * self.alive[:, None], {"action_mask": self.mask, "alive": self.alive}

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.t = 0
        return self._see()

    def step(self, action: Any) -> tuple[np.ndarray, Any, bool, bool, dict]:
        rewards = []
        for a, mask in zip(np.atleast_1d(action), self.mask, strict=True):
            if not mask[int(a)]:
                raise RuntimeError(f"action {a} is forbidden, the mask is {mask}")
            rewards.append(float(int(a) == int(np.flatnonzero(mask).max())))
        if self.num_agents > 1:
            rewards = list(np.array(rewards) * self.alive)
        self.t += 1
        obs, info = self._see()
        return obs, rewards[0] if self.num_agents == 1 else rewards, False, self.t == 10, info


class RaisingEnv(FixedLengthEnv):
    """Breaks at its third step."""

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        if self.t == 2:
            raise ZeroDivisionError("the third step is broken")
        return super().step(action)


class SlowEnv(TerminatingEnv):
    """A step takes two milliseconds, whatever the machine."""

    def step(self, action: Any) -> tuple[np.ndarray, Any, bool, bool, dict]:
        time.sleep(0.002)
        return super().step(action)


class HugeRewardEnv(FixedLengthEnv):
    """Pays so much that squares overflow."""

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        obs, _, terminated, truncated, info = super().step(action)
        return obs, 1e38, terminated, truncated, info

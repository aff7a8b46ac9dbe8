"""Environments with known values and returns, for tests. Commands name them as `dummy_envs:TruncatingEnv` etc."""

from __future__ import annotations

import time
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple

from zhixing.core.tree import tree_map

# composite, with all kinds of parts: nested, of no dimension, of two, and with bounds and starts of their own
HYBRID = Dict(
    {
        "part": Discrete(3, start=1),
        "tools": Tuple([MultiDiscrete([[2, 3]], start=[[0, 1]]), Box(-1.0, 3.0, (2, 2), np.float64)]),
        "turn": Box(-2.0, 2.0, (), np.float32),
        "switches": MultiBinary(2),
    }
)


class FixedLengthEnv(gym.Env):
    """Every step has reward 1, and an episode is truncated after `length` steps. Actions have no effect.

    Several `agents` have the same observations and rewards.
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
        return self._per_agent(self._obs()), {}

    def step(self, action: Any) -> tuple[np.ndarray, Any, bool, bool, dict]:
        self.t += 1
        ended = self.t == self.length
        terminated, truncated = ended and self.terminates, ended and not self.terminates
        return self._per_agent(self._obs()), self._per_agent(np.float32(1.0)), terminated, truncated, {}

    def _per_agent(self, value: Any) -> Any:
        return value if self.num_agents == 1 else np.stack([value] * self.num_agents)

    def _obs(self) -> np.ndarray:
        return np.ones(self.length, np.float32)


class TruncatingEnv(FixedLengthEnv):
    """One state, whose value is 1 / (1 - gamma). Only the time limit, which isn't observed, ends an episode."""


class EndlessEnv(FixedLengthEnv):
    """Episodes never end, and there is no time limit."""

    length = 2

    def step(self, action: Any) -> tuple[np.ndarray, Any, bool, bool, dict]:
        obs, reward, _, _, info = super().step(action)
        return obs, reward, False, False, info


class TerminatingEnv(FixedLengthEnv):
    """The last step terminates. State i is observed one-hot, and its value is the sum of gamma^k for k < length - i."""

    terminates = True

    def _obs(self) -> np.ndarray:
        return np.eye(self.length, dtype=np.float32)[min(self.t, self.length - 1)]


class LeavingAgentEnv(TerminatingEnv):
    """The second of two agents leaves at the second step.

    The environment still returns rewards for it. They must be ignored if `kind`, the kind of the reward, is
    "individual", but not if it is "shared".
    """

    def __init__(self, kind: str = "individual", continuous: bool = False) -> None:
        super().__init__(continuous, agents=2)
        self.reward_kind = kind

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict]:
        return super().reset(seed=seed)[0], self._info()

    def step(self, action: Any) -> tuple[np.ndarray, Any, bool, bool, dict]:
        obs, reward, terminated, truncated, _ = super().step(action)
        return obs, reward, terminated, truncated, self._info()

    def _info(self) -> dict[str, Any]:
        return {"alive": np.array([True, self.t < 2])}


class DictObsEnv(gym.Env):
    """Observations are a dict of all supported spaces, one of which is the correct action. `kind` selects the actions.

    Several `agents` have different cues, which the global state contains, and a shared reward.
    """

    def __init__(self, kind: str = "discrete", agents: int = 1) -> None:
        self.kind, self.num_agents = kind, agents
        self.observation_space = Dict(
            {
                "cue": Discrete(3),
                "noise": Box(-5.0, 5.0, (2,), np.float64),
                "nested": Dict({"image": Box(0, 255, (12, 12, 1), np.uint8), "bits": MultiDiscrete([2, 3])}),
            }
        )
        spaces = {
            "discrete": Discrete(3, start=1),
            "multi": MultiDiscrete([3, 2]),
            "continuous": Box(np.float32([-2.0]), np.float32([4.0])),
            "bits": MultiBinary(3),
            "hybrid": HYBRID,
        }
        self.action_space = spaces[kind]

    def _sample_obs(self) -> dict[str, Any]:
        rng = self.np_random
        cue = int(rng.integers(3))
        image = np.full((12, 12, 1), 80 * cue, np.uint8)
        bits = np.array([rng.integers(2), rng.integers(3)])
        return {"cue": cue, "noise": rng.normal(size=2).clip(-5, 5), "nested": {"image": image, "bits": bits}}

    def _observe(self) -> tuple[dict, dict]:
        observations = [self._sample_obs() for _ in range(self.num_agents)]
        self.cues = [obs["cue"] for obs in observations]
        if self.num_agents == 1:
            return observations[0], {}
        obs = tree_map(lambda *leaves: np.stack(leaves), *observations)
        return obs, {"state": np.eye(3, dtype=np.float32)[self.cues].reshape(-1)}

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[dict, dict]:
        super().reset(seed=seed)
        self.t = 0
        return self._observe()

    def _reward(self, action: Any, cue: int) -> float:
        assert self.action_space.contains(action if self.kind != "discrete" else int(action)), action
        if self.kind == "bits":
            return float(np.mean(action == np.eye(3)[cue]))
        if self.kind == "hybrid":
            tools, force = action["tools"]
            return float(action["part"] - 1 == cue) + float(tools[0, 1] == 2) - float(np.abs(force - cue).mean())
        if self.kind == "discrete":
            return float(int(action) - 1 == cue)
        if self.kind == "multi":
            return float(int(action[0]) == cue and int(action[1]) == 0)
        return -abs(float(action[0]) - (cue - 1))

    def step(self, action: Any) -> tuple[dict, Any, bool, bool, dict]:
        agents = range(self.num_agents)
        actions = [action] if len(agents) == 1 else [tree_map(lambda leaf, i=i: leaf[i, ...], action) for i in agents]
        reward = float(np.mean([self._reward(a, cue) for a, cue in zip(actions, self.cues, strict=True)]))
        self.t += 1
        obs, info = self._observe()
        info["solved"] = reward > 0.9
        return obs, reward if self.num_agents == 1 else [reward] * self.num_agents, False, self.t == 8, info


class MaskedEnv(gym.Env):
    """The reward is 1 for the highest allowed action. A forbidden action raises an error.

    The allowed actions are sampled at each step: two of four `actions`, or one to three of any other number. The last
    of several `agents` leaves after five steps. Then only action 0 is allowed for it, and its reward is 0.
    """

    def __init__(self, agents: int = 1, actions: int = 4) -> None:
        self.num_agents, self.actions = agents, actions
        self.observation_space = Box(0.0, 1.0, (actions,), np.float32)
        self.action_space = Discrete(actions)

    def _observe(self) -> tuple[np.ndarray, dict]:
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
        return self._observe()

    def step(self, action: Any) -> tuple[np.ndarray, Any, bool, bool, dict]:
        rewards = []
        for a, mask in zip(np.atleast_1d(action), self.mask, strict=True):
            if not mask[int(a)]:
                raise RuntimeError(f"action {a} is forbidden, the mask is {mask}")
            rewards.append(float(int(a) == int(np.flatnonzero(mask).max())))
        if self.num_agents > 1:
            rewards = list(np.array(rewards) * self.alive)
        self.t += 1
        obs, info = self._observe()
        return obs, rewards[0] if self.num_agents == 1 else rewards, False, self.t == 10, info


class TwoGroups(gym.Env):
    """Each agent observes a cue. Repeating it earns a runner 1; a guard earns 1 for the next higher action.

    An episode has ten steps. The best return of each agent is 10, random actions get 2.5.
    """

    agent_names = ("runner_0", "runner_1", "guard_0", "guard_1")
    num_agents = 4

    def __init__(self) -> None:
        self.observation_space, self.action_space = Box(0.0, 1.0, (4,), np.float32), Discrete(4)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.t = 0
        return self._observe()

    def step(self, action: Any) -> tuple[np.ndarray, np.ndarray, bool, bool, dict]:
        reward = (np.asarray(action) == (self.cue + np.array([0, 0, 1, 1])) % 4).astype(float)
        self.t += 1
        obs, info = self._observe()
        return obs, reward, False, self.t == 10, info

    def _observe(self) -> tuple[np.ndarray, dict]:
        self.cue = self.np_random.integers(4, size=4)
        return np.eye(4, dtype=np.float32)[self.cue], {}


class MaskedHybridEnv(gym.Env):
    """Two of four tools and one of two modes are allowed in each step. Forbidden choices raise an error.

    The reward is 1 for the highest allowed tool, minus the distance of `force` to 0.5.
    """

    def __init__(self, agents: int = 1) -> None:
        self.num_agents = agents
        self.observation_space = Box(0.0, 1.0, (6,), np.float32)
        self.action_space = Dict(
            {"force": Box(-1.0, 1.0, (1,)), "mode": Discrete(2, start=5), "tool": MultiDiscrete([4])}
        )

    def _observe(self) -> tuple[np.ndarray, dict]:
        self.mask = np.zeros((self.num_agents, 6), np.int8)
        for row in self.mask:
            row[self.np_random.integers(2)] = 1  # the choices are in the order of the space: mode, then tool
            row[2 + self.np_random.permutation(4)[:2]] = 1
        mask = self.mask if self.num_agents > 1 else self.mask[0]
        return mask.astype(np.float32), {"action_mask": mask}

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.t = 0
        return self._observe()

    def step(self, action: Any) -> tuple[np.ndarray, Any, bool, bool, dict]:
        rewards = []
        for i, mask in enumerate(self.mask):
            own = action if self.num_agents == 1 else {key: part[i] for key, part in action.items()}
            if not (self.action_space.contains(own) and mask[own["mode"] - 5] and mask[2 + own["tool"][0]]):
                raise RuntimeError(f"action {own} is forbidden, the mask is {mask}")
            best = int(own["tool"][0]) == int(np.flatnonzero(mask).max()) - 2
            rewards.append(float(best) - abs(float(own["force"][0]) - 0.5))
        self.t += 1
        obs, info = self._observe()
        return obs, rewards[0] if self.num_agents == 1 else rewards, False, self.t == 10, info


class SwitchesEnv(gym.Env):
    """The reward is 1 if all four switches equal the observed ones. Ten steps."""

    observation_space, action_space = Box(0.0, 1.0, (4,), np.float32), MultiBinary(4)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.t, self.switches = 0, self.np_random.integers(0, 2, 4)
        return self.switches.astype(np.float32), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict]:
        reward = float(np.array_equal(action, self.switches))
        self.t, self.switches = self.t + 1, self.np_random.integers(0, 2, 4)
        return self.switches.astype(np.float32), reward, False, self.t == 10, {}


def make_mixed() -> gym.Env:
    """Return an environment of an agent that chooses a cell of a grid, and one that steers to a target.

    The first gets 1 for the marked cell; its mask forbids another one. The second gets 1
    minus the distance of its action, in [-2, 4], to the target. An episode has ten steps.
    """
    from pettingzoo import ParallelEnv

    class Mixed(ParallelEnv):
        metadata = {"name": "mixed"}  # noqa: RUF012
        possible_agents = ["eye", "hand"]  # noqa: RUF012
        image = Box(0.0, 1.0, (2, 2), np.float32)
        spaces = {  # noqa: RUF012
            "eye": Dict({"observation": image, "action_mask": Box(0, 1, (4,), np.int8)}),
            "hand": Dict({"target": Box(-2.0, 4.0, (1,), np.float32), "phase": Discrete(3)}),
        }

        def observation_space(self, agent: str) -> gym.Space:
            return self.spaces[agent]

        def action_space(self, agent: str) -> gym.Space:
            return Discrete(4) if agent == "eye" else Box(-2.0, 4.0, (1,), np.float32)

        def reset(self, seed: int | None = None, options: Any = None) -> tuple[dict, dict]:
            self.rng, self.t, self.agents = np.random.default_rng(seed), 0, ["eye", "hand"]
            return self._observe(), {"eye": {}, "hand": {}}

        def step(self, actions: dict) -> tuple[dict, dict, dict, dict, dict]:
            assert isinstance(actions["eye"], int)
            assert self.mask[actions["eye"]]
            assert actions["hand"].shape == (1,)
            reward = {"eye": float(actions["eye"] == self.cell)}
            reward["hand"] = 1.0 - abs(float(actions["hand"][0] - self.target))
            self.t += 1
            truncated = dict.fromkeys(self.agents, self.t == 10)
            obs, infos, terminated = self._observe(), {"eye": {}, "hand": {}}, dict.fromkeys(self.agents, False)
            if self.t == 10:
                self.agents = []
            return obs, reward, terminated, truncated, infos

        def _observe(self) -> dict:
            self.cell, self.target = int(self.rng.integers(4)), float(self.rng.uniform(-2, 4))
            self.mask = np.ones(4, np.int8)
            self.mask[(self.cell + int(self.rng.integers(1, 4))) % 4] = 0
            image = (np.arange(4) == self.cell).astype(np.float32).reshape(2, 2)
            eye = {"observation": image, "action_mask": self.mask}
            return {"eye": eye, "hand": {"target": np.float32([self.target]), "phase": self.t % 3}}

    from zhixing.envs.adapters.pettingzoo_envs import PettingZooParallelEnv

    return PettingZooParallelEnv(Mixed(), "mixed", agents_leave=False)


class RaisingEnv(FixedLengthEnv):
    """Raises an error at its third step."""

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        if self.t == 2:
            raise ZeroDivisionError("the third step is broken")
        return super().step(action)


class SlowEnv(TerminatingEnv):
    """A step takes two milliseconds on any machine."""

    def step(self, action: Any) -> tuple[np.ndarray, Any, bool, bool, dict]:
        time.sleep(0.002)
        return super().step(action)


class HugeRewardEnv(FixedLengthEnv):
    """Rewards are so large that their squares overflow."""

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        obs, _, terminated, truncated, info = super().step(action)
        return obs, 1e38, terminated, truncated, info

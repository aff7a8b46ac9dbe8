"""Vector environments as users write them, in a module that can be imported by name."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.vector.utils import batch_space
from sample_envs import MixedObs


class Walks(VectorEnv):
    """Rows walk from 0 to 5 on a line and lose 0.1 per step. Reaching 5 ends with a reward of 1; 9 steps truncate."""

    metadata = {  # noqa: RUF012  (as in gym.vector.VectorEnv)
        "autoreset_mode": AutoresetMode.DISABLED,
        "logged_info_keys": ("steps",),
        "render_modes": ["rgb_array"],
    }

    def __init__(self, num_envs: int = 8, render_mode: str | None = None) -> None:
        self.num_envs, self.render_mode = num_envs, render_mode
        self.single_observation_space, self.single_action_space = Box(0.0, 9.0, (2,), np.float32), Discrete(2)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.position, self.steps = np.zeros(num_envs), np.zeros(num_envs, int)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        rows = (options or {}).get("reset_mask", np.ones(self.num_envs, bool))
        self.position[rows] = self.np_random.random(rows.sum())
        self.steps[rows] = 0
        return self._obs(), {}

    def step(self, actions: Any) -> Any:
        self.position = np.maximum(self.position + actions - 0.25, 0.0)
        self.steps += 1
        terminated, truncated = self.position >= 5, self.steps >= 9
        return self._obs(), terminated - 0.1, terminated, truncated, {"steps": self.steps.copy()}

    def _obs(self) -> Any:
        return np.stack([self.position, self.steps], 1).astype(np.float32)

    def render(self) -> Any:
        return None if self.render_mode is None else np.full((self.num_envs, 16, 16, 3), 40, np.uint8)


class SavedWalks(Walks):
    """Can be saved in the middle of episodes."""

    def state_dict(self) -> dict[str, Any]:
        rng = self.np_random.bit_generator.state
        return {"position": self.position.copy(), "steps": self.steps.copy(), "rng": dict(rng)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position, self.steps = state["position"].copy(), state["steps"].copy()
        self.np_random.bit_generator.state = state["rng"]


class ThreeWalks(SavedWalks):
    """Always has three rows."""

    def __init__(self) -> None:
        super().__init__(3)


def mixed(mode: AutoresetMode) -> Any:
    def make(num_envs: int) -> VectorEnv:
        return SyncVectorEnv([MixedObs] * num_envs, autoreset_mode=mode)

    return make


same_step, next_step, disabled = map(mixed, (AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP, AutoresetMode.DISABLED))


class PairSum(VectorEnv):
    """Two agents with masks, a state and a shared reward, in the mode SAME_STEP with arrays as final observations."""

    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}  # noqa: RUF012
    num_agents, reward_kind = 2, "shared"

    def __init__(self, num_envs: int) -> None:
        self.num_envs, self.t = num_envs, 0
        self.single_observation_space, self.single_action_space = Box(0.0, 9.0, (1,), np.float32), Discrete(3)

    def _at(self, t: int) -> Any:
        n = self.num_envs
        mask = np.ones((n, 2, 3), bool)
        mask[:, 0, 2] = False
        obs = np.full((n, 2, 1), t, np.float32)
        return obs, {"action_mask": mask, "state": np.full((n, 4), t, np.float32)}

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.t = 0
        return self._at(0)

    def step(self, actions: Any) -> Any:
        self.t += 1
        reward = np.repeat(actions.sum(1, keepdims=True), 2, 1).astype(float)
        obs, info = self._at(self.t)
        ended = np.full(self.num_envs, self.t == 4)
        if self.t == 4:
            final_obs, final_info = obs, {**info, "sum": np.full(self.num_envs, 7)}
            self.t = 0
            obs, info = self._at(0)
            info |= {"final_obs": final_obs, "final_info": final_info}
        return obs, reward, ended, np.zeros(self.num_envs, bool), info


class Broken(Walks):
    """Misbehaves in one way."""

    def __init__(self, num_envs: int, problem: str = "none") -> None:
        super().__init__(num_envs)
        self.problem = problem
        modes = {"no mode": None, "no final_obs": AutoresetMode.SAME_STEP, "wrong mode": "Sometimes"}
        self.metadata = {**self.metadata, "autoreset_mode": modes.get(problem, AutoresetMode.DISABLED)}
        if problem == "no space":
            del self.single_action_space
        if problem == "other number":
            self.num_envs = num_envs + 1

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        if self.problem == "ignored mask":
            options = None
        return super().reset(seed=seed, options=options)

    def step(self, actions: Any) -> Any:
        obs, reward, terminated, truncated, info = super().step(actions)
        if self.problem == "NaN":
            reward = reward + np.where(self.steps == 3, np.nan, 0.0)
        if self.problem == "shape":
            obs = obs[:, :1]
        if self.problem == "flag":
            terminated = terminated + 2
        return obs, reward, terminated, truncated, info


class Pushes(VectorEnv):
    """Actions are dicts. In the mode NEXT_STEP, and doesn't know reset masks."""

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012

    def __init__(self, num_envs: int) -> None:
        self.num_envs = num_envs
        self.single_observation_space = Box(-9.0, 9.0, (1,), np.float32)
        self.single_action_space = Dict({"push": Box(-1.0, 1.0, (1,), np.float32), "twice": Discrete(2)})

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.position = self.np_random.uniform(-0.5, 0.5, self.num_envs)
        self.ended = np.zeros(self.num_envs, bool)
        return self._obs(), {}

    def step(self, actions: Any) -> Any:
        self.position += actions["push"][:, 0] * (1 + actions["twice"])
        self.position[self.ended] = self.np_random.uniform(-0.5, 0.5, self.ended.sum())
        reward = np.where(self.ended, 0.0, 1.0)
        self.ended = (np.abs(self.position) > 1) & ~self.ended
        return self._obs(), reward, self.ended.copy(), np.zeros(self.num_envs, bool), {}

    def _obs(self) -> Any:
        return self.position[:, None].astype(np.float32)


def not_a_vector(num_envs: int) -> Any:
    return MixedObs()


gym.register("OnlyWalks-v0", vector_entry_point=SavedWalks)

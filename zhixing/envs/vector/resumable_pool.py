"""Pools of environments from the package `envpool` that can be saved and restored in mid-episode.

EnvPool steps all environments of a pool in one call, in its own threads. All randomness of an environment comes from
its seed, so most pools can be restored: start all previous episodes again, then repeat the actions of the current ones.
Where that leads to another state (an environment with random steps, or another version of EnvPool), the rows are
reported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from zhixing.envs.vector.base import Info, Result
from zhixing.envs.vector.step_buffers import Array
from zhixing.envs.vector.sub_env import ScalarInfo, State
from zhixing.utils.cpus import cpu_count

MAX_RECORDED_ACTIONS = 131_072  # per episode; longer episodes start again when restored


class ResumablePool:
    """A pool whose episodes are started explicitly. EnvPool fixes the seeds of a pool, so new seeds make a new pool."""

    def __init__(self, make: Callable[..., Any], num_envs: int, obs: Array, action_repeat: int = 1) -> None:
        """Prepare a pool that `make` creates, given seeds and a number of threads. Observations go to `obs [N,...]`.

        Each action is repeated `action_repeat` times or until the episode ends, and the rewards are summed.
        """
        self.make, self.num_envs, self.obs, self.action_repeat = make, num_envs, obs, action_repeat
        self.rng = np.random.default_rng()
        self.env: Any = None

    def reset(self, seed: int | None) -> Array:
        """Start the first episodes of a new pool. Without a seed, they differ from those of earlier resets."""
        if seed is not None:
            self.rng = np.random.default_rng(seed)
        return self.start(self.rng.integers(2**31 - 1, size=self.num_envs))

    def start(self, seeds: Array) -> Array:
        """Start the first episodes of a new pool with these seeds."""
        self.close()
        threads = min(self.num_envs, cpu_count())
        self.env = self.make(num_envs=self.num_envs, seed=seeds.tolist(), num_threads=threads)
        self.seeds, self.episodes = seeds, np.zeros(self.num_envs, np.int64)
        self.actions: list[list[Any]] = [[] for _ in range(self.num_envs)]  # of the current episodes
        self.lengths = np.zeros(self.num_envs, np.int64)  # of the current episodes
        return self.start_episodes(np.arange(self.num_envs))

    def start_episodes(self, rows: Array) -> Array:
        """Start the next episodes of these rows. Return the observations of all rows, live."""
        obs, info = self.env.reset(rows.astype(np.int32))
        self.obs[info["env_id"]] = obs
        self.episodes[rows] += 1
        self.lengths[rows] = 0
        for row in rows:
            self.actions[row].clear()
        return self.obs

    def step_without_reset(self, actions: Array) -> tuple[Array, Array, Array, Array]:
        """Step all environments. Return observations (live), rewards, terminated and truncated."""
        reward = np.zeros(self.num_envs, np.float32)
        terminated, truncated = np.zeros((2, self.num_envs), bool)
        running = np.arange(self.num_envs, dtype=np.int32)
        for _ in range(self.action_repeat):
            obs, rewards, terminations, truncations, info = self.env.step(actions[running], running)
            rows = info["env_id"]
            self.obs[rows], terminated[rows], truncated[rows] = obs, terminations, truncations
            reward[rows] += rewards
            running = rows[~(terminations | truncations)]
            if not len(running):
                break
        self.lengths += 1
        for recorded, action in zip(self.actions, actions.tolist(), strict=True):
            if len(recorded) < MAX_RECORDED_ACTIONS:
                recorded.append(action)
        return self.obs, reward, terminated, truncated

    def step(self, actions: Array) -> Result:
        """Step all environments with same-step autoreset; EnvPool's own autoreset happens in the next step."""
        obs, reward, terminated, truncated = self.step_without_reset(actions)
        info: Info = {}
        ended = np.flatnonzero(terminated | truncated)
        if len(ended):
            final_info: dict[int, ScalarInfo] = {index: {} for index in ended.tolist()}
            info = {"final_obs": obs.copy(), "final_info": final_info}
            self.start_episodes(ended)
        return obs, reward, terminated, truncated, info

    def state_dict(self) -> State:
        return {
            "rng": dict(self.rng.bit_generator.state),
            "seeds": self.seeds,
            "episodes": self.episodes.copy(),
            "actions": [
                np.array(actions) if length <= MAX_RECORDED_ACTIONS else None
                for actions, length in zip(self.actions, self.lengths, strict=True)
            ],
            "obs": self.obs.copy(),
        }

    def load_state_dict(self, state: State) -> list[int]:
        """Restore a saved state. Return the rows that couldn't be restored exactly: they start a new episode."""
        self.rng.bit_generator.state = state["rng"]
        self.start(state["seeds"])
        while (behind := np.flatnonzero(self.episodes < state["episodes"])).size:
            self.start_episodes(behind)
        for row, actions in enumerate(state["actions"]):
            if actions is None:
                continue
            for action in actions.repeat(self.action_repeat, 0):
                self.env.send(action[None], np.array([row], np.int32))
                self.obs[row] = self.env.recv()[0][0]
            self.actions[row] = actions.tolist()
            self.lengths[row] = len(actions)
        differs = (self.obs != state["obs"]).reshape(self.num_envs, -1).any(1)
        differs[[row for row, actions in enumerate(state["actions"]) if actions is None]] = True
        inexact = np.flatnonzero(differs)
        if len(inexact):
            self.start_episodes(inexact)
        return inexact.tolist()

    @property
    def returned_obs(self) -> Array:
        """The observations `[N,...]` as returned by `step`, live."""
        return self.obs

    def close(self) -> None:
        if self.env is not None:
            self.env.close()
            self.env = None


class ShiftedObsPool(ResumablePool):
    """Shift the images `[N,H,W,C]` by up to `shift` pixels, randomly at every step; the border repeats.

    An agent can't memorize such images (random crops in Laskin et al., 2020). `obs` holds the original images,
    `returned_obs` the shifted ones.
    """

    def __init__(self, make: Callable[..., Any], num_envs: int, obs: Array, action_repeat: int, shift: int) -> None:
        super().__init__(make, num_envs, obs, action_repeat)
        self.shift, self.shifted_obs = shift, obs.copy()

    def start(self, seeds: Array) -> Array:
        self.shift_rng = np.random.default_rng(seeds)
        self.offsets = np.zeros((self.num_envs, 2), np.int64)
        return super().start(seeds)

    def start_episodes(self, rows: Array) -> Array:
        super().start_episodes(rows)
        return self._shift_randomly(rows)

    def step_without_reset(self, actions: Array) -> tuple[Array, Array, Array, Array]:
        _, reward, terminated, truncated = super().step_without_reset(actions)
        return self._shift_randomly(np.arange(self.num_envs)), reward, terminated, truncated

    def _shift_randomly(self, rows: Array) -> Array:
        self.offsets[rows] = self.shift_rng.integers(-self.shift, self.shift, (len(rows), 2), endpoint=True)
        return self._apply_offsets(rows)

    def _apply_offsets(self, rows: Array) -> Array:
        height, width = self.obs.shape[1:3]
        for row, (down, right) in zip(rows.tolist(), self.offsets[rows].tolist(), strict=True):
            image = self.obs[row].take(np.arange(height) + down, 0, mode="clip")
            image.take(np.arange(width) + right, 1, self.shifted_obs[row], mode="clip")
        return self.shifted_obs

    @property
    def returned_obs(self) -> Array:
        return self.shifted_obs

    def state_dict(self) -> State:
        shift_state = {"shift_rng": dict(self.shift_rng.bit_generator.state), "offsets": self.offsets.copy()}
        return {**super().state_dict(), **shift_state}

    def load_state_dict(self, state: State) -> list[int]:
        inexact = super().load_state_dict(state)
        self.shift_rng.bit_generator.state, self.offsets = state["shift_rng"], state["offsets"].copy()
        self._apply_offsets(np.arange(self.num_envs))
        return inexact

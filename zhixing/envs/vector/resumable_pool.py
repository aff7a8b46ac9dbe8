"""Pools of EnvPool (package envpool): copies of a task that are stepped in one call, by threads of its own.

EnvPool draws all chance of a copy from its seed, so that a pool can mostly be put back into the middle of its episodes:
all episodes before are begun again, and the actions of the present ones repeated. Where that leads elsewhere (a task
whose steps draw, too, or another version), the rows are named.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from zhixing.envs.vector.base import Info, Result
from zhixing.envs.vector.step_buffers import Array
from zhixing.envs.vector.sub_env import ScalarInfo, State
from zhixing.utils.cpus import cpu_count

RECORDED = 131_072  # actions of an episode that are recorded; longer episodes begin again on resume


class ResumablePool:
    """Copies whose episodes are begun by hand. EnvPool fixes seeds for good: others make another pool."""

    def __init__(self, make: Callable[..., Any], num: int, obs: Array, skip: int = 1) -> None:
        """`make` is EnvPool's, but for seeds and threads; `obs` the place for what is shown, `[N,...]`.

        Each action is done `skip` times, or until the episode ends, and the rewards are summed.
        """
        self.make, self.num, self.obs, self.skip = make, num, obs, skip
        self.rng = np.random.default_rng()
        self.env: Any = None

    def reset(self, seed: int | None) -> Array:
        """First episodes; without a seed others than those before."""
        if seed is not None:
            self.rng = np.random.default_rng(seed)
        return self.begin_all(self.rng.integers(2**31 - 1, size=self.num))

    def begin_all(self, seeds: Array) -> Array:
        """The first episodes of these seeds."""
        self.close()
        threads = min(self.num, cpu_count())
        self.env = self.make(num_envs=self.num, seed=seeds.tolist(), num_threads=threads)
        self.seeds, self.episodes = seeds, np.zeros(self.num, np.int64)
        self.log: list[list[Any]] = [[] for _ in range(self.num)]  # actions of the present episodes
        self.lengths = np.zeros(self.num, np.int64)  # of the present episodes
        return self.begin(np.arange(self.num))

    def begin(self, rows: Array) -> Array:
        """The next episodes of these rows. What all show, live."""
        obs, info = self.env.reset(rows.astype(np.int32))
        self.obs[info["env_id"]] = obs
        self.episodes[rows] += 1
        self.lengths[rows] = 0
        for row in rows:
            self.log[row].clear()
        return self.obs

    def act(self, actions: Array) -> tuple[Array, Array, Array, Array]:
        """One step of all, whose episodes may end: what they show (live), rewards, terminated, truncated."""
        reward = np.zeros(self.num, np.float32)
        terminated, truncated = np.zeros((2, self.num), bool)
        going = np.arange(self.num, dtype=np.int32)
        for _ in range(self.skip):
            obs, earned, fell, cut, info = self.env.step(actions[going], going)
            rows = info["env_id"]
            self.obs[rows], terminated[rows], truncated[rows] = obs, fell, cut
            reward[rows] += earned
            going = rows[~(fell | cut)]
            if not len(going):
                break
        self.lengths += 1
        for log, action in zip(self.log, actions.tolist(), strict=True):
            if len(log) < RECORDED:
                log.append(action)
        return self.obs, reward, terminated, truncated

    def step(self, actions: Array) -> Result:
        """`act`, and those whose episodes end begin anew in the same step; EnvPool itself would do so in the next."""
        obs, reward, terminated, truncated = self.act(actions)
        info: Info = {}
        ended = np.flatnonzero(terminated | truncated)
        if len(ended):
            numbers: dict[int, ScalarInfo] = {index: {} for index in ended.tolist()}
            info = {"final_obs": obs.copy(), "final_info": numbers}
            self.begin(ended)
        return obs, reward, terminated, truncated, info

    def state_dict(self) -> State:
        return {
            "rng": dict(self.rng.bit_generator.state),
            "seeds": self.seeds,
            "episodes": self.episodes.copy(),
            "actions": [
                np.array(log) if length <= RECORDED else None
                for log, length in zip(self.log, self.lengths, strict=True)
            ],
            "obs": self.obs.copy(),
        }

    def load_state_dict(self, state: State) -> list[int]:
        """The rows that didn't show what they showed then: they begin anew."""
        self.rng.bit_generator.state = state["rng"]
        self.begin_all(state["seeds"])
        while (left := np.flatnonzero(self.episodes < state["episodes"])).size:
            self.begin(left)
        unknown = [row for row, actions in enumerate(state["actions"]) if actions is None]
        for row, actions in enumerate(state["actions"]):
            if actions is None:
                continue
            for action in actions.repeat(self.skip, 0):
                self.env.send(action[None], np.array([row], np.int32))
                self.obs[row] = self.env.recv()[0][0]
            self.log[row] = actions.tolist()
            self.lengths[row] = len(actions)
        differ = (self.obs != state["obs"]).reshape(self.num, -1).any(1)
        differ[unknown] = True
        strange = np.flatnonzero(differ)
        if len(strange):
            self.begin(strange)
        return strange.tolist()

    @property
    def shown(self) -> Array:
        """What all show, live."""
        return self.obs

    def close(self) -> None:
        if self.env is not None:
            self.env.close()
            self.env = None


class ShiftedObsPool(ResumablePool):
    """Pictures `[N,H,W,C]` that are moved at every step, each by chance, by up to `shift` pixels; the border repeats.

    An agent can't learn such pictures by heart (random crops in Laskin et al., 2020). `obs` isn't moved, `shown` is.
    """

    def __init__(self, make: Callable[..., Any], num: int, obs: Array, skip: int, shift: int) -> None:
        super().__init__(make, num, obs, skip)
        self.shift, self.moved = shift, obs.copy()

    def begin_all(self, seeds: Array) -> Array:
        self.chance = np.random.default_rng(seeds)
        self.offsets = np.zeros((self.num, 2), np.int64)
        return super().begin_all(seeds)

    def begin(self, rows: Array) -> Array:
        super().begin(rows)
        return self._move(rows)

    def act(self, actions: Array) -> tuple[Array, Array, Array, Array]:
        _, reward, terminated, truncated = super().act(actions)
        return self._move(np.arange(self.num)), reward, terminated, truncated

    def _move(self, rows: Array) -> Array:
        self.offsets[rows] = self.chance.integers(-self.shift, self.shift, (len(rows), 2), endpoint=True)
        return self._show(rows)

    def _show(self, rows: Array) -> Array:
        height, width = self.obs.shape[1:3]
        for row, (down, right) in zip(rows.tolist(), self.offsets[rows].tolist(), strict=True):
            part = self.obs[row].take(np.arange(height) + down, 0, mode="clip")
            part.take(np.arange(width) + right, 1, self.moved[row], mode="clip")
        return self.moved

    @property
    def shown(self) -> Array:
        return self.moved

    def state_dict(self) -> State:
        return {**super().state_dict(), "chance": dict(self.chance.bit_generator.state), "offsets": self.offsets.copy()}

    def load_state_dict(self, state: State) -> list[int]:
        strange = super().load_state_dict(state)
        self.chance.bit_generator.state, self.offsets = state["chance"], state["offsets"].copy()
        self._show(np.arange(self.num))
        return strange

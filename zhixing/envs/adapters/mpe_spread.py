"""MPE's simple_spread for many worlds at once: mpe2's arithmetic, in arrays. N worlds, A agents, A landmarks.

Agents pay for how far the nearest of them is from each landmark, and for touching each other.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from gymnasium.spaces import Box, Discrete

from zhixing.core.spaces import Spaces
from zhixing.core.tree import Tree
from zhixing.envs.vector.base import Info, Result
from zhixing.envs.vector.step_buffers import Array
from zhixing.envs.vector.sub_env import State
from zhixing.errors import UserError

SECONDS = 0.1  # of a step
DAMPING = 0.25
PUSH = 5.0  # force of a full action
CONTACT_FORCE, CONTACT_MARGIN = 100.0, 0.001
TOUCH = 0.3  # twice an agent's radius
COVER = 0.1  # how near an agent must be to a landmark to cover it
MOVES = PUSH * np.array([[0, 0], [-1, 0], [1, 0], [0, -1], [0, 1]], float)  # nothing, left, right, down, up


class NativeSpread:
    options: ClassVar[frozenset[str]] = frozenset(
        {"N", "local_ratio", "max_cycles", "continuous_actions", "terminate_on_success"}
    )

    def __init__(
        self,
        num: int,
        N: int = 3,  # noqa: N803  (mpe2's own name)
        local_ratio: float = 0.5,
        max_cycles: int = 25,
        continuous_actions: bool = False,
        terminate_on_success: bool = False,
    ) -> None:
        if N < 1:
            raise UserError(f"mpe/simple_spread has N={N} agents; it needs at least 1")
        if not 0.0 <= local_ratio <= 1.0:
            raise UserError(f"mpe/simple_spread has local_ratio={local_ratio}; it must lie between 0 and 1")
        self.num, self.agents = num, N
        self.local_ratio, self.max_cycles = local_ratio, max_cycles
        self.continuous, self.stop_when_covered = continuous_actions, terminate_on_success
        self.size = 4 + 2 * N + 4 * (N - 1)
        action = Box(0.0, 1.0, (5,), np.float32) if continuous_actions else Discrete(5)
        self.spaces = Spaces(Box(-np.inf, np.inf, (self.size,), np.float32), action, num_agents=N)
        self.rng = np.random.default_rng()
        self.pos = np.zeros((num, N, 2))
        self.vel = np.zeros((num, N, 2))
        self.landmarks = np.zeros((num, N, 2))
        self.steps = np.zeros(num, np.int64)
        self.same = np.where(np.eye(N), np.inf, 0.0)  # added to distances: nobody touches itself
        self.pairs = np.flatnonzero(self.same.reshape(-1) == 0)  # of the A x A in a row, two different agents

    def reset(self, seed: int | None) -> tuple[Tree, Info]:
        if seed is not None:
            self.rng = np.random.default_rng(seed)
        self._begin(np.arange(self.num))
        self._measure()
        return self._observe(), {}

    def step(self, actions: Array) -> Result:
        force = self._push(actions) + self._contact()
        self.pos = self.pos + self.vel * SECONDS
        self.vel = self.vel * (1.0 - DAMPING) + force * SECONDS
        self.steps += 1
        self._measure()
        nearest = self.to_landmarks_far.min(1)  # [N, A] by landmark
        touched = (self.far < TOUCH).sum(2)
        shared = -(1.0 - self.local_ratio) * nearest.sum(1)
        reward = (shared[:, None] - self.local_ratio * touched).astype(np.float32)
        truncated = self.steps >= self.max_cycles
        terminated = ~truncated & (nearest < COVER).all(1) if self.stop_when_covered else np.zeros(self.num, bool)
        obs = self._observe()
        ended = terminated | truncated
        info: Info = {}
        if ended.any():
            rows = ended.nonzero()[0]
            info = {"final_obs": obs, "final_info": {index: {} for index in rows.tolist()}}
            self._begin(rows)
            self._measure()
            obs = self._observe()
        return obs, reward.reshape(self.num, *self.spaces.agents), terminated, truncated, info

    def state_dict(self) -> State:
        arrays = {name: getattr(self, name).copy() for name in ("pos", "vel", "landmarks", "steps")}
        return {**arrays, "rng": dict(self.rng.bit_generator.state)}

    def load_state_dict(self, state: State) -> tuple[Tree, Info]:
        for name in ("pos", "vel", "landmarks", "steps"):
            setattr(self, name, state[name].copy())
        self.rng.bit_generator.state = state["rng"]
        self._measure()
        return self._observe(), {}

    def render(self, index: int) -> Array | None:
        return None  # mpe2's own version draws: backend serial

    def close(self) -> None:
        pass

    def _begin(self, rows: Array) -> None:
        places = self.rng.uniform(-1.0, 1.0, (len(rows), 2, self.agents, 2))
        self.pos[rows], self.landmarks[rows] = places[:, 0], places[:, 1]
        self.vel[rows], self.steps[rows] = 0.0, 0

    def _push(self, actions: Array) -> Array:
        if not self.continuous:
            return MOVES[actions.reshape(self.num, self.agents)]
        actions = np.clip(actions, 0.0, 1.0).reshape(self.num, self.agents, 5)
        return PUSH * (actions[..., 2::2] - actions[..., 1::2]).astype(float)

    def _contact(self) -> Array:
        """Agents push each other away, softly around the distance at which they touch."""
        depth = np.logaddexp(0.0, (TOUCH - self.far) / CONTACT_MARGIN) * CONTACT_MARGIN
        strength = CONTACT_FORCE * depth / self.far  # 0 / infinity on the diagonal
        return -(self.to_agents * strength[..., None]).sum(2)

    def _measure(self) -> None:
        """Where everything is as each agent sees it: needed for rewards, observations and the next step's contacts."""
        here = self.pos[:, :, None]
        self.to_agents = self.pos[:, None] - here  # [N, A, A, 2]
        self.to_landmarks = self.landmarks[:, None] - here
        self.far = _length(self.to_agents) + self.same
        self.to_landmarks_far = _length(self.to_landmarks)

    def _observe(self) -> Array:
        """Own velocity and place, landmarks, the others, and what they say: nothing in this task."""
        agents, num = self.agents, self.num
        obs = np.zeros((num, agents, self.size), np.float32)
        obs[..., 0:2], obs[..., 2:4] = self.vel, self.pos
        obs[..., 4 : 4 + 2 * agents] = self.to_landmarks.reshape(num, agents, -1)
        others = self.to_agents.reshape(num, -1, 2)[:, self.pairs]
        obs[..., 4 + 2 * agents : 2 + 4 * agents] = others.reshape(num, agents, -1)
        return obs.reshape(num, *self.spaces.agents, self.size)


def _length(vectors: Array) -> Array:
    return np.sqrt(np.square(vectors[..., 0]) + np.square(vectors[..., 1]))

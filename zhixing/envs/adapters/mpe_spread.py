"""MPE's simple_spread as a native vector environment: mpe2's arithmetic on arrays of N worlds, A agents, A landmarks.

The penalty is the distance from each landmark to its nearest agent, plus one for each collision between agents.
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

DT = 0.1  # seconds per step
DAMPING = 0.25
ACTION_FORCE = 5.0
CONTACT_FORCE, CONTACT_MARGIN = 100.0, 0.001
COLLISION_DISTANCE = 0.3  # twice an agent's radius
COVER_DISTANCE = 0.1  # from a landmark to an agent that covers it
STATE_KEYS = ("pos", "vel", "landmarks", "steps")
MOVES = ACTION_FORCE * np.array([[0, 0], [-1, 0], [1, 0], [0, -1], [0, 1]], float)  # nothing, left, right, down, up


class NativeSpread:
    """N worlds of simple_spread, stepped together."""

    options: ClassVar[frozenset[str]] = frozenset(
        {"N", "local_ratio", "max_cycles", "continuous_actions", "terminate_on_success"}
    )

    def __init__(
        self,
        num: int,
        N: int = 3,  # noqa: N803  (mpe2's name)
        local_ratio: float = 0.5,
        max_cycles: int = 25,
        continuous_actions: bool = False,
        terminate_on_success: bool = False,
    ) -> None:
        if N < 1:
            raise UserError(f"mpe/simple_spread: env.N={N}: must be at least 1 agent")
        if not 0.0 <= local_ratio <= 1.0:
            raise UserError(f"mpe/simple_spread: env.local_ratio={local_ratio}: must be between 0 and 1")
        self.num, self.num_agents = num, N
        self.local_ratio, self.max_cycles = local_ratio, max_cycles
        self.continuous_actions, self.terminate_on_success = continuous_actions, terminate_on_success
        self.obs_size = 4 + 2 * N + 4 * (N - 1)
        action = Box(0.0, 1.0, (5,), np.float32) if continuous_actions else Discrete(5)
        self.spaces = Spaces(Box(-np.inf, np.inf, (self.obs_size,), np.float32), action, num_agents=N)
        self.rng = np.random.default_rng()
        self.pos = np.zeros((num, N, 2))
        self.vel = np.zeros((num, N, 2))
        self.landmarks = np.zeros((num, N, 2))
        self.steps = np.zeros(num, np.int64)
        self.self_distance = np.where(np.eye(N), np.inf, 0.0)  # added to distances: no agent hits itself
        self.pairs = np.flatnonzero(self.self_distance.reshape(-1) == 0)  # flat indices of pairs of different agents

    def reset(self, seed: int | None) -> tuple[Tree, Info]:
        if seed is not None:
            self.rng = np.random.default_rng(seed)
        self._reset_rows(np.arange(self.num))
        self._update_distances()
        return self._observe(), {}

    def step(self, actions: Array) -> Result:
        force = self._action_force(actions) + self._contact_force()
        self.pos = self.pos + self.vel * DT
        self.vel = self.vel * (1.0 - DAMPING) + force * DT
        self.steps += 1
        self._update_distances()
        nearest = self.landmark_distance.min(1)  # [N, landmarks]: distance to the nearest agent
        collisions = (self.agent_distance < COLLISION_DISTANCE).sum(2)
        shared = -(1.0 - self.local_ratio) * nearest.sum(1)
        reward = (shared[:, None] - self.local_ratio * collisions).astype(np.float32)
        truncated = self.steps >= self.max_cycles
        terminated = np.zeros(self.num, bool)
        if self.terminate_on_success:
            terminated = ~truncated & (nearest < COVER_DISTANCE).all(1)
        obs = self._observe()
        ended = terminated | truncated
        info: Info = {}
        if ended.any():
            rows = ended.nonzero()[0]
            info = {"final_obs": obs, "final_info": {index: {} for index in rows.tolist()}}
            self._reset_rows(rows)
            self._update_distances()
            obs = self._observe()
        return obs, reward.reshape(self.num, *self.spaces.agents), terminated, truncated, info

    def state_dict(self) -> State:
        arrays = {name: getattr(self, name).copy() for name in STATE_KEYS}
        return {**arrays, "rng": dict(self.rng.bit_generator.state)}

    def load_state_dict(self, state: State) -> tuple[Tree, Info]:
        for name in STATE_KEYS:
            setattr(self, name, state[name].copy())
        self.rng.bit_generator.state = state["rng"]
        self._update_distances()
        return self._observe(), {}

    def render(self, index: int) -> Array | None:
        return None  # use vector.backend=serial to render

    def close(self) -> None:
        pass

    def _reset_rows(self, rows: Array) -> None:
        positions = self.rng.uniform(-1.0, 1.0, (len(rows), 2, self.num_agents, 2))
        self.pos[rows], self.landmarks[rows] = positions[:, 0], positions[:, 1]
        self.vel[rows], self.steps[rows] = 0.0, 0

    def _action_force(self, actions: Array) -> Array:
        if not self.continuous_actions:
            return MOVES[actions.reshape(self.num, self.num_agents)]
        actions = np.clip(actions, 0.0, 1.0).reshape(self.num, self.num_agents, 5)
        return ACTION_FORCE * (actions[..., 2::2] - actions[..., 1::2]).astype(float)

    def _contact_force(self) -> Array:
        """Return the force that pushes agents apart, a soft threshold around the collision distance."""
        depth = np.logaddexp(0.0, (COLLISION_DISTANCE - self.agent_distance) / CONTACT_MARGIN) * CONTACT_MARGIN
        strength = CONTACT_FORCE * depth / self.agent_distance  # 0 / infinity on the diagonal
        return -(self.agent_offset * strength[..., None]).sum(2)

    def _update_distances(self) -> None:
        """Compute offsets and distances, which rewards, observations and the next step's contacts use."""
        pos = self.pos[:, :, None]
        self.agent_offset = self.pos[:, None] - pos  # [N, A, A, 2]
        self.landmark_offset = self.landmarks[:, None] - pos
        self.agent_distance = _length(self.agent_offset) + self.self_distance
        self.landmark_distance = _length(self.landmark_offset)

    def _observe(self) -> Array:
        """Return own velocity and position, landmarks, other agents and their messages, which are all zero here."""
        agents, num = self.num_agents, self.num
        obs = np.zeros((num, agents, self.obs_size), np.float32)
        obs[..., 0:2], obs[..., 2:4] = self.vel, self.pos
        obs[..., 4 : 4 + 2 * agents] = self.landmark_offset.reshape(num, agents, -1)
        others = self.agent_offset.reshape(num, -1, 2)[:, self.pairs]
        obs[..., 4 + 2 * agents : 2 + 4 * agents] = others.reshape(num, agents, -1)
        return obs.reshape(num, *self.spaces.agents, self.obs_size)


def _length(vectors: Array) -> Array:
    return np.sqrt(np.square(vectors[..., 0]) + np.square(vectors[..., 1]))

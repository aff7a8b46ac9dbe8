"""Small tasks of several agents with one reward for all."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.spaces import Box, Discrete

from zhixing.envs.toy.base import Array, ToyEnv
from zhixing.envs.toy.simple import Reach


class TwoStep(ToyEnv):
    """The two-step game of the QMIX paper (Rashid et al., 2018). The first agent's first action chooses the second
    state: A, where every joint action pays 7, or B, where they pay [[0, 1], [1, 8]].

    The best return is 8. A team whose values add up can't tell B's payoffs apart and settles for 7.
    """

    num_agents = 2
    reward_kind = "shared"
    payoff = np.array([[[7.0, 7.0], [7.0, 7.0]], [[0.0, 1.0], [1.0, 8.0]]])

    def __init__(self, render_mode: str | None = None) -> None:
        super().__init__(render_mode)
        self.observation_space = Box(0.0, 1.0, (3,), np.float32)  # which of the three states
        self.action_space = Discrete(2)

    def begin(self) -> Array:
        return np.array([0])

    def act(self, action: Array) -> tuple[Array, bool]:
        state = int(self.values[0])
        if state == 0:
            self.values = np.array([1 + int(action[0])])
            return np.zeros(2), False
        return np.full(2, self.payoff[state - 1, action[0], action[1]]), True

    def observe(self) -> Array:
        return np.tile(self._state(), (2, 1))

    def tell(self) -> dict[str, Any]:
        return {"state": self._state()}

    def _state(self) -> Array:
        return np.eye(3, dtype=np.float32)[int(self.values[0])]


class TeamMatch(ToyEnv):
    """Each agent is shown a cue of its own; the share of agents whose action equals theirs is paid to all.

    Ten steps: random play earns 2.5, the best 10. The state holds all cues.
    """

    episode_steps = 10
    cues = 4
    num_agents = 2
    reward_kind = "shared"

    def __init__(self, render_mode: str | None = None) -> None:
        super().__init__(render_mode)
        self.observation_space = Box(0.0, 1.0, (self.cues,), np.float32)
        self.action_space = Discrete(self.cues)

    def begin(self) -> Array:
        return self.np_random.integers(self.cues, size=self.num_agents)

    def act(self, action: Array) -> tuple[Array, bool]:
        reward = np.full(self.num_agents, np.mean(action == self.values))
        self.values = self.begin()
        return reward, False

    def observe(self) -> Array:
        return np.eye(self.cues, dtype=np.float32)[self.values]

    def tell(self) -> dict[str, Any]:
        return {"state": self.observe().reshape(-1)}


class TeamReach(ToyEnv):
    """`toy/reach` for two: each moves to a target of its own; all pay the mean distance left. No state of its own."""

    episode_steps = Reach.episode_steps
    num_agents = 2
    reward_kind = "shared"

    def __init__(self, render_mode: str | None = None) -> None:
        super().__init__(render_mode)
        self.observation_space = Box(-1.0, 1.0, (2,), np.float32)  # position, target
        self.action_space = Box(-1.0, 1.0, (1,), np.float32)

    def begin(self) -> Array:
        return self.np_random.uniform(-1.0, 1.0, (self.num_agents, 2))

    def act(self, action: Array) -> tuple[Array, bool]:
        moves = Reach.stride * np.clip(action[:, 0], -1.0, 1.0)
        self.values[:, 0] = np.clip(self.values[:, 0] + moves, -1.0, 1.0)
        distance = np.abs(self.values[:, 0] - self.values[:, 1]).mean()
        return np.full(self.num_agents, -distance), False

    def observe(self) -> Array:
        return self.values.astype(np.float32)

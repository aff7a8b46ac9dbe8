"""Multi-agent environments with a shared reward."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.spaces import Box, Discrete

from zhixing.envs.toy.base import Array, ToyEnv
from zhixing.envs.toy.simple import Reach


class TwoStep(ToyEnv):
    """The two-step game of the QMIX paper (Rashid et al., 2018).

    The first agent's first action selects the second state: A, where the reward of every joint action is 7, or B, where
    the rewards are [[0, 1], [1, 8]]. The best return is 8. A sum of individual action values can't represent B's
    rewards, so it leads to A and a return of 7.
    """

    num_agents = 2
    reward_kind = "shared"
    payoff = np.array([[[7.0, 7.0], [7.0, 7.0]], [[0.0, 1.0], [1.0, 8.0]]])

    def __init__(self, render_mode: str | None = None) -> None:
        super().__init__(render_mode)
        self.observation_space = Box(0.0, 1.0, (3,), np.float32)  # the state, one-hot
        self.action_space = Discrete(2)

    def initial_state(self) -> Array:
        return np.array([0])

    def transition(self, action: Array) -> tuple[Array, bool]:
        state = int(self.state[0])
        if state == 0:
            self.state = np.array([1 + int(action[0])])
            return np.zeros(2), False
        return np.full(2, self.payoff[state - 1, action[0], action[1]]), True

    def get_obs(self) -> Array:
        return np.tile(self._one_hot_state(), (2, 1))

    def get_info(self) -> dict[str, Any]:
        return {"state": self._one_hot_state()}

    def _one_hot_state(self) -> Array:
        return np.eye(3, dtype=np.float32)[int(self.state[0])]


class TeamMatch(ToyEnv):
    """`toy/match` for two agents: each observes a cue and should repeat it.

    The shared reward is the fraction of agents whose action equals their cue. An episode has ten steps.
    The best return is 10; random actions get 2.5. The global state contains both cues.
    """

    episode_steps = 10
    cues = 4
    num_agents = 2
    reward_kind = "shared"

    def __init__(self, render_mode: str | None = None) -> None:
        super().__init__(render_mode)
        self.observation_space = Box(0.0, 1.0, (self.cues,), np.float32)
        self.action_space = Discrete(self.cues)

    def initial_state(self) -> Array:
        return self.np_random.integers(self.cues, size=self.num_agents)

    def transition(self, action: Array) -> tuple[Array, bool]:
        reward = np.full(self.num_agents, np.mean(action == self.state))
        self.state = self.initial_state()
        return reward, False

    def get_obs(self) -> Array:
        return np.eye(self.cues, dtype=np.float32)[self.state]

    def get_info(self) -> dict[str, Any]:
        return {"state": self.get_obs().reshape(-1)}


class TeamReach(ToyEnv):
    """`toy/reach` for two agents: each moves to its target.

    The shared reward is minus the mean distance to the targets. There is no global state.
    """

    episode_steps = Reach.episode_steps
    num_agents = 2
    reward_kind = "shared"

    def __init__(self, render_mode: str | None = None) -> None:
        super().__init__(render_mode)
        self.observation_space = Box(-1.0, 1.0, (2,), np.float32)  # position, target
        self.action_space = Box(-1.0, 1.0, (1,), np.float32)

    def initial_state(self) -> Array:
        return self.np_random.uniform(-1.0, 1.0, (self.num_agents, 2))

    def transition(self, action: Array) -> tuple[Array, bool]:
        moves = Reach.stride * np.clip(action[:, 0], -1.0, 1.0)
        self.state[:, 0] = np.clip(self.state[:, 0] + moves, -1.0, 1.0)
        distance = np.abs(self.state[:, 0] - self.state[:, 1]).mean()
        return np.full(self.num_agents, -distance), False

    def get_obs(self) -> Array:
        return self.state.astype(np.float32)

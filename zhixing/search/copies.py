"""Any task of one player as something to search: its nodes are copies of the environment in the middle of an episode.

A copy has the task's generator, too, so that a search foresees what chance will bring: results on tasks with chance in
them are those of a player who knows the dice.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium.spaces import Discrete

from zhixing.core.tree import Tree, tree_leaves, tree_map
from zhixing.envs.env_spec import MASK, follow
from zhixing.envs.registry import RegisteredEnv
from zhixing.envs.vector.base import VectorEnv
from zhixing.envs.vector.serial import SerialVectorEnv
from zhixing.envs.vector.step_buffers import Array
from zhixing.errors import UserError
from zhixing.search.games import random_action

TRIED_STEPS = 10  # how far a copy is compared with another before it is trusted


@dataclass(frozen=True, eq=False)
class Node:
    env: Any  # the environment as it is there, or its `state_dict` where it has one
    obs: Tree
    mask: Array
    ended: bool


class Copies:
    """States are arrays `[N]` of nodes. `gamma` discounts rewards, in searches and in playouts, which end after `limit`
    steps if not before."""

    num_players = 1

    def __init__(self, name: str, gamma: float = 0.99, limit: int = 50, **options: Any) -> None:
        self.name, self.gamma, self.limit = name, gamma, limit
        self.vector = SerialVectorEnv(RegisteredEnv(name, options), 1)
        spaces = self.vector.spaces
        if spaces.agents or not isinstance(spaces.action, Discrete):
            raise UserError(
                f"{name} can't be searched: that takes one agent with Discrete actions, and it has "
                f"{spaces.num_agents} with {spaces.action}"
            )
        self.num_actions, self.first_action = int(spaces.action.n), int(spaces.action.start)
        self.fields = spaces.fields()["obs"]
        self.sub_env = self.vector.group.sub_envs[0]
        self._check()

    def start(self, num: int, seed: int = 0) -> Array:
        """The first states of so many episodes."""
        states = np.empty(num, object)
        for index in range(num):
            self.vector.reset(seed=seed + index)
            states[index] = self._present()
        return states

    def from_env(self, env: VectorEnv) -> Array:
        """Where the episodes of a serial or process back end are now."""
        saved = env.state_dict()
        if saved["kind"] != "sub_envs":
            raise UserError(
                f"the back end {env.backend} of {self.name} can't be searched; use backend serial or process"
            )
        states = np.empty(env.num_envs, object)
        for index, episode in enumerate(saved["envs"]):
            self.vector.load_state_dict({**saved, "num_envs": 1, "envs": [episode]})
            if self.vector.inexact:
                raise UserError(f"{self.name} can't be searched: it can't be put into the middle of an episode")
            states[index] = self._present()
        return states

    def legal(self, state: Array) -> Array:
        return np.stack([node.mask for node in state])

    def play(self, state: Array, action: Array) -> tuple[Array, Array, Array]:
        after, reward = np.empty(len(state), object), np.zeros(len(state))
        for i, (node, chosen) in enumerate(zip(state, action, strict=True)):
            env = self._open(node)
            obs, reward[i], terminated, truncated, info = env.step(int(chosen) + self.first_action)
            after[i] = self._node(env, obs, info, bool(terminated or truncated))
        return after, reward, self.over(after)

    def over(self, state: Array) -> Array:
        return np.array([node.ended for node in state], bool)

    def to_move(self, state: Array) -> Array:
        return np.zeros(len(state), np.int8)

    def observe(self, state: Array) -> Tree:
        return tree_map(lambda *rows: np.stack(rows), *(node.obs for node in state))

    def playout(self, state: Array, rng: np.random.Generator) -> Array:
        returns = np.zeros(len(state))
        for i, node in enumerate(state):
            env, mask, weight = self._open(node), node.mask, 1.0
            for _ in range(self.limit):
                action = int(random_action(mask, rng)) + self.first_action
                obs, reward, terminated, truncated, info = env.step(action)
                returns[i] += weight * float(reward)
                weight *= self.gamma
                if terminated or truncated:
                    break
                mask = self._mask(obs, info)
        return returns

    def _present(self) -> Node:
        """Where the vector's own episode is."""
        env, here = self.sub_env.env, self.vector.buffers.rows(0)
        mask = here.extras["mask"].copy() if "mask" in here.extras else np.ones(self.num_actions, bool)
        saved = env.state_dict() if self.sub_env.has_state else copy.deepcopy(env)  # type: ignore[attr-defined]
        return Node(saved, tree_map(np.copy, here.obs), mask, ended=False)

    def _open(self, node: Node) -> Any:
        """An environment at this node, to step."""
        if not self.sub_env.has_state:
            return copy.deepcopy(node.env)
        self.sub_env.env.load_state_dict(node.env)  # type: ignore[attr-defined]
        return self.sub_env.env

    def _node(self, env: Any, obs: Any, info: dict[str, Any], ended: bool) -> Node:
        parts = iter(self.sub_env.env_spec.paths)
        seen = tree_map(lambda field: np.array(follow(obs, next(parts)), field.dtype), self.fields)
        return Node(env.state_dict() if self.sub_env.has_state else env, seen, self._mask(obs, info), ended)

    def _mask(self, obs: Any, info: dict[str, Any]) -> Array:
        mask = obs[MASK] if self.sub_env.env_spec.mask_in_obs else info.get(MASK)
        return np.ones(self.num_actions, bool) if mask is None else np.array(mask, bool)

    def _check(self) -> None:
        """Two copies of one state must go the same way, whatever the first has done before the second sets out."""
        try:
            start = self.start(1)
            ways = [self._walk(start), self._walk(start)]
        except Exception as error:
            raise UserError(f"{self.name} can't be searched, since it can't be copied: {error}") from error
        if len(ways[0]) != len(ways[1]) or not all(map(np.array_equal, *ways)):
            raise UserError(f"{self.name} can't be searched: a copy of it goes another way than the original")

    def _walk(self, state: Array) -> list[Array]:
        seen, rng = [], np.random.default_rng(0)
        for _ in range(TRIED_STEPS):
            state, reward, ended = self.play(state, random_action(self.legal(state), rng))
            seen += [reward, ended, *tree_leaves(self.observe(state))]
            if ended[0]:
                break
        return seen

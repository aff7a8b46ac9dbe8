"""Search any single-agent environment: each node holds a copy of the environment in the middle of an episode.

A copy includes the environment's random generator, so a search foresees random events. In stochastic environments it
therefore performs better than any policy could without this knowledge.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium.spaces import Discrete

from zhixing.core.tree import Tree, tree_leaves, tree_map
from zhixing.envs.env_spec import MASK, get_leaf
from zhixing.envs.registry import RegisteredEnv
from zhixing.envs.vector.base import VectorEnv
from zhixing.envs.vector.serial import SerialVectorEnv
from zhixing.envs.vector.step_buffers import Array
from zhixing.errors import UserError
from zhixing.search.board_game import random_action

CHECK_STEPS = 10  # for which two copies must behave equally


@dataclass(frozen=True, eq=False)
class Node:
    env: Any  # a copy of the environment, or its `state_dict` if it has one
    obs: Tree
    mask: Array
    ended: bool


class EnvModel:
    """A `Model` of an environment. States are arrays `[N]` of nodes.

    `gamma` discounts rewards in searches and playouts. Playouts are cut after `playout_steps` steps.
    """

    num_players = 1

    def __init__(self, name: str, gamma: float = 0.99, playout_steps: int = 50, **options: Any) -> None:
        self.name, self.gamma, self.playout_steps = name, gamma, playout_steps
        self.vector = SerialVectorEnv(RegisteredEnv(name, options), 1)
        spaces = self.vector.spaces
        if spaces.agents or not isinstance(spaces.action, Discrete):
            raise UserError(
                f"{name} can't be searched: a search needs one agent with Discrete actions, but it has "
                f"{spaces.num_agents} with {spaces.action}"
            )
        self.num_actions, self.first_action = int(spaces.action.n), int(spaces.action.start)
        self.fields = spaces.fields()["obs"]
        self.sub_env = self.vector.group.sub_envs[0]
        self._check_deterministic()

    def initial_states(self, num: int, seed: int = 0) -> Array:
        """Reset `num` episodes and return their initial states."""
        states = np.empty(num, object)
        for index in range(num):
            self.vector.reset(seed=seed + index)
            states[index] = self._current_node()
        return states

    def from_env(self, env: VectorEnv) -> Array:
        """Return the current states of the envs of a serial or process back end."""
        saved = env.state_dict()
        if saved["kind"] != "sub_envs":
            raise UserError(f"{self.name} can't be searched with the back end {env.backend}; use serial or process")
        states = np.empty(env.num_envs, object)
        for index, episode in enumerate(saved["envs"]):
            self.vector.load_state_dict({**saved, "num_envs": 1, "envs": [episode]})
            if self.vector.inexact:
                raise UserError(
                    f"{self.name} can't be searched: its state can't be restored in the middle of an episode"
                )
            states[index] = self._current_node()
        return states

    def legal_actions(self, state: Array) -> Array:
        return np.stack([node.mask for node in state])

    def play(self, state: Array, action: Array) -> tuple[Array, Array, Array]:
        after, reward = np.empty(len(state), object), np.zeros(len(state))
        for i, (node, index) in enumerate(zip(state, action, strict=True)):
            env = self._restore_env(node)
            obs, reward[i], terminated, truncated, info = env.step(int(index) + self.first_action)
            after[i] = self._make_node(env, obs, info, bool(terminated or truncated))
        return after, reward, self.is_over(after)

    def is_over(self, state: Array) -> Array:
        return np.array([node.ended for node in state], bool)

    def current_player(self, state: Array) -> Array:
        return np.zeros(len(state), np.int8)

    def observe(self, state: Array) -> Tree:
        return tree_map(lambda *rows: np.stack(rows), *(node.obs for node in state))

    def playout(self, state: Array, rng: np.random.Generator) -> Array:
        returns = np.zeros(len(state))
        for i, node in enumerate(state):
            env, mask, discount = self._restore_env(node), node.mask, 1.0
            for _ in range(self.playout_steps):
                action = int(random_action(mask, rng)) + self.first_action
                obs, reward, terminated, truncated, info = env.step(action)
                returns[i] += discount * float(reward)
                discount *= self.gamma
                if terminated or truncated:
                    break
                mask = self._mask(obs, info)
        return returns

    def _current_node(self) -> Node:
        """Return the current state of `self.vector`."""
        env, rows = self.sub_env.env, self.vector.buffers.rows(0)
        mask = rows.extras["mask"].copy() if "mask" in rows.extras else np.ones(self.num_actions, bool)
        saved = env.state_dict() if self.sub_env.has_state else copy.deepcopy(env)  # type: ignore[attr-defined]
        return Node(saved, tree_map(np.copy, rows.obs), mask, ended=False)

    def _restore_env(self, node: Node) -> Any:
        """Return an environment in the node's state. Stepping it doesn't change the node."""
        if not self.sub_env.has_state:
            return copy.deepcopy(node.env)
        self.sub_env.env.load_state_dict(node.env)  # type: ignore[attr-defined]
        return self.sub_env.env

    def _make_node(self, env: Any, obs: Any, info: dict[str, Any], ended: bool) -> Node:
        paths = iter(self.sub_env.env_spec.paths)
        copied = tree_map(lambda field: np.array(get_leaf(obs, next(paths)), field.dtype), self.fields)
        return Node(env.state_dict() if self.sub_env.has_state else env, copied, self._mask(obs, info), ended)

    def _mask(self, obs: Any, info: dict[str, Any]) -> Array:
        mask = obs[MASK] if self.sub_env.env_spec.mask_in_obs else info.get(MASK)
        return np.ones(self.num_actions, bool) if mask is None else np.array(mask, bool)

    def _check_deterministic(self) -> None:
        """Raise `UserError` unless the same actions in two copies of a state give equal results."""
        try:
            start = self.initial_states(1)
            walks = [self._random_walk(start), self._random_walk(start)]
        except Exception as error:
            raise UserError(f"{self.name} can't be searched because it can't be copied: {error}") from error
        if len(walks[0]) != len(walks[1]) or not all(map(np.array_equal, *walks)):
            raise UserError(f"{self.name} can't be searched: a copy of it behaves differently from the original")

    def _random_walk(self, state: Array) -> list[Array]:
        trace, rng = [], np.random.default_rng(0)
        for _ in range(CHECK_STEPS):
            state, reward, ended = self.play(state, random_action(self.legal_actions(state), rng))
            trace += [reward, ended, *tree_leaves(self.observe(state))]
            if ended[0]:
                break
        return trace

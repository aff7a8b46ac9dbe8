"""Represent agents with different kinds of spaces, such as an image and a vector, by vectors of equal length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete

from zhixing.core.flat_space import FlatSpace
from zhixing.envs.env_spec import MASK
from zhixing.envs.vector.step_buffers import Array
from zhixing.envs.wrappers.agents import AgentPadding, mask_of
from zhixing.errors import UserError


class FlatAgents:
    """Flattens observations and actions, and pads them with zeros. Masks have the size of the largest Discrete space.

    It has the interface of `AgentPadding`. `agent_spaces` are the spaces of each agent, without masks.
    """

    valid_actions: Array | None = None

    def __init__(self, observations: Sequence[gym.Space[Any]], actions: Sequence[gym.Space[Any]]) -> None:
        self.agent_spaces = tuple(zip(map(_without_mask, observations), actions, strict=True))
        self.observations = [FlatSpace(obs) for obs, _ in self.agent_spaces]
        self.actions = [FlatSpace(action) for _, action in self.agent_spaces]
        sizes = [max(flat.size for flat in kind) for kind in (self.observations, self.actions)]
        self.observation_space, self.action_space = (Box(-np.inf, np.inf, (size,), np.float32) for size in sizes)
        self.mask_size = max((int(space.n) for space in actions if isinstance(space, Discrete)), default=0)

    def stack_obs(self, obs_by_agent: Mapping[int, Any]) -> Array:
        """Return flat observations [A, size], with zeros for agents that have none."""
        stacked = np.zeros((len(self.agent_spaces), *self.observation_space.shape), np.float32)
        for agent, obs in obs_by_agent.items():
            value = _without_mask_value(obs) if isinstance(obs, Mapping) else obs
            vector = self.observations[agent].flatten(value)
            stacked[agent, : len(vector)] = vector
        return stacked

    def stack_masks(
        self, obs_by_agent: Mapping[int, Any], info_by_agent: Mapping[int, Any], acting: Sequence[int]
    ) -> Array:
        """Return action masks [A, n]. Agents that aren't `acting` have only action 0."""
        stacked = np.zeros((len(self.agent_spaces), self.mask_size), bool)
        for agent in acting:
            space = self.agent_spaces[agent][1]
            mask = mask_of(obs_by_agent.get(agent), info_by_agent.get(agent, {}))
            if isinstance(space, Discrete):
                stacked[agent, : int(space.n)] = True if mask is None else mask
        stacked[:, 0] |= ~stacked.any(1)
        return stacked

    def to_agent_action(self, agent: int, action: Any) -> Any:
        """Convert a flat action to the agent's action space."""
        space, flat = self.agent_spaces[agent][1], self.actions[agent]
        if isinstance(space, Box):
            return np.clip(flat.unflatten(action), space.low, space.high)
        exact = flat.unflatten(np.rint(action))
        return int(exact) if isinstance(space, Discrete) else exact


def pad_agents(
    name: str, observations: Sequence[gym.Space[Any]], actions: Sequence[gym.Space[Any]]
) -> AgentPadding | FlatAgents:
    """Return equal spaces for all agents: padded ones if their kinds are equal, and otherwise flat ones."""
    try:
        return AgentPadding(name, observations, actions)
    except UserError:
        if not all(_is_flat(_without_mask(space)) for space in (*observations, *actions)):
            raise
        return FlatAgents(observations, actions)


def _is_flat(space: gym.Space[Any]) -> bool:
    if isinstance(space, Dict):
        return all(map(_is_flat, space.spaces.values()))
    return isinstance(space, (Box, Discrete, MultiDiscrete, MultiBinary))


def _without_mask(space: gym.Space[Any]) -> gym.Space[Any]:
    if not isinstance(space, Dict) or MASK not in space.spaces:
        return space
    others = {key: part for key, part in space.spaces.items() if key != MASK}
    return others["observation"] if set(others) == {"observation"} else Dict(others)


def _without_mask_value(obs: Mapping[str, Any]) -> Any:
    others = {key: part for key, part in obs.items() if key != MASK}
    return others["observation"] if MASK in obs and set(others) == {"observation"} else others

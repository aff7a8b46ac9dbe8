"""Pad agents with different spaces to equal spaces, and remove the agent dimension of a single agent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete

from zhixing.core.tree import tree_map
from zhixing.envs.env_spec import MASK
from zhixing.envs.vector.step_buffers import Array
from zhixing.errors import UserError


class SingleAgent(gym.Wrapper[Any, Any, Any, Any]):
    """Removes the agent dimension of a multi-agent environment that has only one agent."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        obs, info = self.env.reset(seed=seed, options=options)
        return obs[0], self._squeeze_info(info)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        obs, reward, terminated, truncated, info = self.env.step(tree_map(lambda leaf: np.asarray(leaf)[None], action))
        return obs[0], float(np.asarray(reward)[0]), terminated, truncated, self._squeeze_info(info)

    def _squeeze_info(self, info: dict[str, Any]) -> dict[str, Any]:
        squeezed = {key: value for key, value in info.items() if key not in ("state", "alive")}
        return {**squeezed, MASK: info[MASK][0]} if MASK in info else squeezed


def squeeze_single_agent(env: gym.Env[Any, Any]) -> gym.Env[Any, Any]:
    return SingleAgent(env) if env.get_wrapper_attr("num_agents") == 1 else env


class AgentPadding:
    """Pads the observations and actions of agents with different spaces to equal spaces.

    Shorter observations are padded with zeros, discrete observations are one-hot encoded. Excess elements of continuous
    actions are ignored. Excess discrete actions are forbidden by the mask `valid_actions` [A, n], which is None if the
    agents' action spaces are equal or continuous.
    """

    def __init__(self, name: str, observations: Sequence[gym.Space[Any]], actions: Sequence[gym.Space[Any]]) -> None:
        spaces = [
            space["observation"] if isinstance(space, Dict) and "observation" in space.spaces else space
            for space in observations
        ]
        self.one_hot = [isinstance(space, Discrete) for space in spaces]
        self.observation_space = _padded_observation_space(name, spaces)
        self.action_spaces: list[Any] = list(actions)
        self.equal = all(space == actions[0] for space in actions)
        self.valid_actions: Array | None = None
        self.action_space: gym.Space[Any] = actions[0]
        if self.equal:
            return
        if all(isinstance(space, Discrete) for space in actions):
            sizes = np.array([int(space.n) for space in self.action_spaces])
            self.action_space = Discrete(int(sizes.max()))
            self.valid_actions = np.arange(sizes.max()) < sizes[:, None]
        elif all(isinstance(space, Box) and len(space.shape) == 1 for space in actions):
            self.action_space = _padded_action_space(self.action_spaces)
        else:
            raise UserError(
                f"{name} has agents whose action spaces can't be padded to equal ones: {_format_spaces(actions)}"
            )

    def stack_obs(self, obs_by_agent: Mapping[int, Any]) -> Array:
        """Return padded observations [A, *shape], with zeros for agents that have none."""
        space = self.observation_space
        stacked = np.zeros((len(self.action_spaces), *space.shape), space.dtype)
        for agent, obs in obs_by_agent.items():
            value = obs["observation"] if isinstance(obs, Mapping) else obs
            if self.one_hot[agent]:
                stacked[agent, int(value)] = 1
            elif np.shape(value) == space.shape:
                stacked[agent] = value
            else:
                stacked[agent, : len(value)] = value
        return stacked

    def stack_masks(
        self, obs_by_agent: Mapping[int, Any], info_by_agent: Mapping[int, Any], acting: Sequence[int]
    ) -> Array:
        """Return action masks [A, n]: those of the environment, or all of an agent's actions if it has none.

        Agents that aren't `acting` have only action 0.
        """
        assert isinstance(self.action_space, Discrete)
        stacked = np.zeros((len(self.action_spaces), int(self.action_space.n)), bool)
        for agent in acting:
            mask = mask_of(obs_by_agent.get(agent), info_by_agent.get(agent, {}))
            if mask is not None:
                stacked[agent, : len(mask)] = mask
            else:
                stacked[agent] = True if self.valid_actions is None else self.valid_actions[agent]
        stacked[:, 0] |= ~stacked.any(1)  # a policy needs at least one action
        return stacked

    def to_agent_action(self, agent: int, action: Any) -> Any:
        """Convert a padded action to the agent's action space."""
        space = self.action_spaces[agent]
        if isinstance(space, Discrete):
            return int(action) + (0 if self.equal else int(space.start))
        if isinstance(space, Box):
            return np.clip(action if self.equal else action[: space.shape[0]], space.low, space.high)
        return action


def mask_of(obs: Any, info: Mapping[str, Any]) -> Any:
    """Return an agent's action mask, which PettingZoo environments put into the observation or into `info`, or None."""
    return obs[MASK] if isinstance(obs, Mapping) and MASK in obs else info.get(MASK)


def _padded_observation_space(name: str, spaces: Sequence[gym.Space[Any]]) -> Box:
    if not all(isinstance(space, (Box, Discrete)) for space in spaces):
        raise UserError(
            f"{name} has agents whose observation spaces are neither Box nor Discrete: {_format_spaces(spaces)}"
        )
    boxes: list[Any] = [Box(0.0, 1.0, (int(s.n),)) if isinstance(s, Discrete) else s for s in spaces]
    shape = max(box.shape for box in boxes)
    if any(box.shape != shape for box in boxes) and any(len(box.shape) != 1 for box in boxes):
        raise UserError(
            f"{name} has agents whose observations can't be padded to equal spaces: {_format_spaces(spaces)}"
        )
    if all(box.dtype == np.uint8 for box in boxes):  # images stay uint8
        return Box(0, 255, shape, np.uint8)
    low, high = min(float(box.low.min()) for box in boxes), max(float(box.high.max()) for box in boxes)
    return Box(min(low, 0.0), max(high, 0.0), shape, np.float32)  # includes 0, the padding


def _padded_action_space(boxes: Sequence[Any]) -> Box:
    length = max(box.shape[0] for box in boxes)
    low, high = np.full(length, np.inf, np.float32), np.full(length, -np.inf, np.float32)
    for box in boxes:
        part = slice(0, box.shape[0])
        low[part], high[part] = np.minimum(low[part], box.low), np.maximum(high[part], box.high)
    return Box(low, high, dtype=np.float32)


def _format_spaces(spaces: Sequence[gym.Space[Any]]) -> str:
    return ", ".join(dict.fromkeys(str(space) for space in spaces))

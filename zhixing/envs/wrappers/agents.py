"""What the families of tasks with many agents share: spaces made equal, one agent as an ordinary task, their errors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete

from zhixing.envs.env_spec import MASK
from zhixing.envs.options import check_options
from zhixing.envs.vector.step_buffers import Array
from zhixing.errors import UserError


def construct_env(
    name: str, constructor: Callable[..., Any], options: Mapping[str, Any], named: Callable[..., Any]
) -> Any:
    """What the constructor gives; `named` is the callable whose signature names the options."""
    check_options(name, named, options)
    try:
        return constructor(**options)
    except UserError:
        raise
    except Exception as error:
        given = ", ".join(f"{key}={value!r}" for key, value in options.items())
        raise UserError(f"{name} can't be made with ({given}): {type(error).__name__}: {error}") from error


class SingleAgent(gym.Wrapper[Any, Any, Any, Any]):
    """A task of many agents that has only one: without the dimension of agents."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        obs, info = self.env.reset(seed=seed, options=options)
        return obs[0], self._own(info)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        obs, reward, terminated, truncated, info = self.env.step(np.asarray(action)[None])
        return obs[0], float(np.asarray(reward)[0]), terminated, truncated, self._own(info)

    def _own(self, info: dict[str, Any]) -> dict[str, Any]:
        own = {key: value for key, value in info.items() if key not in ("state", "alive")}
        return {**own, MASK: info[MASK][0]} if MASK in info else own


def squeeze_single_agent(env: gym.Env[Any, Any]) -> gym.Env[Any, Any]:
    return SingleAgent(env) if env.get_wrapper_attr("num_agents") == 1 else env


class AgentPadding:
    """Agents with spaces of their own behind one pair of spaces that is equal for all.

    Shorter observations are followed by zeros. The surplus of a continuous action is ignored, surplus discrete ones are
    forbidden by `allowed` [A, n], which is None where the agents' actions are equal or not discrete.
    """

    def __init__(self, name: str, observations: Sequence[gym.Space[Any]], actions: Sequence[gym.Space[Any]]) -> None:
        spaces = [space["observation"] if isinstance(space, Dict) else space for space in observations]
        self.choices = [int(space.n) if isinstance(space, Discrete) else None for space in spaces]
        self.observation_space = _joint_observation(name, spaces)
        self.actions: list[Any] = list(actions)
        self.equal = all(space == actions[0] for space in actions)
        self.allowed: Array | None = None
        self.action_space: gym.Space[Any] = actions[0]
        if self.equal:
            return
        if all(isinstance(space, Discrete) for space in actions):
            sizes = np.array([int(space.n) for space in self.actions])
            self.action_space = Discrete(int(sizes.max()))
            self.allowed = np.arange(sizes.max()) < sizes[:, None]
        elif all(isinstance(space, Box) and len(space.shape) == 1 for space in actions):
            self.action_space = _joint_box(self.actions)
        else:
            raise UserError(f"{name} has agents with action spaces that can't be made equal: {_listed(actions)}")

    def observe(self, shown: Mapping[int, Any]) -> Array:
        """Observations [A, *shape] of the seats that see something; zeros for the others."""
        space = self.observation_space
        joint = np.zeros((len(self.actions), *space.shape), space.dtype)
        for seat, obs in shown.items():
            value = obs["observation"] if isinstance(obs, Mapping) else obs
            choices = self.choices[seat]
            if choices is not None:
                joint[seat, int(value)] = 1
            elif np.shape(value) == space.shape:
                joint[seat] = value
            else:
                joint[seat, : len(value)] = value
        return joint

    def masks(self, shown: Mapping[int, Any], told: Mapping[int, Any], acting: Sequence[int]) -> Array:
        """Allowed actions [A, n]: as the task tells them, or all that a seat has; only action 0 for who doesn't act."""
        assert isinstance(self.action_space, Discrete)
        joint = np.zeros((len(self.actions), int(self.action_space.n)), bool)
        for seat in acting:
            mask = mask_of(shown.get(seat), told.get(seat, {}))
            if mask is not None:
                joint[seat, : len(mask)] = mask
            else:
                joint[seat] = True if self.allowed is None else self.allowed[seat]
        joint[:, 0] |= ~joint.any(1)  # a seat without any action would have no distribution over them
        return joint

    def to_agent_action(self, seat: int, action: Any) -> Any:
        """The action in the seat's own space."""
        space = self.actions[seat]
        if isinstance(space, Discrete):
            return int(action) + (0 if self.equal else int(space.start))
        if isinstance(space, Box):
            return np.clip(action if self.equal else action[: space.shape[0]], space.low, space.high)
        return action


def mask_of(obs: Any, info: Mapping[str, Any]) -> Any:
    """PettingZoo's two places for a mask."""
    return obs[MASK] if isinstance(obs, Mapping) and MASK in obs else info.get(MASK)


def _joint_observation(name: str, spaces: Sequence[gym.Space[Any]]) -> Box:
    if not all(isinstance(space, (Box, Discrete)) for space in spaces):
        raise UserError(f"{name} has agents with observation spaces other than Box and Discrete: {_listed(spaces)}")
    boxes: list[Any] = [Box(0.0, 1.0, (int(s.n),)) if isinstance(s, Discrete) else s for s in spaces]
    shape = max(box.shape for box in boxes)
    if any(box.shape != shape for box in boxes) and any(len(box.shape) != 1 for box in boxes):
        raise UserError(f"{name} has agents with observations that can't be made equal: {_listed(spaces)}")
    if all(box.dtype == np.uint8 for box in boxes):  # pictures stay bytes
        return Box(0, 255, shape, np.uint8)
    low, high = min(float(box.low.min()) for box in boxes), max(float(box.high.max()) for box in boxes)
    return Box(min(low, 0.0), max(high, 0.0), shape, np.float32)  # who is gone shows zeros


def _joint_box(boxes: Sequence[Any]) -> Box:
    length = max(box.shape[0] for box in boxes)
    low, high = np.full(length, np.inf, np.float32), np.full(length, -np.inf, np.float32)
    for box in boxes:
        own = slice(0, box.shape[0])
        low[own], high[own] = np.minimum(low[own], box.low), np.maximum(high[own], box.high)
    return Box(low, high, dtype=np.float32)


def _listed(spaces: Sequence[gym.Space[Any]]) -> str:
    return ", ".join(dict.fromkeys(str(space) for space in spaces))

"""What a task shows, takes and pays: spaces of observations, actions, rewards and ends, per agent."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, get_args

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete

from zhixing.core.tree import Field, Tree, tree_map
from zhixing.errors import UserError


def space_fields(space: gym.Space[Any]) -> Tree:
    """The arrays that one element of `space` is stored as: a `Field`, or a dict of them.

    Floats are kept in single precision, whatever the task computes in; integers and bytes as they are.
    """
    if isinstance(space, Dict):
        return {key: space_fields(part) for key, part in space.spaces.items()}
    if isinstance(space, Discrete):
        return Field((), np.dtype(np.int64))
    if isinstance(space, (Box, MultiBinary, MultiDiscrete)):
        floats = np.issubdtype(space.dtype, np.floating)
        return Field(tuple(space.shape), np.dtype(np.float32) if floats else np.dtype(space.dtype))
    raise UserError(
        f"observation or action space {space} can't be stored as arrays; allowed are Box, Discrete, MultiDiscrete, "
        f"MultiBinary and Dict of these (wrap the task to turn others into one of them)"
    )


RewardKind = Literal["shared", "individual", "opposed"]


@dataclass(frozen=True)
class Spaces:
    """The spaces of one environment of a vector, as one agent sees it; agents have equal ones.

    What a task may show beside observations: `mask` is the number of discrete actions when it tells which of them are
    allowed at each step; `state` the size of a global state; `alive` is true when agents may leave before the end.

    `reward_kind` says whom rewards belong to: "shared" is one reward of the team, which also counts for agents that
    have left; "individual" is a reward per agent, which ends when the agent leaves; "opposed" is the same where one
    agent's gain is another's loss.
    """

    obs: gym.Space[Any]
    action: gym.Space[Any]
    num_agents: int = 1
    mask: int | None = None
    state: int | None = None
    alive: bool = False
    reward_kind: RewardKind = "individual"

    def __post_init__(self) -> None:
        if self.reward_kind not in get_args(RewardKind):
            raise UserError(
                f"reward_kind is {self.reward_kind!r}; allowed are {', '.join(get_args(RewardKind))} (set it as an "
                f"attribute of the environment)"
            )

    @property
    def individual_termination(self) -> bool:
        """Whether an agent's rewards end when it leaves, not when the episode ends."""
        return self.alive and self.reward_kind != "shared"

    @property
    def agents(self) -> tuple[int, ...]:
        """The dimension of agents: none for a single one."""
        return () if self.num_agents == 1 else (self.num_agents,)

    @property
    def reward(self) -> Box:
        return Box(-np.inf, np.inf, self.agents, np.float32)

    @property
    def end(self) -> Discrete:
        """Terminated and truncated are one flag each per environment, shared by its agents."""
        return Discrete(2)

    @property
    def discrete(self) -> bool:
        return isinstance(self.action, (Discrete, MultiDiscrete))

    @property
    def num_actions(self) -> int:
        """How many actions a discrete task has, or how many numbers a continuous one takes."""
        if isinstance(self.action, Discrete):
            return int(self.action.n)
        return int(np.prod(self.action.shape or (1,)))

    def fields(self) -> dict[str, Tree]:
        """The base fields of a step, without `next_obs`, which is the next row's `obs`."""

        def per_agent(field: Field) -> Field:
            return Field(self.agents + field.shape, field.dtype)

        flag = Field((), np.dtype(bool))
        fields = {
            "obs": tree_map(per_agent, space_fields(self.obs)),
            "action": tree_map(per_agent, space_fields(self.action)),
            "reward": Field(self.agents, np.dtype(np.float32)),
            "terminated": flag,
            "truncated": flag,
        }
        return fields | self.extras()

    def extras(self) -> dict[str, Field]:
        """What is shown beside observations."""
        fields = {}
        if self.mask is not None:
            fields["mask"] = Field((*self.agents, self.mask), np.dtype(bool))
        if self.state is not None:
            fields["state"] = Field((self.state,), np.dtype(np.float32))
        if self.alive:
            fields["alive"] = Field(self.agents, np.dtype(bool))
        return fields

    def to_env(self, action: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """From a policy's scale to the task's: bounded continuous actions live in [-1, 1] in policies and storage."""
        box = self.action
        if isinstance(box, Discrete):
            return action + box.start if box.start else action
        if isinstance(box, MultiDiscrete):
            return action + box.start
        if self._scale is None:
            return action
        low, half = self._scale
        return low + (action.clip(-1.0, 1.0) + 1.0) * half

    def from_env(self, action: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """The inverse of `to_env`, for experience recorded elsewhere."""
        box = self.action
        if isinstance(box, (Discrete, MultiDiscrete)):
            return action - box.start
        if self._scale is None:
            return action
        low, half = self._scale
        return (action - low) / half - 1.0

    @cached_property
    def _scale(self) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]] | None:
        """The lowest actions and half of their range; None where they have no bounds."""
        box = self.action
        return (box.low, 0.5 * (box.high - box.low)) if isinstance(box, Box) and box.is_bounded() else None

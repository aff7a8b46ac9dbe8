"""Observation and action spaces of an environment, per agent, and the fields that its steps are stored in."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, get_args

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, Graph, MultiBinary, MultiDiscrete, OneOf, Sequence, Text

from zhixing.core.action_layout import ActionLayout, is_composite
from zhixing.core.tree import Field, Tree, tree_map
from zhixing.errors import UserError

# how a wrapper can convert spaces whose elements have no fixed size
CONVERSIONS = {
    Graph: "pad nodes and edges to fixed numbers, in a Dict of the Boxes nodes, edges and edge_links and a MultiBinary "
    "that marks the nodes that exist",
    Sequence: "pad it to a fixed length, in a Dict of a Box of the elements and a Discrete with their number",
    Text: "encode it as numbers, such as a MultiDiscrete with one symbol per position or a Box with an embedding",
    OneOf: "return a Dict with one part per alternative and a Discrete that selects the valid one",
}


def space_fields(space: gym.Space[Any]) -> Tree:
    """Return the fields that store an element of `space`: one `Field`, or a dict of fields.

    Floats are stored in single precision, integers and bytes in their own type.
    """
    if isinstance(space, Dict):
        return {key: space_fields(part) for key, part in space.spaces.items()}
    if isinstance(space, Discrete):
        return Field((), np.dtype(np.int64))
    if isinstance(space, (Box, MultiBinary, MultiDiscrete)):
        floats = np.issubdtype(space.dtype, np.floating)
        return Field(tuple(space.shape), np.dtype(np.float32) if floats else np.dtype(space.dtype))
    conversion = next((text for kind, text in CONVERSIONS.items() if isinstance(space, kind)), "convert it to these")
    raise UserError(
        f"observation or action space {space} can't be stored as arrays; allowed are Box, Discrete, MultiDiscrete, "
        f"MultiBinary and Dict of these; wrap the environment, for example in gymnasium.wrappers.TransformObservation, "
        f"to {conversion}"
    )


RewardKind = Literal["shared", "individual", "opposed"]


@dataclass(frozen=True)
class Spaces:
    """Spaces of one environment, for a single agent. All agents have equal spaces, if necessary by padding.

    `stack` is the number of frames in an observation, if these are stacks; see `zhixing.core.stack`. `info` has the
    fields of the values of `info` that steps store; see `zhixing.envs.info_fields`.

    Three values describe optional data in addition to observations. `mask` is the size of the action mask, for
    environments that report which discrete actions are valid. `state` is the size of a global state. `alive` is true
    if agents may leave before the episode ends.

    `reward_kind` is "shared" for one team reward, which also counts for agents that have left, "individual" for a
    reward per agent, which ends when the agent leaves, or "opposed" if in addition one agent's gain is another's loss.

    `agent_names` are the names of the agents in the environment, by default `agent_0`, `agent_1` and so on. If their
    spaces are of different kinds, `agent_spaces` are the observation and action space of each, and `obs` and `action`
    are vectors that hold any of them, see `zhixing.core.flat_space`.
    """

    obs: gym.Space[Any]
    action: gym.Space[Any]
    num_agents: int = 1
    mask: int | None = None
    state: int | None = None
    alive: bool = False
    reward_kind: RewardKind = "individual"
    agent_names: tuple[str, ...] = field(default=(), compare=False)
    stack: int = 1
    agent_spaces: tuple[tuple[gym.Space[Any], gym.Space[Any]], ...] = ()
    info: dict[str, Field] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = self.agent_names or tuple(f"agent_{i}" for i in range(self.num_agents))
        if len(names) != self.num_agents or len(set(names)) != self.num_agents:
            raise UserError(
                f"agent_names are {', '.join(names)}; the environment has {self.num_agents} agents, and each needs its "
                f"own name (set agent_names as an attribute of the environment)"
            )
        object.__setattr__(self, "agent_names", names)
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
        """The shape of the agent dimension: `(num_agents,)`, or empty for a single agent."""
        return () if self.num_agents == 1 else (self.num_agents,)

    @property
    def discrete(self) -> bool:
        """Whether actions have no continuous part."""
        return not self.layout.num_continuous

    @cached_property
    def composite(self) -> bool:
        """Whether policies and storage hold an action as a vector that isn't an element of the space."""
        return is_composite(self.action)

    @cached_property
    def layout(self) -> ActionLayout:
        """The columns of an action. Raises `UserError` if no policy supports the action space."""
        return ActionLayout(self.action)

    @property
    def num_actions(self) -> int:
        """Number of Discrete actions, or of dimensions of other actions."""
        return int(self.action.n) if isinstance(self.action, Discrete) else self.layout.num_columns

    @property
    def action_field(self) -> Field:
        """The field that stores an action of one agent."""
        if self.composite:
            return Field((self.layout.num_columns,), np.dtype(np.float32))
        field: Field = space_fields(self.action)
        return field

    @property
    def env_action_field(self) -> Field:
        """The field that holds the actions of all agents on their way to one environment, without loss."""
        field = self.action_field
        return Field(self.agents + field.shape, np.dtype(np.float64 if self.composite else self.action.dtype))

    def fields(self) -> dict[str, Tree]:
        """Return the fields of a step, without `next_obs`, which is the next row's `obs`."""

        def per_agent(field: Field) -> Field:
            return Field(self.agents + field.shape, field.dtype)

        flag = Field((), np.dtype(bool))  # one per environment, shared by its agents
        fields = {
            "obs": tree_map(per_agent, space_fields(self.obs)),
            "action": per_agent(self.action_field),
            "reward": Field(self.agents, np.dtype(np.float32)),
            "terminated": flag,
            "truncated": flag,
        }
        if self.info:
            fields["info"] = dict(self.info)
        return fields | self.extras()

    def extras(self) -> dict[str, Field]:
        """Return the fields of the optional data: `mask`, `state` and `alive`."""
        fields = {}
        if self.mask is not None:
            fields["mask"] = Field((*self.agents, self.mask), np.dtype(bool))
        if self.state is not None:
            fields["state"] = Field((self.state,), np.dtype(np.float32))
        if self.alive:
            fields["alive"] = Field(self.agents, np.dtype(bool))
        return fields

    def to_env(self, action: np.ndarray[Any, Any]) -> Any:
        """Convert actions to the environment's range. Policies and storage keep bounded continuous ones in [-1, 1].

        Composite actions become elements of the space, with the leading dimensions of `action` in each part.
        """
        if self.composite:
            return self.layout.to_env(action)
        space = self.action
        if isinstance(space, Discrete):
            return action + space.start if space.start else action
        if isinstance(space, MultiDiscrete):
            return action + space.start
        if self._scale is None:
            return action
        low, half_range = self._scale
        return low + (action.clip(-1.0, 1.0) + 1.0) * half_range

    def from_env(self, action: Any) -> np.ndarray[Any, Any]:
        """Convert actions of the environment, such as recorded ones, to the policy's range. The inverse of `to_env`."""
        if self.composite:
            return self.layout.from_env(action)
        space = self.action
        if isinstance(space, (Discrete, MultiDiscrete)):
            return action - space.start
        if self._scale is None:
            return action
        low, half_range = self._scale
        return (action - low) / half_range - 1.0

    def flatten_action(self, action: Any) -> np.ndarray[Any, Any]:
        """Return actions of the environment as arrays like `env_action_field`."""
        return self.layout.flatten(action) if self.composite else action

    def unflatten_action(self, action: np.ndarray[Any, Any]) -> Any:
        """Return the actions of the environment that `flatten_action` converted."""
        return self.layout.unflatten(action) if self.composite else action

    @cached_property
    def _scale(self) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]] | None:
        """The lowest action and half the range per dimension, or None for unbounded actions."""
        space = self.action
        return (space.low, 0.5 * (space.high - space.low)) if isinstance(space, Box) and space.is_bounded() else None

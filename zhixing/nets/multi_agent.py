"""Networks of agents that act side by side: shared by all of them, or one each.

What an agent's network is shown is its observation, with its number where the weights are shared, and its last action
where it is asked to know that: one dict, so that any body, also a user's own, takes it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.spaces import Box, Dict, Discrete
from torch import Tensor, nn
from torch.nn import functional as F

from zhixing.config import NetConfig
from zhixing.core.batch import Batch
from zhixing.core.spaces import Spaces, space_fields
from zhixing.core.tree import Field, Tree, tree_leaves, tree_map
from zhixing.errors import UserError
from zhixing.nets.torso import (
    NetFactory,
    example_obs,
    get_encoder,
    hidden_fields,
    is_recurrent,
    make_torso,
    num_features,
    unroll,
)

AgentHeadFactory = Callable[[int], nn.Module]  # features to what is said of them


class AgentNet(nn.Module):
    """Body and head of one agent, or of all that share them: `[B,...]` to `[B,n]`."""

    def __init__(
        self,
        space: gym.Space[Any],
        cfg: NetConfig,
        make_net: NetFactory | None,
        head: AgentHeadFactory,
        **settings: bool,
    ) -> None:
        super().__init__()
        self.torso = make_torso(space, cfg, make_net, **settings)
        self.head = head(num_features(self.torso, space))


class MultiAgentNet(nn.Module):
    """`net(inputs [N,A,...], hidden [N,A,...]) -> (what the heads say [N,A,...], hidden)`."""

    def __init__(
        self,
        spaces: Spaces,
        cfg: NetConfig,
        make_net: NetFactory | None,
        head: AgentHeadFactory,
        *,
        shared: bool = True,
        last_action: bool = False,
        normalize: bool = False,
        orthogonal_init: bool = False,
    ) -> None:
        super().__init__()
        self.spaces, self.shared, self.last_action = spaces, shared, last_action
        self.num_agents = spaces.num_agents
        parts: dict[str, gym.Space[Any]] = {"obs": spaces.obs}
        if shared:
            parts["agent"] = Box(0.0, 1.0, (self.num_agents,), np.float32)
        if last_action:
            parts["last_action"] = Box(-np.inf, np.inf, (spaces.num_actions,), np.float32)
        self.space = Dict(parts)
        copies = 1 if shared else self.num_agents
        settings = {"normalize": normalize, "orthogonal_init": orthogonal_init}
        self.agent_nets = nn.ModuleList([AgentNet(self.space, cfg, make_net, head, **settings) for _ in range(copies)])
        torso: Any = self.agent_nets[0].torso
        self.recurrent = is_recurrent(torso)
        # every update needs the shapes, so compute them once
        self._rnn_fields = hidden_fields(torso(example_obs(self.space), None)[1]) if self.recurrent else None
        self.agent_ids: Tensor
        self.register_buffer("agent_ids", torch.eye(self.num_agents), persistent=False)

    def build_inputs(self, obs: Tree, last_action: Tensor | None) -> dict[str, Tree]:
        """What the agent_nets are shown, `[...,A,n]` each."""
        lead = _lead(obs, self.spaces)
        shown: dict[str, Tree] = {"obs": obs}
        if self.shared:
            shown["agent"] = self.agent_ids.expand(*lead, self.num_agents)
        if self.last_action:
            shown["last_action"] = last_action
        return shown

    def encode_action(self, action: Tensor) -> Tensor:
        """One-hot for choices, continuous ones as they are: `[...,A,n]`."""
        if isinstance(self.spaces.action, Discrete):
            return F.one_hot(action, self.spaces.num_actions).float()
        return action.float()

    def forward(self, inputs: Tree, hidden: Tree = None) -> tuple[Tensor, Tree]:
        """One step of every agent."""
        said = [self._member(i, self._of(i, inputs), self._of(i, hidden)) for i in range(len(self.agent_nets))]
        return self._join([out for out, _ in said], 1), self._join([memory for _, memory in said], 1)

    def _member(self, i: int, inputs: Tree, hidden: Tree) -> tuple[Tensor, Tree]:
        member: Any = self.agent_nets[i]
        if not self.recurrent:
            return member.head(member.torso(inputs)), None
        features, hidden = member.torso(inputs, hidden)
        return member.head(features), hidden

    def unroll(self, inputs: Tree, hidden: Tree, is_first: Tensor) -> Tensor:
        """What the heads say of `inputs [T,N,A,...]`, memory from `hidden [N,A,...]`: `[T,N,A,...]`."""
        T, N = is_first.shape
        said = []
        for i, member in enumerate(self.agent_nets):
            mine = tree_map(lambda leaf: leaf.flatten(1, 2), inputs) if self.shared else self._of(i, inputs, 2)
            if not self.recurrent:
                rows = member.torso(tree_map(lambda leaf: leaf.flatten(0, 1), mine))  # type: ignore[operator]
                said.append(member.head(rows).unflatten(0, (T, -1)))  # type: ignore[operator]
                continue
            first = is_first.repeat_interleave(self.num_agents, 1) if self.shared else is_first
            features, _ = unroll(member.torso, mine, self._of(i, hidden), first)  # type: ignore[arg-type]
            said.append(member.head(features))  # type: ignore[operator]
        return self._join(said, 2, (N,))

    def _of(self, i: int, tree: Tree, dim: int = 1) -> Tree:
        """The rows of one member: all `[N*A,...]` where it is shared, else its agent's `[N,...]`."""
        if tree is None:
            return None
        return tree_map(lambda leaf: leaf.flatten(0, 1) if self.shared else leaf.select(dim, i), tree)

    def _join(self, parts: list[Tree], dim: int, rows: tuple[int, ...] = (-1,)) -> Tree:
        if parts[0] is None:
            return None
        if self.shared:
            return tree_map(lambda leaf: leaf.unflatten(dim - 1, (*rows, self.num_agents)), parts[0])
        return tree_map(lambda *leaves: torch.stack(leaves, dim), *parts)

    def initial_rnn_state(self, num: int) -> Tree:
        """Zeros `[num,A,...]`; None without memory."""
        if self._rnn_fields is None:
            return None
        lead, device = (num, self.num_agents), self.agent_ids.device
        return tree_map(lambda field: torch.zeros(*lead, *field.shape, device=device), self._rnn_fields)

    def initial_hidden(self, num: int) -> Tree:
        """What a policy remembers at the start of episodes; None for one that remembers nothing."""
        last = torch.zeros(num, self.num_agents, self.spaces.num_actions, device=self.agent_ids.device)
        return self.join_hidden(self.initial_rnn_state(num), last)

    def join_hidden(self, memory: Tree, last_action: Tensor) -> Tree:
        parts = (() if memory is None else (memory,)) + ((last_action,) if self.last_action else ())
        return parts or None

    def split_hidden(self, hidden: Tree) -> tuple[Tree, Tensor | None]:
        memory = hidden[0] if self.recurrent else None
        return memory, hidden[-1] if self.last_action else None

    def update_norm(self, obs: Tree) -> None:
        """Take observations into the running statistics of the built-in encoders."""
        for member in self.agent_nets:
            encoder = get_encoder(member.torso)  # type: ignore[arg-type]
            if encoder is not None:
                encoder.part("obs").update_norm(obs)


def global_state(batch: Batch, spaces: Spaces, following: bool = False) -> Tensor:
    """The task's state `[...,S]`, else all observations joined; `following` that after the step."""
    if spaces.state is not None:
        return batch.next_state if following else batch.state
    return (batch.next_obs if following else batch.obs).flatten(-2)


def global_state_size(spaces: Spaces, who: str) -> int:
    if spaces.state is not None:
        return spaces.state
    field = space_fields(spaces.obs)
    if not isinstance(field, Field) or len(field.shape) != 1:
        raise UserError(f"{who} needs a global state: this task gives none, and observations {spaces.obs} don't join")
    return spaces.num_agents * field.shape[0]


def _lead(obs: Tree, spaces: Spaces) -> tuple[int, ...]:
    """The dimensions of an observation before those of one agent's, without the agents'."""
    leaf, field = tree_leaves(obs)[0], tree_leaves(space_fields(spaces.obs))[0]
    shape: tuple[int, ...] = leaf.shape[: leaf.ndim - len(field.shape)]
    return shape

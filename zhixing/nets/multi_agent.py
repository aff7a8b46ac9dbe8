"""Networks for several agents, with weights shared by all agents or separate for each.

The input of an agent's network is a dict, so any torso accepts it, including a custom one. It holds the agent's
observation, its one-hot index if weights are shared, and optionally its last action.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.spaces import Box, Dict, Discrete
from torch import Tensor, nn
from torch.nn import functional as F

from zhixing.config import BUILT_IN_NETS, NetConfig
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

AgentHeadFactory = Callable[[int], nn.Module]  # number of features -> head


class AgentNet(nn.Module):
    """Torso and head of one agent, or of all agents that share weights."""

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
    """`net(inputs [N,A,...], rnn_state [N,A,...]) -> (head outputs [N,A,...], rnn_state)`."""

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
        num_nets = 1 if shared else self.num_agents
        settings = {"normalize": normalize, "orthogonal_init": orthogonal_init}
        self.agent_nets = nn.ModuleList(
            [AgentNet(self.space, cfg, make_net, head, **settings) for _ in range(num_nets)]
        )
        torso: Any = self.agent_nets[0].torso
        self.recurrent = is_recurrent(torso)
        # every update needs these shapes, so compute them once
        self._rnn_fields = hidden_fields(torso(example_obs(self.space), None)[1]) if self.recurrent else None
        self.agent_ids: Tensor
        self.register_buffer("agent_ids", torch.eye(self.num_agents), persistent=False)

    def build_inputs(self, obs: Tree, last_action: Tensor | None) -> dict[str, Tree]:
        """Return the inputs of the agents' networks, `[...,A,n]` each."""
        inputs: dict[str, Tree] = {"obs": obs}
        if self.shared:
            inputs["agent"] = self.agent_ids.expand(*_leading_shape(obs, self.spaces), self.num_agents)
        if self.last_action:
            inputs["last_action"] = last_action
        return inputs

    def encode_action(self, action: Tensor) -> Tensor:
        """Return discrete actions one-hot and continuous actions unchanged: `[...,A,n]`."""
        if isinstance(self.spaces.action, Discrete):
            return F.one_hot(action, self.spaces.num_actions).float()
        return action.float()

    def forward(self, inputs: Tree, rnn_state: Tree = None) -> tuple[Tensor, Tree]:
        """Run one step of all agents."""
        results = [
            self._forward_one(i, self._select(i, inputs), self._select(i, rnn_state))
            for i in range(len(self.agent_nets))
        ]
        return self._join([out for out, _ in results], 1), self._join([state for _, state in results], 1)

    def _forward_one(self, i: int, inputs: Tree, rnn_state: Tree) -> tuple[Tensor, Tree]:
        net: Any = self.agent_nets[i]
        if not self.recurrent:
            return net.head(net.torso(inputs)), None
        features, rnn_state = net.torso(inputs, rnn_state)
        return net.head(features), rnn_state

    def unroll(self, inputs: Tree, rnn_state: Tree, is_first: Tensor) -> Tensor:
        """Run over `inputs [T,N,A,...]` from `rnn_state [N,A,...]` and return the head outputs `[T,N,A,...]`.

        The RNN state is reset where `is_first [T,N]`.
        """
        T, N = is_first.shape
        outputs = []
        for i, net in enumerate(self.agent_nets):
            rows = tree_map(lambda leaf: leaf.flatten(1, 2), inputs) if self.shared else self._select(i, inputs, 2)
            if not self.recurrent:
                features = net.torso(tree_map(lambda leaf: leaf.flatten(0, 1), rows))  # type: ignore[operator]
                outputs.append(net.head(features).unflatten(0, (T, -1)))  # type: ignore[operator]
                continue
            first = is_first.repeat_interleave(self.num_agents, 1) if self.shared else is_first
            features, _ = unroll(net.torso, rows, self._select(i, rnn_state), first)  # type: ignore[arg-type]
            outputs.append(net.head(features))  # type: ignore[operator]
        return self._join(outputs, 2, (N,))

    def _select(self, i: int, tree: Tree, dim: int = 1) -> Tree:
        """Return the rows of network i: all agents' `[N*A,...]` if weights are shared, else agent i's `[N,...]`."""
        if tree is None:
            return None
        return tree_map(lambda leaf: leaf.flatten(0, 1) if self.shared else leaf.select(dim, i), tree)

    def _join(self, parts: list[Tree], dim: int, rows: tuple[int, ...] = (-1,)) -> Tree:
        """Undo `_select`: combine the results of all networks along the agent dimension `dim`."""
        if parts[0] is None:
            return None
        if self.shared:
            return tree_map(lambda leaf: leaf.unflatten(dim - 1, (*rows, self.num_agents)), parts[0])
        return tree_map(lambda *leaves: torch.stack(leaves, dim), *parts)

    def initial_rnn_state(self, num: int) -> Tree:
        """Return zeros `[num,A,...]`, or None if the network is not recurrent."""
        if self._rnn_fields is None:
            return None
        lead, device = (num, self.num_agents), self.agent_ids.device
        return tree_map(lambda field: torch.zeros(*lead, *field.shape, device=device), self._rnn_fields)

    def initial_hidden(self, num: int) -> Tree:
        """Return a policy's hidden state at the start of episodes, or None if it is stateless."""
        last_action = torch.zeros(num, self.num_agents, self.spaces.num_actions, device=self.agent_ids.device)
        return self.join_hidden(self.initial_rnn_state(num), last_action)

    def join_hidden(self, rnn_state: Tree, last_action: Tensor) -> Tree:
        """Return the hidden state of a policy: the RNN state and the last action, as far as the network uses them."""
        parts = (() if rnn_state is None else (rnn_state,)) + ((last_action,) if self.last_action else ())
        return parts or None

    def split_hidden(self, hidden: Tree) -> tuple[Tree, Tensor | None]:
        """Return the RNN state and the last action, each None if the network does not use it."""
        rnn_state = hidden[0] if self.recurrent else None
        return rnn_state, hidden[-1] if self.last_action else None

    def update_norm(self, obs: Tree) -> None:
        """Update the running observation statistics of the built-in encoders."""
        for net in self.agent_nets:
            encoder = get_encoder(net.torso)  # type: ignore[arg-type]
            if encoder is not None:
                encoder.part("obs").update_norm(obs)


def make_critic(
    spaces: Spaces, obs: gym.Space[Any], cfg: NetConfig, head: AgentHeadFactory, **settings: bool
) -> MultiAgentNet:
    """Return built-in feed-forward networks for inputs `obs` of each agent, even if `cfg` describes others."""
    kind = cfg.kind if cfg.kind in BUILT_IN_NETS else "auto"
    feed_forward = cfg.model_copy(update={"recurrent": "none", "kind": kind})
    return MultiAgentNet(dataclasses.replace(spaces, obs=obs), feed_forward, None, head, **settings)


def global_state(batch: Batch, spaces: Spaces, use_next: bool = False) -> Tensor:
    """Return the env's global state `[...,S]`, or all observations concatenated if it has none.

    `use_next` selects the state after the step.
    """
    if spaces.state is not None:
        return batch.next_state if use_next else batch.state
    return (batch.next_obs if use_next else batch.obs).flatten(-2)


def global_state_space(spaces: Spaces, algorithm: str) -> Box:
    """Return the space of `global_state`. Raise `UserError` if the env has no state and none can be built."""
    size = spaces.state
    if size is None:
        field = space_fields(spaces.obs)
        if not isinstance(field, Field) or len(field.shape) != 1:
            raise UserError(
                f"{algorithm} needs a global state, but the env provides none and its observations {spaces.obs} are "
                f"not flat vectors that could be concatenated"
            )
        size = spaces.num_agents * field.shape[0]
    return Box(-np.inf, np.inf, (size,), np.float32)


def _leading_shape(obs: Tree, spaces: Spaces) -> tuple[int, ...]:
    """Return the leading dimensions `[...,A]` of a batch of observations."""
    leaf, field = tree_leaves(obs)[0], tree_leaves(space_fields(spaces.obs))[0]
    shape: tuple[int, ...] = leaf.shape[: leaf.ndim - len(field.shape)]
    return shape

"""Actors and critics of the off-policy family: several critics of one shape are one batched module."""

from __future__ import annotations

import torch
from gymnasium.spaces import Box, Discrete
from torch import Tensor, nn

from zhixing.config import NetConfig
from zhixing.errors import UserError
from zhixing.nets.body import Encoder, MakeNet, is_recurrent, make_body, num_features
from zhixing.nets.mlp import MLP, TwinMLP
from zhixing.ops.distributions import Categorical, Distribution, SquashedGaussian
from zhixing.spaces import Spaces
from zhixing.tree import Tree

LOG_STD_RANGE = (-20.0, 2.0)


def _encoder(spaces: Spaces, cfg: NetConfig, make_net: MakeNet | None, who: str) -> nn.Module:
    """The user's own network, else what makes a flat vector of the observation."""
    if cfg.recurrent != "none":
        raise UserError(f"{who} takes no recurrent networks: set net.recurrent=none (ppo and dqn take them)")
    if make_net is None and cfg.kind == "auto":
        return Encoder(spaces.obs, cfg.cnn, normalise=False)
    body = make_body(spaces.obs, cfg, make_net)
    if is_recurrent(body):
        raise UserError(f"{who} takes no recurrent networks (ppo and dqn take them)")
    return body


def check_box(spaces: Spaces, who: str) -> None:
    """Refuse by name what these algorithms can't act on."""
    space = spaces.action
    if not (isinstance(space, Box) and len(space.shape) == 1 and space.is_bounded()):
        raise UserError(f"{who} needs continuous actions in a bounded flat Box, this task has {space}")


class Critics(nn.Module):
    """K estimates of Q: `net(obs, action) -> [K,B]`, or `net(obs) -> [K,B,n]` where actions are discrete."""

    def __init__(self, spaces: Spaces, cfg: NetConfig, make_net: MakeNet | None, copies: int, who: str) -> None:
        super().__init__()
        self.encoder = _encoder(spaces, cfg, make_net, who)
        self.discrete = isinstance(spaces.action, Discrete)
        inputs = num_features(self.encoder, spaces.obs) + (0 if self.discrete else spaces.num_actions)
        outputs = spaces.num_actions if self.discrete else 1

        self.towers = TwinMLP([MLP(inputs, cfg.hidden_sizes, cfg.activation, outputs=outputs) for _ in range(copies)])

    def forward(self, obs: Tree, action: Tensor | None = None) -> Tensor:
        features = self.encoder(obs)
        if action is None:
            return self.towers(features)
        return self.towers(torch.cat([features, action], -1)).squeeze(-1)


class DeterministicActor(nn.Module):
    """`net(obs) -> action` in [-1, 1]."""

    def __init__(self, spaces: Spaces, cfg: NetConfig, make_net: MakeNet | None, who: str) -> None:
        super().__init__()
        self.encoder = _encoder(spaces, cfg, make_net, who)
        inputs = num_features(self.encoder, spaces.obs)
        self.layers = MLP(inputs, cfg.hidden_sizes, cfg.activation, outputs=spaces.num_actions)

    def forward(self, obs: Tree) -> Tensor:
        return self.layers(self.encoder(obs)).tanh()


class StochasticActor(nn.Module):
    """`net(obs, mask)` gives a squashed normal with a spread that depends on the state, or a choice of actions."""

    def __init__(self, spaces: Spaces, cfg: NetConfig, make_net: MakeNet | None, who: str) -> None:
        super().__init__()
        self.encoder = _encoder(spaces, cfg, make_net, who)
        self.discrete = isinstance(spaces.action, Discrete)
        inputs = num_features(self.encoder, spaces.obs)
        outputs = spaces.num_actions * (1 if self.discrete else 2)
        self.layers = MLP(inputs, cfg.hidden_sizes, cfg.activation, outputs=outputs)

    def forward(self, obs: Tree, mask: Tensor | None = None) -> Distribution:
        out = self.layers(self.encoder(obs))
        if self.discrete:
            return Categorical(out, mask)
        mean, log_std = out.chunk(2, -1)
        return SquashedGaussian(mean, log_std.clamp(*LOG_STD_RANGE))

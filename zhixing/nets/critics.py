"""Actors and critics of the off-policy family: several critics of one shape are one batched module."""

from __future__ import annotations

import torch
from gymnasium.spaces import Box, Discrete
from torch import Tensor, nn

from zhixing.config import ContinuousConfig
from zhixing.errors import UserError
from zhixing.nets.body import Encoder, MakeNet, is_recurrent, make_body, num_features
from zhixing.nets.mlp import MLP, TwinMLP
from zhixing.ops.distributions import Categorical, Distribution, SquashedGaussian
from zhixing.spaces import Spaces
from zhixing.tree import Tree

LOG_STD_RANGE = (-20.0, 2.0)


def check_box(spaces: Spaces, who: str) -> None:
    """Refuse by name what these algorithms can't act on."""
    space = spaces.action
    if not (isinstance(space, Box) and len(space.shape) == 1 and space.is_bounded()):
        raise UserError(f"{who} needs continuous actions in a bounded flat Box, this task has {space}")


class Encoded(nn.Module):
    """What actors and critics begin with: the observation as a flat vector, by the user's own network or an encoder."""

    def __init__(self, spaces: Spaces, cfg: ContinuousConfig, make_net: MakeNet | None) -> None:
        super().__init__()
        own = make_net is not None or cfg.net.kind != "auto"
        self.encoder: nn.Module
        if own:
            self.encoder = make_body(spaces.obs, cfg.net, make_net, normalise=cfg.normalise_obs)
        else:
            self.encoder = Encoder(spaces.obs, cfg.net.cnn, cfg.normalise_obs)
        if cfg.net.recurrent != "none" or is_recurrent(self.encoder):
            raise UserError(
                f"{cfg.algorithm} takes no recurrent networks: set net.recurrent=none (ppo and dqn take them, of teams "
                f"mappo and qmix)"
            )
        self.plain = not own and self.encoder.plain
        self.num_features = num_features(self.encoder, spaces.obs)

    def features(self, obs: Tree) -> Tensor:
        return obs if self.plain else self.encoder(obs)

    def update_norm(self, obs: Tree) -> None:
        if isinstance(self.encoder, Encoder):
            self.encoder.update_norm(obs)


class Critics(Encoded):
    """K estimates of Q: `net(obs, action) -> [K,B]`, or `net(obs) -> [K,B,n]` where actions are discrete."""

    def __init__(self, spaces: Spaces, cfg: ContinuousConfig, make_net: MakeNet | None, copies: int) -> None:
        super().__init__(spaces, cfg, make_net)
        self.discrete = isinstance(spaces.action, Discrete)
        inputs = self.num_features + (0 if self.discrete else spaces.num_actions)
        outputs = spaces.num_actions if self.discrete else 1

        self.towers = TwinMLP(
            [MLP(inputs, cfg.net.hidden_sizes, cfg.net.activation, outputs=outputs) for _ in range(copies)]
        )

    def forward(self, obs: Tree, action: Tensor | None = None) -> Tensor:
        features = self.features(obs)
        if action is None:
            return self.towers(features)
        return self.towers(torch.cat([features, action], -1)).squeeze(-1)


class DeterministicActor(Encoded):
    """`net(obs) -> action` in [-1, 1]."""

    def __init__(self, spaces: Spaces, cfg: ContinuousConfig, make_net: MakeNet | None) -> None:
        super().__init__(spaces, cfg, make_net)
        self.layers = MLP(self.num_features, cfg.net.hidden_sizes, cfg.net.activation, outputs=spaces.num_actions)

    def forward(self, obs: Tree) -> Tensor:
        return self.layers(self.features(obs)).tanh()


class StochasticActor(Encoded):
    """`net(obs, mask)` gives a squashed normal with a spread that depends on the state, or a choice of actions."""

    def __init__(self, spaces: Spaces, cfg: ContinuousConfig, make_net: MakeNet | None) -> None:
        super().__init__(spaces, cfg, make_net)
        self.discrete = isinstance(spaces.action, Discrete)
        outputs = spaces.num_actions * (1 if self.discrete else 2)
        self.layers = MLP(self.num_features, cfg.net.hidden_sizes, cfg.net.activation, outputs=outputs)

    def forward(self, obs: Tree, mask: Tensor | None = None) -> Distribution:
        out = self.layers(self.features(obs))
        if self.discrete:
            return Categorical(out, mask)
        mean, log_std = out.chunk(2, -1)
        return SquashedGaussian(mean, log_std.clamp(*LOG_STD_RANGE))

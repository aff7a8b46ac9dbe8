"""Actors and critics of the off-policy algorithms. An ensemble of critics is one batched module."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from gymnasium.spaces import Box, Discrete
from torch import Tensor, nn

from zhixing.config import BUILT_IN_NETS, DataConfig, OffPolicyActorCriticConfig
from zhixing.core.spaces import Spaces
from zhixing.core.tree import Tree
from zhixing.errors import UserError
from zhixing.nets.heads import ActionDistribution, composite_distribution, num_outputs
from zhixing.nets.simba import make_ensemble, make_mlp
from zhixing.nets.torso import Encoder, NetFactory, is_recurrent, make_torso, num_features
from zhixing.ops.distributions import Categorical, Distribution, Gaussian, SquashedGaussian

if TYPE_CHECKING:
    from typing_extensions import Self

LOG_STD_RANGE = (-20.0, 2.0)
# without a lower bound, the likelihood of actions that repeat in a dataset would grow forever
MAX_LIKELIHOOD_LOG_STD_RANGE = (-5.0, 0.0)


def check_box(spaces: Spaces, algorithm: str) -> None:
    """Raise `UserError` unless actions are a bounded one-dimensional Box."""
    space = spaces.action
    if not (isinstance(space, Box) and len(space.shape) == 1 and space.is_bounded()):
        raise UserError(
            f"{algorithm} needs continuous actions in a bounded one-dimensional Box; this env has {space}; "
            f"use {'mappo' if spaces.agents else 'ppo'} instead"
        )


class EncoderModule(nn.Module):
    """Base of actors and critics: encodes observations to flat vectors, by a custom network or the built-in encoder."""

    def __init__(self, spaces: Spaces, cfg: DataConfig, make_net: NetFactory | None) -> None:
        super().__init__()
        custom = make_net is not None or cfg.net.kind not in BUILT_IN_NETS
        self.encoder: nn.Module
        if custom:
            self.encoder = make_torso(spaces.obs, cfg.net, make_net, normalize=cfg.normalize_obs)
        else:
            self.encoder = Encoder(spaces.obs, cfg.net.cnn, cfg.normalize_obs)
        if cfg.net.recurrent != "none" or is_recurrent(self.encoder):
            raise UserError(
                f"{cfg.algorithm} does not support recurrent networks: set net.recurrent=none, or use ppo or dqn (with "
                f"several agents, mappo or qmix)"
            )
        self.plain = not custom and self.encoder.plain
        self.num_features = num_features(self.encoder, spaces.obs)

    def features(self, obs: Tree) -> Tensor:
        return obs if self.plain else self.encoder(obs)

    def update_norm(self, obs: Tree) -> None:
        if isinstance(self.encoder, Encoder):
            self.encoder.update_norm(obs)


class Critics(EncoderModule):
    """K estimates of Q: `net(obs, action) -> [K,B]`, or `net(obs) -> [K,B,n]` for discrete actions.

    With `quantiles=M`, each estimates M quantiles of the return of a continuous action: `[K,B,M]`. With
    `dropout`, units of the hidden layers are zeroed with this probability in calls with an `rng`.
    """

    def __init__(
        self,
        spaces: Spaces,
        cfg: OffPolicyActorCriticConfig,
        make_net: NetFactory | None,
        num_critics: int,
        *,
        quantiles: int | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__(spaces, cfg, make_net)
        self.discrete, self.quantiles = isinstance(spaces.action, Discrete), quantiles
        inputs = self.num_features + (0 if self.discrete else spaces.num_actions)
        outputs = spaces.num_actions if self.discrete else quantiles or 1
        towers = [make_mlp(cfg.net, inputs, outputs, hidden_sizes=cfg.critic_hidden_sizes) for _ in range(num_critics)]
        self.towers = make_ensemble(towers, cfg.critic_norm, dropout)

    def forward(self, obs: Tree, action: Tensor | None = None, rng: torch.Generator | None = None) -> Tensor:
        features = self.features(obs)
        if action is None:
            return self.towers(features, rng)
        out = self.towers(torch.cat([features, action], -1), rng)
        return out.squeeze(-1) if self.quantiles is None else out

    def q1(self, obs: Tree, action: Tensor) -> Tensor:
        """Return Q of the first critic only: `[B]`."""
        return self.towers.forward_first(torch.cat([self.features(obs), action], -1)).squeeze(-1)

    def q_of_actions(self, obs: Tree, action: Tensor, rng: torch.Generator | None = None) -> Tensor:
        """Return Q of one action per state `[K,B]`, for continuous and for discrete actions."""
        if not self.discrete:
            return self(obs, action, rng)
        q = self(obs, rng=rng)  # [K,B,n]
        return q.gather(-1, action.expand(len(q), -1).unsqueeze(-1)).squeeze(-1)

    def q_of_many(self, obs: Tree, actions: Tensor, rng: torch.Generator | None = None) -> Tensor:
        """Return Q of S actions per state, `[S,B,n]` to `[K,S,B]`. Each observation is encoded once."""
        features = self.features(obs).expand(len(actions), -1, -1)
        rows = torch.cat([features, actions], -1).flatten(0, 1)
        return self.towers(rows, rng).squeeze(-1).unflatten(1, actions.shape[:2])


class StateValue(EncoderModule):
    """State values: `net(obs) -> [B]`."""

    def __init__(self, spaces: Spaces, cfg: OffPolicyActorCriticConfig, make_net: NetFactory | None) -> None:
        super().__init__(spaces, cfg, make_net)
        self.layers = make_mlp(cfg.net, self.num_features, 1, hidden_sizes=cfg.critic_hidden_sizes)

    def forward(self, obs: Tree) -> Tensor:
        return self.layers(self.features(obs)).squeeze(-1)


class DeterministicActor(EncoderModule):
    """`net(obs) -> action` in [-1, 1]."""

    def __init__(self, spaces: Spaces, cfg: DataConfig, make_net: NetFactory | None) -> None:
        super().__init__(spaces, cfg, make_net)
        self.layers = make_mlp(cfg.net, self.num_features, spaces.num_actions)

    def forward(self, obs: Tree) -> Tensor:
        return self.layers(self.features(obs)).tanh()


class StochasticActor(EncoderModule):
    """`net(obs, mask)` returns a tanh-squashed Gaussian with a state-dependent std, or a categorical distribution."""

    def __init__(self, spaces: Spaces, cfg: DataConfig, make_net: NetFactory | None) -> None:
        super().__init__(spaces, cfg, make_net)
        self.discrete = isinstance(spaces.action, Discrete)
        outputs = spaces.num_actions * (1 if self.discrete else 2)
        self.layers = make_mlp(cfg.net, self.num_features, outputs)

    def forward(self, obs: Tree, mask: Tensor | None = None) -> Distribution:
        out = self.layers(self.features(obs))
        if self.discrete:
            return Categorical(out, mask)
        return squashed_gaussian(out)


def squashed_gaussian(out: Tensor) -> SquashedGaussian:
    """Return the distribution with means and log standard deviations `[B,2n]`."""
    mean, log_std = out.chunk(2, -1)
    return SquashedGaussian(mean, log_std.clamp(*LOG_STD_RANGE))


class MaxLikelihoodActor(EncoderModule):
    """A policy to fit to recorded actions by maximum likelihood: `net(obs, mask)` returns a distribution.

    Continuous parts of actions are Gaussian, with a mean in [-1, 1] and one learned std per action dimension that is
    the same in all states. All other parts are as in `ActionDistribution`.
    """

    def __init__(self, spaces: Spaces, cfg: DataConfig, make_net: NetFactory | None) -> None:
        super().__init__(spaces, cfg, make_net)
        self.spaces, layout = spaces, spaces.layout
        self.distribution = ActionDistribution(spaces) if spaces.discrete else None
        self.layers = make_mlp(cfg.net, self.num_features, num_outputs(layout))
        if not spaces.discrete:
            self.log_std_raw = nn.Parameter(torch.full((layout.num_continuous,), 1.5))  # an initial std of 0.4

    def forward(self, obs: Tree, mask: Tensor | None = None) -> Distribution:
        out = self.layers(self.features(obs))
        if self.distribution is not None:
            return self.distribution(out, mask)
        if self.spaces.composite:
            return composite_distribution(self.spaces.layout, out, mask, self.gaussian)
        return self.gaussian(out)

    def gaussian(self, out: Tensor) -> Distribution:
        low, high = MAX_LIKELIHOOD_LOG_STD_RANGE
        log_std = low + (high - low) * self.log_std_raw.sigmoid()  # a clamp would have no gradient outside
        return BoundedGaussian(out.tanh(), log_std)


class BoundedGaussian(Distribution):
    """Gaussian whose samples are clipped to [-1, 1]; `log_prob` is that of the unclipped Gaussian.

    Recorded actions often lie on the bounds, where a tanh-squashed Gaussian has no finite log-probability.
    """

    def __init__(self, mean: Tensor, log_std: Tensor) -> None:
        self.normal = Gaussian(mean, log_std)

    def sample(self, rng: torch.Generator) -> Tensor:
        return self.normal.sample(rng).clamp(-1.0, 1.0)

    def mode(self) -> Tensor:
        return self.normal.mean

    def log_prob(self, action: Tensor) -> Tensor:
        return self.normal.log_prob(action)

    def entropy(self) -> Tensor:
        return self.normal.entropy()

    def kl(self, other: Self) -> Tensor:
        return self.normal.kl(other.normal)

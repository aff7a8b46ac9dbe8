"""An actor and a critic with a shared torso, with one torso each, or with two equal torsos computed as one."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from zhixing.config import Auto, NetConfig
from zhixing.core.batch import Batch
from zhixing.core.spaces import Spaces
from zhixing.core.tree import Field, Tree, tree_map
from zhixing.nets.heads import PolicyHead, ValueHead
from zhixing.nets.mlp import EnsembleMLP
from zhixing.nets.torso import (
    NetFactory,
    Torso,
    get_encoder,
    hidden_fields,
    is_recurrent,
    make_torso,
    num_features,
    unroll,
)
from zhixing.ops.distributions import Distribution
from zhixing.ops.returns import gae, next_values, rollout_boundary

if TYPE_CHECKING:
    from zhixing.core.policy import Policy


class ActorCriticOut(NamedTuple):
    distribution: Distribution
    value: Tensor
    hidden: Tree


class ActorCritic(nn.Module):
    """`net(obs, hidden, mask)` returns the action distribution, the value and the next hidden state.

    `batched` computes two torsos of equal shape in one product per layer. Actor and critic then can't have different
    learning rates.
    """

    def __init__(
        self,
        spaces: Spaces,
        cfg: NetConfig,
        make_net: NetFactory | None = None,
        *,
        shared: bool = False,
        batched: bool = True,
        normalize: bool | Auto = False,
        log_std: float = 0.0,
    ) -> None:
        super().__init__()

        def torso() -> nn.Module:
            return make_torso(spaces.obs, cfg, make_net, normalize=normalize, orthogonal_init=True)

        self.actor: nn.Module = torso()
        self.critic: nn.Module = self.actor if shared else torso()
        self.recurrent = is_recurrent(self.actor)
        features = num_features(self.actor, spaces.obs)
        self.policy_head = PolicyHead(features, spaces, log_std)
        self.value_head = ValueHead(features)
        self._encoders = {get_encoder(self.actor), get_encoder(self.critic)}
        if (
            batched
            and not shared
            and cfg.hidden_sizes
            and isinstance(self.actor, Torso)
            and isinstance(self.critic, Torso)
        ):
            encoder = self.actor.encoder
            if not list(encoder.parameters()):
                self.encoder, self._encoders = encoder, {encoder}
                self.towers = EnsembleMLP([self.actor, self.critic])
                del self.actor, self.critic

    def actor_parameters(self) -> list[nn.Parameter]:
        return [*self.actor.parameters(), *self.policy_head.parameters()]

    def critic_parameters(self) -> list[nn.Parameter]:
        return [*self.critic.parameters(), *self.value_head.parameters()]

    def forward(self, obs: Tree, hidden: Tree = None, mask: Tensor | None = None) -> ActorCriticOut:
        if hasattr(self, "towers"):
            actor_features, critic_features = self.towers(obs if self.encoder.plain else self.encoder(obs))
        elif not self.recurrent:
            actor_features = self.actor(obs)
            critic_features = actor_features if self.critic is self.actor else self.critic(obs)
        elif self.critic is self.actor:
            actor_features, hidden = self.actor(obs, hidden)
            critic_features = actor_features
        else:
            actor_hidden, critic_hidden = hidden if hidden is not None else (None, None)
            actor_features, actor_hidden = self.actor(obs, actor_hidden)
            critic_features, critic_hidden = self.critic(obs, critic_hidden)
            hidden = (actor_hidden, critic_hidden)
        return ActorCriticOut(self.policy_head(actor_features, mask), self.value_head(critic_features), hidden)

    def update_norm(self, obs: Tree) -> None:
        """Update the running observation statistics of the built-in encoders."""
        for encoder in self._encoders:
            if encoder is not None:
                encoder.update_norm(obs)


def torso_features(torso: nn.Module, batch: Batch, hidden: Tree) -> Tensor:
    """Return the features of `batch.obs`: `[B,n]`, or `[T,N,n]` for a recurrent torso, unrolled from `hidden[0]`."""
    if hidden is None:
        return torso(batch.obs)
    start = tree_map(lambda leaf: leaf[0], hidden)
    return unroll(torso, batch.obs, start, batch.is_first)[0]


def evaluate_actions(net: ActorCritic, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Return the log-probability of `batch.action`, the value and the entropy under the current weights.

    The batch is `[B]`, or for recurrent networks `[T,N]` with `hidden` and `is_first`; so is each result.
    """
    mask = batch.get("mask")
    if not net.recurrent:
        out = net(batch.obs, None, mask)
        return out.distribution.log_prob(batch.action), out.value, out.distribution.entropy()
    if net.critic is net.actor:
        actor_features = critic_features = torso_features(net.actor, batch, batch.hidden)
    else:
        actor_features = torso_features(net.actor, batch, batch.hidden[0])
        critic_features = torso_features(net.critic, batch, batch.hidden[1])
    distribution = net.policy_head(actor_features, mask)
    return distribution.log_prob(batch.action), net.value_head(critic_features), distribution.entropy()


@torch.no_grad()
def compute_advantages(net: ActorCritic, batch: Batch, reward: Tensor, gamma: float, lam: float) -> Tensor:
    """Return the GAE advantages of a rollout `[T,N]` that stores the `value` predicted while acting."""
    boundary = rollout_boundary(batch)
    next_value = next_values(batch.value, boundary, bootstrap_values(net, batch, boundary))
    return gae(reward, batch.value, next_value, batch.terminated, batch.truncated, gamma, lam)


@torch.no_grad()
def bootstrap_values(net: ActorCritic, batch: Batch, rows: Tensor) -> Tensor:
    """Return the value of the next observation of each step where `rows [T,N]` is true."""
    next_obs = tree_map(lambda leaf: leaf[rows], batch.next_obs)
    if not net.recurrent:
        return net(next_obs).value
    obs, hidden = (tree_map(lambda leaf: leaf[rows], tree) for tree in (batch.obs, batch.hidden))
    return net(next_obs, net(obs, hidden).hidden).value


def episode_starts(batch: Batch) -> Tensor:
    """Return where a rollout `[T,N]` needs its hidden state reset.

    The first row is always false, because the hidden state stored with it is already reset if an episode starts there.
    """
    ended = batch.terminated | batch.truncated
    return torch.cat([torch.zeros_like(ended[:1]), ended[:-1]])


def rollout_fields(policy: Policy) -> dict[str, Tree]:
    """Return the extra fields that on-policy learners store with every step."""
    scalar = Field((), np.dtype(np.float32))
    hidden = policy.initial_hidden(1)
    return {"logp": scalar, "value": scalar} | ({} if hidden is None else {"hidden": hidden_fields(hidden)})

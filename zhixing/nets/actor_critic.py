"""An actor and a critic on one body, on a body each, or on two equal bodies computed as one."""

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
from zhixing.ops.returns import gae, next_values

if TYPE_CHECKING:
    from zhixing.core.policy import Policy


class ActorCriticOut(NamedTuple):
    distribution: Distribution
    value: Tensor
    hidden: Tree


class ActorCritic(nn.Module):
    """`net(obs, hidden, mask)` gives the policy's distribution, the value and the next hidden state.

    `batched` computes two bodies of equal shape in one product per layer; it can't be trained at two learning rates.
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

        def make_one() -> nn.Module:
            return make_torso(spaces.obs, cfg, make_net, normalize=normalize, orthogonal_init=True)

        self.actor: nn.Module = make_one()
        self.critic: nn.Module = self.actor if shared else make_one()
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
            seen, judged = self.towers(obs if self.encoder.plain else self.encoder(obs))
        elif not self.recurrent:
            seen = self.actor(obs)
            judged = seen if self.critic is self.actor else self.critic(obs)
        elif self.critic is self.actor:
            seen, hidden = self.actor(obs, hidden)
            judged = seen
        else:
            mine, theirs = hidden if hidden is not None else (None, None)
            seen, mine = self.actor(obs, mine)
            judged, theirs = self.critic(obs, theirs)
            hidden = (mine, theirs)
        return ActorCriticOut(self.policy_head(seen, mask), self.value_head(judged), hidden)

    def update_norm(self, obs: Tree) -> None:
        """Take observations into the running statistics of the built-in encoders."""
        for encoder in self._encoders:
            if encoder is not None:
                encoder.update_norm(obs)


def evaluate_actions(net: ActorCritic, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probability of the actions taken, value and entropy under the present weights, each of the batch's shape.

    `batch` is `[B]`, or `[T,n]` for networks with memory, with `hidden` and `is_first`.
    """
    mask = batch.mask if "mask" in batch else None
    if not net.recurrent:
        out = net(batch.obs, None, mask)
        return out.distribution.log_prob(batch.action), out.value, out.distribution.entropy()
    start = tree_map(lambda leaf: leaf[0], batch.hidden)
    if net.critic is net.actor:
        seen = judged = unroll(net.actor, batch.obs, start, batch.is_first)[0]
    else:
        seen = unroll(net.actor, batch.obs, start[0], batch.is_first)[0]
        judged = unroll(net.critic, batch.obs, start[1], batch.is_first)[0]
    distribution = net.policy_head(seen, mask)
    return distribution.log_prob(batch.action), net.value_head(judged), distribution.entropy()


@torch.no_grad()
def compute_advantages(net: ActorCritic, batch: Batch, reward: Tensor, gamma: float, lam: float) -> Tensor:
    """Advantages of a rollout `[T,N]` whose `value` was noted while acting."""
    boundary = batch.terminated | batch.truncated
    boundary[-1] = True
    next_value = next_values(batch.value, boundary, bootstrap_values(net, batch, boundary))
    return gae(reward, batch.value, next_value, batch.terminated, batch.truncated, gamma, lam)


@torch.no_grad()
def bootstrap_values(net: ActorCritic, batch: Batch, rows: Tensor) -> Tensor:
    """The value of what the steps in `rows [T,N]` led to."""
    next_obs = tree_map(lambda leaf: leaf[rows], batch.next_obs)
    if not net.recurrent:
        return net(next_obs).value
    obs, hidden = (tree_map(lambda leaf: leaf[rows], tree) for tree in (batch.obs, batch.hidden))
    return net(next_obs, net(obs, hidden).hidden).value


def episode_starts(batch: Batch) -> Tensor:
    """Where memory must be cleared within a rollout `[T,N]`; what is stored with its first row is cleared already."""
    ended = batch.terminated | batch.truncated
    return torch.cat([torch.zeros_like(ended[:1]), ended[:-1]])


def rollout_fields(policy: Policy) -> dict[str, Tree]:
    """What on-policy learners keep of each decision."""
    number = Field((), np.dtype(np.float32))
    hidden = policy.initial_hidden(1)
    return {"logp": number, "value": number} | ({} if hidden is None else {"hidden": hidden_fields(hidden)})

"""An actor and a critic on one body, on a body each, or on two equal bodies computed as one."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn

from zhixing.config import NetConfig
from zhixing.errors import UserError
from zhixing.nets.body import Body, MakeNet, encoder_of, is_recurrent, make_body, num_features
from zhixing.nets.heads import PolicyHead, ValueHead
from zhixing.nets.mlp import TwinMLP
from zhixing.ops.distributions import Distribution
from zhixing.spaces import Spaces
from zhixing.tree import Tree


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
        make_net: MakeNet | None = None,
        *,
        shared: bool = False,
        batched: bool = True,
        normalise: bool = False,
        log_std: float = 0.0,
    ) -> None:
        super().__init__()

        def body() -> nn.Module:
            return make_body(spaces.obs, cfg, make_net, normalise=normalise, orthogonal_init=True)

        self.actor: nn.Module = body()
        self.critic: nn.Module = self.actor if shared else body()
        self.recurrent = is_recurrent(self.actor)
        features = num_features(self.actor, spaces.obs)
        self.policy_head = PolicyHead(features, spaces, log_std)
        self.value_head = ValueHead(features)
        self._encoders = {encoder_of(self.actor), encoder_of(self.critic)}
        if batched and not shared and isinstance(self.actor, Body) and isinstance(self.critic, Body):
            encoder = self.actor.encoder
            if not list(encoder.parameters()):
                self.encoder, self._encoders = encoder, {encoder}
                self.towers = TwinMLP([self.actor.layers, self.critic.layers])
                del self.actor, self.critic
        if normalise and None in self._encoders:
            raise UserError(
                "normalise_obs=true needs a built-in network; normalise inside your own, or set it to false"
            )

    def actor_parameters(self) -> list[nn.Parameter]:
        return [*self.actor.parameters(), *self.policy_head.parameters()]

    def critic_parameters(self) -> list[nn.Parameter]:
        return [*self.critic.parameters(), *self.value_head.parameters()]

    def forward(self, obs: Tree, hidden: Tree = None, mask: Tensor | None = None) -> ActorCriticOut:
        if hasattr(self, "towers"):
            seen, judged = self.towers(self.encoder(obs))
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

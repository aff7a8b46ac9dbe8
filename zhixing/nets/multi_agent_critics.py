"""One actor per agent and centralized critics, one per agent. The networks of all agents are one batched module."""

from __future__ import annotations

import torch
from torch import Tensor

from zhixing.config import OffPolicyActorCriticConfig
from zhixing.core.spaces import Spaces
from zhixing.core.tree import Tree, tree_leaves, tree_map
from zhixing.nets.critics import EncoderModule
from zhixing.nets.simba import make_ensemble, make_mlp
from zhixing.nets.torso import NetFactory


class MultiAgentEncoder(EncoderModule):
    """Encodes observations `[B,A,...]` to vectors `[B,A,f]`. All agents share the encoder or custom network."""

    def features(self, obs: Tree) -> Tensor:
        if self.plain:
            return obs
        lead = tree_leaves(obs)[0].shape[:2]
        return self.encoder(tree_map(lambda leaf: leaf.flatten(0, 1), obs)).unflatten(0, lead)


class MultiAgentActors(MultiAgentEncoder):
    """`net(obs [B,A,...]) -> [B,A,n]`: logits of discrete actions, or continuous actions before tanh."""

    def __init__(self, spaces: Spaces, cfg: OffPolicyActorCriticConfig, make_net: NetFactory | None) -> None:
        super().__init__(spaces, cfg, make_net)
        networks = [make_mlp(cfg.net, self.num_features, spaces.num_actions) for _ in range(spaces.num_agents)]
        self.towers = make_ensemble(networks)

    def forward(self, obs: Tree) -> Tensor:
        return self.towers(self.features(obs).transpose(0, 1)).transpose(0, 1)


class CentralizedCritics(MultiAgentEncoder):
    """One critic per agent, each of the joint observation and action: `net(obs [B,A,...], action [B,A,n]) -> [B,A]`.

    `action [A,B,A,n]` passes a different joint action to each critic.
    """

    def __init__(self, spaces: Spaces, cfg: OffPolicyActorCriticConfig, make_net: NetFactory | None) -> None:
        super().__init__(spaces, cfg, make_net)
        inputs = spaces.num_agents * (self.num_features + spaces.num_actions)
        networks = [
            make_mlp(cfg.net, inputs, 1, hidden_sizes=cfg.critic_hidden_sizes) for _ in range(spaces.num_agents)
        ]
        self.towers = make_ensemble(networks, cfg.critic_norm)

    def forward(self, obs: Tree, action: Tensor) -> Tensor:
        features, action = self.features(obs).flatten(-2), action.flatten(-2)
        joint = torch.cat([features.expand(*action.shape[:-1], -1), action], -1)  # [B,n], or [A,B,n]
        return self.towers(joint).squeeze(-1).transpose(0, 1)

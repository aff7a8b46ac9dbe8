"""Discrete SAC (Christodoulou, 2019).   y = r + γ^k (1 - terminated) Σ_a π(a|s') (min_i Q'_i(s', a) - α log π(a|s'))

SAC with expectations over actions as exact sums. `zhixing train sac` uses it if actions are discrete.
Differs from the paper: the default target entropy is half of the maximum, which with a mask is the log of the number of
valid actions in each state. The paper's 0.98 of the maximum can't be reached if few actions are valid, and α would grow
without bound.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from zhixing.algorithms.sac import SoftActorCritic
from zhixing.core.batch import Batch
from zhixing.core.tree import Tree
from zhixing.ops.returns import td_target


class DiscreteSAC(SoftActorCritic):
    """SAC for discrete actions: expectations are exact."""

    @torch.no_grad()
    def target_value(self, batch: Batch) -> Tensor:
        logp = self.actor(batch.next_obs, batch.get("next_mask")).logp  # [B,n]
        q = self.min_q(self.target_critics(batch.next_obs, rng=self.rng))
        return td_target(batch, (logp.exp() * (q - self.target_alpha * logp)).sum(-1))

    def actor_loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        policy = self.actor(batch.obs, batch.get("mask"))
        with torch.no_grad():
            q = self.actor_q(self.critics(batch.obs, rng=self.rng))
        loss = (policy.logp.exp() * (self.alpha.detach() * policy.logp - q)).sum(-1).mean()
        return loss, policy.entropy().detach().mean()

    def target_entropy(self, batch: Batch) -> Tensor | float:
        if self.cfg.target_entropy is not None:
            return self.cfg.target_entropy
        if "mask" in batch:
            return 0.5 * batch.mask.sum(-1).clamp(min=1).log().mean()
        return 0.5 * math.log(self.spaces.num_actions)

    def value(self, obs: Tree) -> Tensor:
        logp = self.actor(obs).logp
        return (logp.exp() * (self.critics(obs).amin(0) - self.target_alpha * logp)).sum(-1)

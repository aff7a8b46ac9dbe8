"""Discrete SAC (Christodoulou, 2019).   y = r + γ^k (1 - terminated) Σ_a π(a|s') (min_i Q'_i(s', a) - α log π(a|s'))

SAC whose expectations over actions are exact sums. `zhixing train sac` uses it where actions are discrete.
Differs from the paper: the default target entropy is half of the maximum, which with a mask is the log of the number of
allowed actions in each state. The paper's 0.98 of it can't be reached where few actions are allowed, and the
temperature would grow without bound.
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
    @torch.no_grad()
    def target_value(self, batch: Batch) -> Tensor:
        logp = self.actor(batch.next_obs, batch.next_mask if "next_mask" in batch else None).logp  # [B,n]
        q = self.min_q(self.target_critics(batch.next_obs))
        return td_target(batch, (logp.exp() * (q - self.target_alpha * logp)).sum(-1))

    def actor_loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        policy = self.actor(batch.obs, batch.mask if "mask" in batch else None)
        with torch.no_grad():
            q = self.actor_q(self.critics(batch.obs))
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

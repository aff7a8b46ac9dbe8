"""Behaviour cloning (Pomerleau, 1991).   L = E[-log π(a|s)], or of continuous actions L = E[(π(s) - a)²]

The policy that acts as the recorded one did: what algorithms that also look at rewards have to beat.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zhixing.algorithms import register
from zhixing.algorithms.common.cloning import cloning_loss, make_clone
from zhixing.config import DataConfig, NetConfig, Positive
from zhixing.core.batch import Batch
from zhixing.core.learner import Gradients, Learner
from zhixing.core.spaces import Spaces
from zhixing.nets.torso import NetFactory


class BCConfig(DataConfig):
    batch_size: Positive = 256
    likelihood: bool = False
    """Fit a normal distribution to continuous actions instead of only their mean."""
    net: NetConfig = NetConfig(hidden_sizes=[256, 256], activation="relu")


@register("bc", "behaviour cloning: acts as the recorded policy did")
class BC(Learner):
    settings = BCConfig
    metrics = ("loss", "grad_norm")

    def __init__(
        self, cfg: BCConfig, spaces: Spaces, device: torch.device | str = "cpu", net: NetFactory | None = None
    ) -> None:
        super().__init__(cfg, spaces, device)
        with self.building():
            self.actor, self.policy = make_clone(spaces, cfg, net, cfg.likelihood)
        self.actor.to(self.device)
        self.actor_optimizer = self.make_optimizer(self.actor.parameters(), cfg.lr)

    def loss(self, batch: Batch) -> Tensor:
        return cloning_loss(self.actor, batch, batch.action)

    def gradients(self, batch: Batch) -> Gradients:
        loss = self.loss(batch)
        return Gradients({"actor_optimizer": self.actor_optimizer.gradient(loss)}, {"loss": loss.detach()})

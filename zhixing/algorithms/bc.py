"""Behavior cloning (Pomerleau, 1991).   L = E[-log π(a|s)], or for continuous actions L = E[(π(s) - a)²]

The baseline of offline reinforcement learning: algorithms that use rewards should perform better.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zhixing.algorithms import register
from zhixing.algorithms.common.cloning import cloning_loss, make_clone
from zhixing.config import DataConfig, NetConfig, Positive
from zhixing.core.batch import Batch
from zhixing.core.learner import Learner, Update, train_step
from zhixing.core.spaces import Spaces
from zhixing.nets.torso import NetFactory


class BCConfig(DataConfig):
    algorithm: str = "bc"
    batch_size: Positive = 256
    likelihood: bool = False
    """Fit a normal distribution to continuous actions instead of only their mean."""
    net: NetConfig = NetConfig(hidden_sizes=[256, 256], activation="relu")


@register("bc", "behavior cloning: supervised learning of recorded actions")
class BC(Learner):
    settings = BCConfig
    metrics = ("loss", "grad_norm")

    def __init__(
        self, cfg: BCConfig, spaces: Spaces, device: torch.device | str = "cpu", net: NetFactory | None = None
    ) -> None:
        super().__init__(cfg, spaces, device)
        with self.seeded_init():
            self.actor, self.policy = make_clone(spaces, cfg, net, cfg.likelihood)
        self.actor.to(self.device)
        self.actor_optimizer = self.make_optimizer(self.actor.parameters(), cfg.lr)

    def loss(self, batch: Batch) -> Tensor:
        return cloning_loss(self.actor, batch, batch.action)

    @train_step
    def update(self, batch: Batch) -> Update:
        loss = self.loss(batch)
        return Update({"loss": loss, "grad_norm": self.actor_optimizer.step(loss)})

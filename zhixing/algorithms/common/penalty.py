"""Penalties: terms that variants of SAC add to the loss of the critics."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from zhixing.core.batch import Batch
from zhixing.nets.critics import Critics, StochasticActor


class CriticPenalty(nn.Module, ABC):
    """A term `weight · penalty(...)` of the critics' loss, whose weight may be learned."""

    @property
    @abstractmethod
    def weight(self) -> Tensor: ...

    @abstractmethod
    def forward(
        self, critics: Critics, actor: StochasticActor, batch: Batch, q: Tensor, rng: torch.Generator
    ) -> Tensor:
        """Return the penalty of each critic `[K]`. `q [K,B]` are the critics' values of the batch's actions."""

    @abstractmethod
    def weight_loss(self, penalty: Tensor) -> Tensor | None:
        """Return the loss of the weight, given the penalties `[K]`, or None if the weight is fixed."""

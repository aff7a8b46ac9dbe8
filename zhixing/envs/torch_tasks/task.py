"""What a task written in torch is: how all its copies begin, move and look, as tensors on one device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor


class Moved(NamedTuple):
    state: Tensor  # [k,N]
    reward: Tensor  # [N]
    terminated: Tensor  # [N]


class TorchTask(ABC):
    """It holds no copy itself: a state is `[k,N]`, one number of all copies side by side.

    In single precision, as observations are: Gymnasium's own versions mostly compute in double. Nothing here may look
    at the numbers in a tensor, which would wait for the device. Options have Gymnasium's names.
    """

    limit: ClassVar[int]  # steps of an episode at most
    options: ClassVar[frozenset[str]] = frozenset()

    @abstractmethod
    def first(self, num: int, rng: torch.Generator) -> Tensor:
        """States at the starts of so many episodes, `[k,N]`."""

    @abstractmethod
    def move(self, state: Tensor, action: Tensor) -> Moved:
        """One step of each copy. Actions as Gymnasium takes them: `[N]`, or `[N,1]` where they are continuous."""

    @abstractmethod
    def observe(self, state: Tensor) -> Tensor:
        """What the copies show, `[N,...]`."""


def uniform(low: float, high: float, shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
    return torch.rand(shape, generator=rng, device=rng.device).mul_(high - low).add_(low)

"""What a task written in torch is: how all its copies begin, move and look, as tensors on one device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from typing_extensions import Self


class Moved(NamedTuple):
    state: Tensor  # [k,N]
    reward: Tensor  # [N]; [N,A] of many agents
    terminated: Tensor  # [N]


class TorchEnv(ABC):
    """It holds no copy itself: a state is `[k,N]`, one number of all copies side by side.

    In single precision, as observations are: Gymnasium's own versions mostly compute in double. Nothing here may look
    at the numbers in a tensor, which would wait for the device. Options have Gymnasium's names.
    """

    limit: int  # steps of an episode at most
    ends_once: ClassVar[bool] = False  # what terminates at the limit isn't truncated, too; with Gymnasium it is
    options: ClassVar[frozenset[str]] = frozenset()
    logged_info_keys: ClassVar[tuple[str, ...]] = ()  # which of `numbers` are worth a log

    def to(self, device: torch.device) -> Self:
        """Called once, with where the copies will be: for tasks that compute with tensors of their own."""
        return self

    @abstractmethod
    def first(self, num: int, rng: torch.Generator) -> Tensor:
        """States at the starts of so many episodes, `[k,N]`."""

    @abstractmethod
    def move(self, state: Tensor, action: Tensor) -> Moved:
        """One step of each copy. Actions as Gymnasium takes them: `[N]`, or `[N,1]` where they are continuous; `[N,A]`
        of many agents."""

    @abstractmethod
    def observe(self, state: Tensor) -> dict[str, Tensor]:
        """What the copies show, `[N,...]`, by fields of a step: `obs`, and `mask`, `state`, `alive` where there are
        any."""

    def numbers(self, state: Tensor) -> dict[str, Tensor]:
        """What is told of episodes that end in these states, `[N]` each."""
        return {}


def uniform(low: float, high: float, shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
    return torch.rand(shape, generator=rng, device=rng.device).mul_(high - low).add_(low)

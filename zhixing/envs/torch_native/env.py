"""The interface of an environment written in torch: pure functions of the state of N environments."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from typing_extensions import Self


class Transition(NamedTuple):
    state: Tensor  # [k,N]
    reward: Tensor  # [N], or [N,A] with several agents
    terminated: Tensor  # [N]


class TorchEnv(ABC):
    """The dynamics of one environment, for N environments at once. The caller holds their state `[k,N]`.

    Implementations must not read values from tensors, because that synchronizes with the device. They compute in single
    precision, the precision of observations, while Gymnasium mostly computes in double. Options have Gymnasium's names.
    """

    max_episode_steps: int
    terminated_excludes_truncated: ClassVar[bool] = False
    """Whether an episode that terminates at the time limit isn't also truncated. In Gymnasium it is both."""
    options: ClassVar[frozenset[str]] = frozenset()
    logged_info_keys: ClassVar[tuple[str, ...]] = ()

    def to(self, device: torch.device) -> Self:
        """Move constant tensors to the device. Called once, before the first episode."""
        return self

    @abstractmethod
    def initial_state(self, num_envs: int, rng: torch.Generator) -> Tensor:
        """Sample states `[k,N]` at the start of an episode."""

    @abstractmethod
    def transition(self, state: Tensor, action: Tensor) -> Transition:
        """Step every environment. Actions are in Gymnasium's scale: `[N]`, `[N,1]` if continuous, `[N,A]` with several
        agents."""

    @abstractmethod
    def observe(self, state: Tensor) -> dict[str, Tensor]:
        """Return `obs` and, where the environment has them, `mask`, `state` and `alive`, each `[N,...]`."""

    def info(self, state: Tensor) -> dict[str, Tensor]:
        """Return the numbers `[N]` that `info` holds for episodes that end in these states."""
        return {}


def uniform(low: float, high: float, shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
    return torch.rand(shape, generator=rng, device=rng.device).mul_(high - low).add_(low)

"""The interface of an environment written in torch: pure functions of the state of N environments."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor

from zhixing.core.spaces import RewardKind

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

    A task of a user, `my.module:MyTask`, also sets the spaces of one environment (of one agent, if there are several).
    Its options are the parameters of its constructor. The built-in tasks have the spaces of Gymnasium's environments.
    """

    max_episode_steps: int
    """Steps after which episodes are truncated; -1 means never."""
    observation_space: gym.Space[Any]
    action_space: gym.Space[Any]
    num_agents: int = 1
    reward_kind: RewardKind = "individual"
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

    def render(self, state: Tensor) -> np.ndarray[Any, Any] | None:
        """Return an image `[H,W,3]` of uint8 of one environment's state `[k]`; None if the task has no images."""
        return None


def uniform(low: float, high: float, shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
    return torch.rand(shape, generator=rng, device=rng.device).mul_(high - low).add_(low)

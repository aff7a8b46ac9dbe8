"""Policies: from what an environment shows to what to do. They never step it and never hold an optimizer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from gymnasium.spaces import Discrete, MultiDiscrete
from torch import Tensor, nn

from zhixing.core.spaces import Spaces
from zhixing.core.tree import Tree, tree_map

if TYPE_CHECKING:
    from zhixing.envs.vector.base import VectorEnv


class Phase(Enum):
    RANDOM = "random"  # any allowed action, to fill a replay before learning
    COLLECT = "collect"  # explore
    EVAL = "eval"  # do the best


class Decision(NamedTuple):
    """What a policy decided for N environments, and what it knew then."""

    action: Tensor
    logp: Tensor | None = None
    value: Tensor | None = None
    hidden: Tree = None
    extras: Mapping[str, Tensor] = {}

    def field(self, name: str, before: Tree) -> Tree:
        """What a learner's field of this name holds of it; `before` is the memory that it was decided with."""
        if name == "hidden":
            return before
        return self.extras[name] if name in self.extras else getattr(self, name)


class Policy(nn.Module, ABC):
    def __init__(self, spaces: Spaces) -> None:
        super().__init__()
        self.spaces = spaces

    @abstractmethod
    def act(
        self, obs: Tree, hidden: Tree, mask: Tensor | None, phase: Phase, rng: torch.Generator, env_steps: int
    ) -> Decision:
        """Decide for `obs [N,...]`. `hidden` is None where the policy keeps no memory."""

    def initial_hidden(self, num: int) -> Tree:
        """The memory at the start of N episodes; None for a policy without."""
        return None

    def bind_env(self, env: VectorEnv) -> None:
        """Told by an actor which environments it acts in. Only those that look ahead need it."""

    def random_action(self, num: int, mask: Tensor | None, rng: torch.Generator) -> Tensor:
        """Uniform over what is allowed, in the policy's scale ([-1, 1] for continuous actions)."""
        space = self.spaces.action
        if isinstance(space, (Discrete, MultiDiscrete)):
            sizes = [int(space.n)] if isinstance(space, Discrete) else [int(n) for n in space.nvec.reshape(-1)]
            chance = torch.rand((num, *self.spaces.agents, sum(sizes)), generator=rng, device=rng.device)
            if mask is not None:
                chance = chance.masked_fill(~mask, -1.0)
            choices = [part.argmax(-1) for part in chance.split(sizes, -1)]
            return choices[0] if isinstance(space, Discrete) else torch.stack(choices, -1)
        return torch.rand((num, *self.spaces.agents, *space.shape), generator=rng, device=rng.device) * 2 - 1  # type: ignore[misc]


def device_of(module: nn.Module) -> torch.device:
    return next(module.parameters()).device


def as_tensor(tree: Tree, device: torch.device) -> Any:
    """Arrays of an environment as tensors; on the CPU they share memory."""
    if device.type == "cpu" and type(tree) is np.ndarray:
        return torch.from_numpy(tree)  # a quarter of as_tensor's cost
    return tree_map(lambda leaf: torch.as_tensor(leaf, device=device), tree)

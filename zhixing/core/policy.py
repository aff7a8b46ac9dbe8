"""Policies: map observations to actions. They never step an environment and never hold an optimizer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from gymnasium.spaces import Discrete
from torch import Tensor, nn

from zhixing.core.spaces import Spaces
from zhixing.core.tree import Tree, tree_map

if TYPE_CHECKING:
    from zhixing.envs.vector.base import VectorEnv


class Phase(Enum):
    RANDOM = "random"  # uniform over valid actions, to fill the replay buffer before training
    COLLECT = "collect"  # with exploration
    EVAL = "eval"  # without exploration


class Decision(NamedTuple):
    """Actions of a policy for N environments, its next hidden state, and values that a learner may store."""

    action: Tensor
    logp: Tensor | None = None
    value: Tensor | None = None
    hidden: Tree = None
    extras: Mapping[str, Tree] = {}

    def field(self, name: str, hidden_before: Tree) -> Tree:
        """Return the value to store in the field `name`. The field "hidden" stores the state before the decision."""
        if name == "hidden":
            return hidden_before
        return self.extras[name] if name in self.extras else getattr(self, name)


class Policy(nn.Module, ABC):
    """Maps observations to actions, in the policy's scale: continuous actions are in [-1, 1] if they are bounded."""

    def __init__(self, spaces: Spaces) -> None:
        super().__init__()
        self.spaces = spaces

    @abstractmethod
    def act(
        self, obs: Tree, hidden: Tree, mask: Tensor | None, phase: Phase, rng: torch.Generator, env_steps: int
    ) -> Decision:
        """Return the actions for `obs [N,...]`. `hidden [N,...]` is None for a stateless policy."""

    def initial_hidden(self, num: int) -> Tree:
        """Return the hidden state at the start of `num` episodes, or None for a stateless policy."""
        return None

    def bind_env(self, env: VectorEnv) -> None:
        """Receive the environments that the policy acts in. Called by the actor; only planning policies need it."""

    def summarize_returns(
        self, returns: np.ndarray[Any, Any], env: int, phase: Phase
    ) -> tuple[float, dict[str, float]]:
        """Return the return of an episode in environment `env`, and numbers to add to its `info`.

        `returns` are those of the agents `[A]`. The return is their mean. If rewards are opposed, which makes the mean
        meaningless, `info` gets `NAME/return` for each agent.
        """
        if not self.spaces.agents:
            return float(returns), {}
        return float(returns.mean()), dict(zip(self.logged_info_keys, returns.tolist(), strict=False))

    @property
    def logged_info_keys(self) -> tuple[str, ...]:
        """Names of the numbers that `summarize_returns` adds."""
        opposed = self.spaces.agents and self.spaces.reward_kind == "opposed"
        return tuple(f"{name}/return" for name in self.spaces.agent_names) if opposed else ()

    def random_action(self, num: int, mask: Tensor | None, rng: torch.Generator) -> Tensor:
        """Return actions drawn uniformly from the valid ones; continuous actions from [-1, 1]."""
        layout, leading = self.spaces.layout, (num, *self.spaces.agents)
        parts: list[Tensor] = []
        if layout.sizes:
            # the argmax of n independent uniform numbers is uniform over the n actions
            uniform = torch.rand((*leading, layout.mask_size), generator=rng, device=rng.device)
            if mask is not None:
                uniform = uniform.masked_fill(~mask, -1.0)
            choices = [part.argmax(-1) for part in uniform.split(layout.sizes, -1)]
            if isinstance(self.spaces.action, Discrete):
                return choices[0]
            parts.append(torch.stack(choices, -1))
        if layout.num_binary:
            shape = (*leading, layout.num_binary)
            parts.append(torch.randint(2, shape, generator=rng, device=rng.device, dtype=torch.int8))
        if layout.num_continuous:
            shape = (*leading, layout.num_continuous)
            parts.append(torch.rand(shape, generator=rng, device=rng.device) * 2 - 1)
        return torch.cat([part.float() for part in parts], -1) if self.spaces.composite else parts[0]

    def clip_action(self, action: Tensor) -> Tensor:
        """Return actions with bounded continuous parts clipped to [-1, 1]: what the environment would get."""
        if self.spaces.discrete:
            return action
        bounds = self.spaces.layout.minimum, self.spaces.layout.maximum
        low, high = (torch.as_tensor(bound, dtype=action.dtype, device=action.device) for bound in bounds)
        return action.clamp(low, high)


def device_of(module: nn.Module) -> torch.device:
    return next(module.parameters()).device


def as_tensor(tree: Tree, device: torch.device) -> Any:
    """Return a tree of arrays as tensors on `device`. On the CPU they share the arrays' memory."""
    if device.type == "cpu" and type(tree) is np.ndarray:
        return torch.from_numpy(tree)  # takes a quarter of the time of torch.as_tensor
    return tree_map(lambda leaf: torch.as_tensor(leaf, device=device), tree)

"""Heads: map features to action distributions, values and Q-values."""

from __future__ import annotations

from collections.abc import Callable

import torch
from gymnasium.spaces import Box, Discrete, MultiDiscrete
from torch import Tensor, nn

from zhixing.core.spaces import Spaces
from zhixing.errors import UserError
from zhixing.nets.mlp import init_orthogonal
from zhixing.ops.distributions import Categorical, Distribution, Gaussian, MultiCategorical


class ActionDistribution(nn.Module):
    """Maps the raw outputs of a network to a `Categorical`, `MultiCategorical` or `Gaussian` distribution.

    `outputs` is the number of raw outputs that it needs. A Gaussian has one learned std per action dimension;
    `batch_shape=(A,)` gives each of A agents its own.
    """

    def __init__(self, spaces: Spaces, log_std: float = 0.0, batch_shape: tuple[int, ...] = ()) -> None:
        super().__init__()
        space = spaces.action
        self.sizes: list[int] | None = None
        if isinstance(space, Discrete):
            self.outputs = int(space.n)
        elif isinstance(space, MultiDiscrete):
            self.sizes = [int(n) for n in space.nvec.reshape(-1)]
            self.outputs = sum(self.sizes)
        elif isinstance(space, Box) and len(space.shape) == 1:
            self.outputs = space.shape[0]
            self.log_std = nn.Parameter(torch.full((*batch_shape, self.outputs), log_std))
        else:
            raise UserError(
                f"action space {space} is not supported; use Discrete, MultiDiscrete or a one-dimensional Box"
            )
        self.kind = type(space)

    def forward(self, out: Tensor, mask: Tensor | None = None) -> Distribution:
        if self.sizes is not None:
            return MultiCategorical(out, self.sizes, mask)
        if self.kind is Discrete:
            return Categorical(out, mask)
        return Gaussian(out, self.log_std)


def policy_linear(features: int, outputs: int) -> nn.Linear:
    """Return a linear layer with small weights, so the initial policy is nearly uniform."""
    linear = nn.Linear(features, outputs)
    init_orthogonal(linear, 0.01)
    return linear


class PolicyHead(nn.Module):
    """Maps features to an action distribution."""

    def __init__(self, features: int, spaces: Spaces, log_std: float = 0.0) -> None:
        super().__init__()
        self.distribution = ActionDistribution(spaces, log_std)
        self.linear = policy_linear(features, self.distribution.outputs)

    def forward(self, features: Tensor, mask: Tensor | None = None) -> Distribution:
        return self.distribution(self.linear(features), mask)


class ValueHead(nn.Module):
    def __init__(self, features: int) -> None:
        super().__init__()
        self.linear = nn.Linear(features, 1)
        init_orthogonal(self.linear, 1.0)

    def forward(self, features: Tensor) -> Tensor:
        return self.linear(features).squeeze(-1)


class AtomsHead(nn.Module):
    """Maps features to `[B,n,atoms]`: the atoms or quantiles of a return distribution for each action."""

    def __init__(
        self, features: int, actions: int, atoms: int, linear: Callable[[int, int], nn.Module] = nn.Linear
    ) -> None:
        super().__init__()
        self.atoms = atoms
        self.linear = linear(features, actions * atoms)

    def forward(self, features: Tensor) -> Tensor:
        return self.linear(features).unflatten(-1, (-1, self.atoms))


class DuelingHead(nn.Module):
    """Q = V + A - mean A (Wang et al., 2016): `[B,n]`, or with `atoms` for each atom `[B,n,atoms]`.

    `linear` creates the layers, e.g. `NoisyLinear`.
    """

    def __init__(
        self,
        features: int,
        actions: int,
        atoms: int | None = None,
        linear: Callable[[int, int], nn.Module] = nn.Linear,
    ) -> None:
        super().__init__()
        self.atoms = atoms
        size = atoms or 1
        hidden = max(features // 2, 1)
        self.value = nn.Sequential(linear(features, hidden), nn.ReLU(), linear(hidden, size))
        self.advantage = nn.Sequential(linear(features, hidden), nn.ReLU(), linear(hidden, actions * size))

    def forward(self, features: Tensor) -> Tensor:
        value = self.value(features).unsqueeze(1)  # [B,1,atoms]
        advantage = self.advantage(features).unflatten(-1, (-1, self.atoms or 1))  # [B,n,atoms]
        q = value + advantage - advantage.mean(1, keepdim=True)
        return q if self.atoms else q.squeeze(-1)

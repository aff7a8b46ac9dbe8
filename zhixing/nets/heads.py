"""Heads: map features to action distributions, values and Q-values."""

from __future__ import annotations

from collections.abc import Callable

import torch
from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete
from torch import Tensor, nn
from torch.nn import functional as F

from zhixing.core.action_layout import ActionLayout
from zhixing.core.spaces import Spaces
from zhixing.nets.mlp import init_orthogonal
from zhixing.ops.distributions import Bernoulli, Categorical, Composite, Distribution, Gaussian, MultiCategorical


class ActionDistribution(nn.Module):
    """Maps the raw outputs of a network to a distribution of actions.

    `outputs` is the number of raw outputs that it needs. A Gaussian has one learned std per action dimension;
    `batch_shape=(A,)` gives each of A agents its own.
    """

    def __init__(self, spaces: Spaces, log_std: float = 0.0, batch_shape: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.layout, self.kind = spaces.layout, None if spaces.composite else type(spaces.action)
        self.outputs = num_outputs(self.layout)
        if self.layout.num_continuous:
            self.log_std = nn.Parameter(torch.full((*batch_shape, self.layout.num_continuous), log_std))

    def forward(self, out: Tensor, mask: Tensor | None = None) -> Distribution:
        if self.kind is Discrete:
            return Categorical(out, mask)
        if self.kind is Box:
            return Gaussian(out, self.log_std)
        if self.kind is MultiDiscrete:
            return MultiCategorical(out, self.layout.sizes, mask)
        if self.kind is MultiBinary:
            return Bernoulli(out)
        return composite_distribution(self.layout, out, mask, lambda mean: Gaussian(mean, self.log_std))


def num_outputs(layout: ActionLayout) -> int:
    """Return the number of raw outputs that parameterize the distribution of an action."""
    return layout.mask_size + layout.num_binary + layout.num_continuous


def composite_distribution(
    layout: ActionLayout, out: Tensor, mask: Tensor | None, gaussian: Callable[[Tensor], Distribution]
) -> Composite:
    """Return the distribution of composite actions; `gaussian` makes that of the continuous part from its mean.

    `mask` marks the allowed values of all choices.
    """
    makers: tuple[tuple[int, int, Callable[[Tensor], Distribution]], ...] = (
        (layout.mask_size, len(layout.sizes), lambda logits: MultiCategorical(logits, layout.sizes, mask)),
        (layout.num_binary, layout.num_binary, Bernoulli),
        (layout.num_continuous, layout.num_continuous, gaussian),
    )
    used = [maker for maker in makers if maker[0]]
    outputs = out.split([num for num, _, _ in used], -1)
    parts = [make(part) for (_, _, make), part in zip(used, outputs, strict=True)]
    return Composite(parts, [width for _, width, _ in used])


def encode_action(action: Tensor, spaces: Spaces) -> Tensor:
    """Return actions `[B,...]` as vectors `[B,n]`: choices one-hot, all other numbers clipped to their bounds."""
    layout = spaces.layout
    choices, others = len(layout.sizes), slice(len(layout.sizes), None)
    columns = action.view(len(action), -1)
    one_hot = [
        F.one_hot(a.long(), n).float() for a, n in zip(columns[:, :choices].unbind(-1), layout.sizes, strict=True)
    ]
    low, high = (
        torch.as_tensor(bound[others], dtype=torch.float32, device=action.device)
        for bound in (layout.minimum, layout.maximum)
    )
    return torch.cat([*one_hot, columns[:, others].float().clamp(low, high)], -1)


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

"""SimBa networks (Lee et al., 2024): residual blocks with layer normalization, and ensembles as one batched module.

    x₀ = W x,   xᵢ = xᵢ₋₁ + W₂ f(W₁ LN(xᵢ₋₁)),   features = LN(x_L)

The inner layer of a block has four times its width. The observations are normalized before, by their running mean and
standard deviation.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zhixing.config import NetConfig
from zhixing.errors import UserError
from zhixing.nets.mlp import ACTIVATIONS, MLP, Activation, EnsembleMLP, batched_linear, init_orthogonal

EXPANSION = 4  # inner units of a block per unit of its width


class ResidualBlocks(nn.Module, ABC):
    """The forward pass: linear layers are numbered from the embedding to the output, norms by block."""

    activation: Callable[[Tensor], Tensor]
    num_blocks: int
    has_outputs: bool

    @abstractmethod
    def linear(self, i: int, x: Tensor) -> Tensor: ...

    @abstractmethod
    def norm(self, i: int, x: Tensor) -> Tensor: ...

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(0, x)
        for i in range(self.num_blocks):
            h = h + self.linear(2 * i + 2, self.activation(self.linear(2 * i + 1, self.norm(i, h))))
        h = self.norm(self.num_blocks, h)
        return self.linear(2 * self.num_blocks + 1, h) if self.has_outputs else h


class SimBa(ResidualBlocks):
    """One network, with a block per entry of `hidden_sizes`: `x [B,n]` to `[B,features]`, or with `outputs` to that."""

    def __init__(
        self, inputs: int, hidden_sizes: Sequence[int], activation: Activation, *, outputs: int | None = None
    ) -> None:
        super().__init__()
        if len(set(hidden_sizes)) != 1:
            raise UserError(
                f"net.kind=simba needs residual blocks of one width, not hidden_sizes={list(hidden_sizes)}: give each "
                f"block the same number of units, such as net.hidden_sizes=[128,128] for two blocks"
            )
        width, self.num_blocks, self.has_outputs = hidden_sizes[0], len(hidden_sizes), outputs is not None
        linears = [nn.Linear(inputs, width)]
        init_orthogonal(linears[0], 1.0)
        for _ in hidden_sizes:
            block = [nn.Linear(width, EXPANSION * width), nn.Linear(EXPANSION * width, width)]
            for linear in block:
                nn.init.kaiming_normal_(linear.weight)
                nn.init.zeros_(linear.bias)
            linears += block
        if outputs is not None:
            linears.append(nn.Linear(width, outputs))
            init_orthogonal(linears[-1], 1.0)
        self.linears = nn.ModuleList(linears)
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(self.num_blocks + 1)])
        self.activation = ACTIVATIONS[activation]

    def linear(self, i: int, x: Tensor) -> Tensor:
        return self.linears[i](x)

    def norm(self, i: int, x: Tensor) -> Tensor:
        return self.norms[i](x)


class EnsembleSimBa(ResidualBlocks):
    """K networks of one shape, with one matrix product per layer: `x [B,n]` or `[K,B,n]` to `[K,B,features]`."""

    def __init__(self, networks: list[SimBa]) -> None:
        super().__init__()
        first = networks[0]
        self.num_networks, self.activation = len(networks), first.activation
        self.num_blocks, self.has_outputs = first.num_blocks, first.has_outputs
        linears: list[Any] = list(zip(*(network.linears for network in networks), strict=True))
        norms: list[Any] = list(zip(*(network.norms for network in networks), strict=True))
        self.weights = nn.ParameterList([torch.stack([l.weight.T for l in layer]) for layer in linears])
        self.biases = nn.ParameterList([torch.stack([l.bias for l in layer])[:, None] for layer in linears])
        self.scales = nn.ParameterList([torch.stack([n.weight for n in layer])[:, None] for layer in norms])
        self.shifts = nn.ParameterList([torch.stack([n.bias for n in layer])[:, None] for layer in norms])

    def linear(self, i: int, x: Tensor) -> Tensor:
        return batched_linear(x, self.weights[i][: len(x)], self.biases[i][: len(x)])

    def norm(self, i: int, x: Tensor) -> Tensor:
        return torch.addcmul(self.shifts[i][: len(x)], F.layer_norm(x, x.shape[-1:]), self.scales[i][: len(x)])

    def forward(self, x: Tensor, rng: torch.Generator | None = None) -> Tensor:
        return super().forward(x if x.ndim == 3 else x.expand(self.num_networks, *x.shape))

    def forward_first(self, x: Tensor) -> Tensor:
        """Run only the first network: `[B,n] -> [B,features]`."""
        return super().forward(x.unsqueeze(0)).squeeze(0)


Network = MLP | SimBa
Ensemble = EnsembleMLP | EnsembleSimBa


def make_mlp(
    cfg: NetConfig, inputs: int, outputs: int | None = None, *, hidden_sizes: Sequence[int] | None = None
) -> Network:
    """Return the fully connected network that the settings describe, or with other `hidden_sizes`."""
    sizes = cfg.hidden_sizes if hidden_sizes is None else hidden_sizes
    kind = SimBa if cfg.kind == "simba" else MLP
    return kind(inputs, sizes, cfg.activation, outputs=outputs)


def make_ensemble(networks: list[Network], layer_norm: bool = False, dropout: float = 0.0) -> Ensemble:
    """Return networks of one shape as one module.

    `layer_norm` adds it to MLPs; SimBa networks always have it. Only MLPs support `dropout`.
    """
    if isinstance(networks[0], SimBa):
        if dropout:
            raise UserError(
                f"net.kind=simba has no dropout, but critic_dropout={dropout:g}: set critic_dropout=0 or net.kind=auto"
            )
        return EnsembleSimBa(networks)  # type: ignore[arg-type]
    return EnsembleMLP(networks, layer_norm, dropout)  # type: ignore[arg-type]

"""Fully connected networks, and ensembles of them as one batched module."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Activation = Literal["tanh", "relu", "silu", "elu", "gelu"]
FAST_TANH_MIN_SIZE = 8192  # for smaller tensors the extra calls cost more than they save


class _FastTanh(torch.autograd.Function):
    """tanh(x) = 2 σ(2x) - 1, in place. torch computes σ six times as fast as tanh; the error is below 2e-7."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        y = x.mul_(2.0).sigmoid_().mul_(2.0).sub_(1.0)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return torch.ops.aten.tanh_backward.default(gradient, y)


def tanh_(x: Tensor) -> Tensor:
    """Compute tanh in place, faster than torch for large float32 tensors on the CPU."""
    if x.numel() < FAST_TANH_MIN_SIZE or not x.is_cpu or x.dtype != torch.float32:
        return torch.tanh_(x)
    return _FastTanh.apply(x)  # type: ignore[no-untyped-call]


# in place where the gradient needs only the output
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": tanh_,
    "relu": torch.relu_,
    "silu": F.silu,
    "elu": F.elu,
    "gelu": F.gelu,
}


def init_orthogonal(layer: nn.Linear | nn.Conv2d, gain: float) -> None:
    """Initialize the weights orthogonally and the biases to zero."""
    nn.init.orthogonal_(layer.weight, gain)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)


class MLP(nn.Module):
    """Hidden layers, each followed by the activation, and with `outputs` a final linear layer.

    `layer_norm` normalizes the inputs of each activation over the units of the layer, without learned weights.

    Calls functions instead of modules, because the call of a module costs as much as a small layer.
    """

    def __init__(
        self,
        inputs: int,
        hidden_sizes: Sequence[int],
        activation: Activation,
        *,
        outputs: int | None = None,
        orthogonal_init: bool = False,
        layer_norm: bool = False,
    ) -> None:
        super().__init__()
        sizes = [inputs, *hidden_sizes, *([] if outputs is None else [outputs])]
        self.linears = nn.ModuleList([nn.Linear(n, m) for n, m in pairwise(sizes)])
        if orthogonal_init:
            for linear in self.linears:
                init_orthogonal(linear, 2**0.5)  # type: ignore[arg-type]
        self.activation, self.num_hidden = ACTIVATIONS[activation], len(hidden_sizes)
        self.layer_norm = layer_norm
        self._layers = [linear._parameters for linear in self.linears]  # access is ten times as fast as attributes

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self._layers):
            x = F.linear(x, layer["weight"], layer["bias"])  # type: ignore[arg-type]
            if i < self.num_hidden:
                x = self.activation(F.layer_norm(x, x.shape[-1:]) if self.layer_norm else x)
        return x


class EnsembleMLP(nn.Module):
    """K networks of one shape, with one matrix product per layer: `x [B,n]` or `[K,B,n]` to `[K,B,features]`.

    Faster than K modules, because a small product costs more to launch than to compute. `layer_norm` normalizes the
    inputs of each activation over the units of the layer (Ba et al., 2016), without learned weights. `dropout` is the
    probability that a unit is zeroed before the normalization, in calls with an `rng`.
    """

    def __init__(self, networks: list[MLP], layer_norm: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.layer_norm, self.dropout = layer_norm, dropout
        layers: list[Any] = list(zip(*(network.linears for network in networks), strict=True))
        self.weights = nn.ParameterList([torch.stack([l.weight.T for l in layer]) for layer in layers])
        self.biases = nn.ParameterList([torch.stack([l.bias for l in layer])[:, None] for layer in layers])
        self.activation, self.num_hidden = networks[0].activation, networks[0].num_hidden
        self.num_networks = len(networks)
        self._layers = self.weights._parameters, self.biases._parameters  # a ParameterList is slow to iterate

    def forward(self, x: Tensor, rng: torch.Generator | None = None) -> Tensor:
        weights, biases = (layers.values() for layers in self._layers)
        h = x if x.ndim == 3 else x.expand(self.num_networks, *x.shape)
        for i, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
            h = batched_linear(h, weight, bias)  # type: ignore[arg-type]
            if i < self.num_hidden:
                if self.dropout and rng is not None:
                    h = dropout(h, self.dropout, rng)
                h = self.activation(F.layer_norm(h, h.shape[-1:]) if self.layer_norm else h)
        return h

    def forward_first(self, x: Tensor) -> Tensor:
        """Run only the first network: `[B,n] -> [B,features]`."""
        weights, biases = (layers.values() for layers in self._layers)
        for i, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
            x = torch.addmm(bias[0], x, weight[0])  # type: ignore[index]
            if i < self.num_hidden:
                x = self.activation(F.layer_norm(x, x.shape[-1:]) if self.layer_norm else x)
        return x


def dropout(x: Tensor, probability: float, rng: torch.Generator) -> Tensor:
    """Set elements to zero with this probability, and scale the others so the mean stays the same."""
    return x * torch.empty_like(x).bernoulli_(1 - probability, generator=rng).div_(1 - probability)


def batched_linear(x: Tensor, weights: Tensor, biases: Tensor) -> Tensor:
    """Return `[K,B,n] x [K,n,m] + [K,1,m]`. For m = 1 a sum is far faster than a matrix product."""
    if weights.shape[-1] == 1:
        return (x * weights.mT).sum(-1, keepdim=True) + biases
    return torch.baddbmm(biases, x, weights)

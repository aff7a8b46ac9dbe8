"""Fully connected networks; several equal ones as one batched module."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Activation = Literal["tanh", "relu", "silu", "elu", "gelu"]
FAST_TANH_MIN_SIZE = 8192  # numbers, for which a further call costs more than it saves


class _Tanh(torch.autograd.Function):
    """2 σ(2x) - 1, in place. torch computes σ six times as fast as tanh; the difference is below 2e-7."""

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
    if x.numel() < FAST_TANH_MIN_SIZE or not x.is_cpu or x.dtype != torch.float32:
        return torch.tanh_(x)
    return _Tanh.apply(x)  # type: ignore[no-untyped-call]


# in place where the gradient needs only the result
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": tanh_,
    "relu": torch.relu_,
    "silu": F.silu,
    "elu": F.elu,
    "gelu": F.gelu,
}


def init_orthogonal(layer: nn.Linear | nn.Conv2d, gain: float) -> None:
    nn.init.orthogonal_(layer.weight, gain)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)


class MLP(nn.Module):
    """Linear layers, each followed by the activation; with `outputs`, one more without.

    Plain functions instead of modules in a row: calling a module costs as much as a small layer.
    """

    def __init__(
        self,
        inputs: int,
        hidden_sizes: Sequence[int],
        activation: Activation,
        *,
        outputs: int | None = None,
        orthogonal_init: bool = False,
    ) -> None:
        super().__init__()
        sizes = [inputs, *hidden_sizes, *([] if outputs is None else [outputs])]
        self.linears = nn.ModuleList([nn.Linear(n, m) for n, m in pairwise(sizes)])
        if orthogonal_init:
            for linear in self.linears:
                init_orthogonal(linear, 2**0.5)  # type: ignore[arg-type]
        self.activation, self.activated = ACTIVATIONS[activation], len(hidden_sizes)
        self._layers = [linear._parameters for linear in self.linears]  # a tenth of the cost of a module's attributes

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self._layers):
            x = F.linear(x, layer["weight"], layer["bias"])  # type: ignore[arg-type]
            if i < self.activated:
                x = self.activation(x)
        return x


class EnsembleMLP(nn.Module):
    """K networks of one shape in one matrix product per layer: `x [B,n] or [K,B,n] -> [K,B,features]`.

    Faster than K modules since each small product costs more to start than to compute. `normed` brings what is
    activated to zero mean and unit spread over a layer's units (Ba et al., 2016), without further weights.
    """

    def __init__(self, copies: list[MLP], normed: bool = False) -> None:
        super().__init__()
        self.normed = normed
        layers: list[Any] = list(zip(*(copy.linears for copy in copies), strict=True))
        self.weights = nn.ParameterList([torch.stack([l.weight.T for l in same]) for same in layers])
        self.biases = nn.ParameterList([torch.stack([l.bias for l in same])[:, None] for same in layers])
        self.activation, self.activated, self.copies = copies[0].activation, copies[0].activated, len(copies)
        self._layers = self.weights._parameters, self.biases._parameters  # a ParameterList is slow to walk

    def forward(self, x: Tensor) -> Tensor:
        weights, biases = (layers.values() for layers in self._layers)
        h = x if x.ndim == 3 else x.expand(self.copies, *x.shape)
        for i, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
            h = _products(h, weight, bias)  # type: ignore[arg-type]
            if i < self.activated:
                h = self.activation(F.layer_norm(h, h.shape[-1:]) if self.normed else h)
        return h

    def forward_first(self, x: Tensor) -> Tensor:
        """Of the first network alone: `[B,n] -> [B,features]`."""
        weights, biases = (layers.values() for layers in self._layers)
        for i, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
            x = torch.addmm(bias[0], x, weight[0])  # type: ignore[index]
            if i < self.activated:
                x = self.activation(F.layer_norm(x, x.shape[-1:]) if self.normed else x)
        return x


def _products(x: Tensor, weights: Tensor, biases: Tensor) -> Tensor:
    """`[K,B,n] x [K,n,m] + [K,1,m]`. Matrices of one column are far quicker without a library that expects more."""
    if weights.shape[-1] == 1:
        return (x * weights.mT).sum(-1, keepdim=True) + biases
    return torch.baddbmm(biases, x, weights)

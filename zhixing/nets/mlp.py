"""Fully connected networks; several equal ones as one batched module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

Activation = Literal["tanh", "relu", "silu", "elu", "gelu"]
ACTIVATIONS: dict[str, type[nn.Module]] = {
    "tanh": nn.Tanh,
    "relu": nn.ReLU,
    "silu": nn.SiLU,
    "elu": nn.ELU,
    "gelu": nn.GELU,
}


def orthogonal(layer: nn.Linear | nn.Conv2d, gain: float) -> None:
    nn.init.orthogonal_(layer.weight, gain)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)


def mlp(inputs: int, hidden_sizes: Sequence[int], activation: Activation, orthogonal_init: bool) -> nn.Sequential:
    """Linear layers, each followed by the activation; the output has `hidden_sizes[-1]` features."""
    layers: list[nn.Module] = []
    for size in hidden_sizes:
        linear = nn.Linear(inputs, size)
        if orthogonal_init:
            orthogonal(linear, 2**0.5)
        layers += [linear, ACTIVATIONS[activation]()]
        inputs = size
    return nn.Sequential(*layers)


class TwinMLP(nn.Module):
    """K networks of one shape in one matrix product per layer: `x [B,n] or [K,B,n] -> [K,B,features]`.

    Faster than K modules since each small product costs more to start than to compute.
    """

    def __init__(self, copies: list[nn.Sequential]) -> None:
        super().__init__()
        linears = [[layer for layer in copy if isinstance(layer, nn.Linear)] for copy in copies]
        layers = list(zip(*linears, strict=True))
        self.weights = nn.ParameterList([torch.stack([l.weight.T for l in same]) for same in layers])
        self.biases = nn.ParameterList([torch.stack([l.bias for l in same])[:, None] for same in layers])
        # one activation after each layer, but for a linear output
        self.activations = nn.ModuleList([layer for layer in copies[0] if not isinstance(layer, nn.Linear)])

    def forward(self, x: Tensor) -> Tensor:
        h = x if x.ndim == 3 else x.expand(self.weights[0].shape[0], *x.shape)
        for i, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            h = torch.baddbmm(bias, h, weight)  # [K,B,features]
            if i < len(self.activations):
                h = self.activations[i](h)
        return h

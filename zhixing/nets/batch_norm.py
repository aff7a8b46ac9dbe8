"""Batch renormalization, and ensembles of networks that normalize their inputs and hidden layers with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zhixing.nets.mlp import batched_linear
from zhixing.nets.simba import Network, SimBa

MOMENTUM, EPSILON = 0.99, 1e-3
MAX_SCALE, MAX_SHIFT = 3.0, 5.0  # bounds of r and d


class BatchRenorm(nn.Module):
    """Batch renormalization (Ioffe, 2017) of `x [K,B,n]` over the batch, for each of K networks.

        y = scale · ((x - μ_B) / σ_B · r + d) + shift,   r = clip(σ_B / σ),   d = clip((μ_B - μ) / σ)

    μ_B and σ_B are those of the batch, μ and σ the running averages, which normalize if `train` is false. r and d have
    no gradient. In the first `warmup` batches r = 1 and d = 0, as in batch normalization.
    """

    mean: Tensor
    var: Tensor
    batches: Tensor

    def __init__(self, num_networks: int, features: int, warmup: int) -> None:
        super().__init__()
        shape = (num_networks, 1, features)
        self.warmup = warmup
        self.scale, self.shift = nn.Parameter(torch.ones(shape)), nn.Parameter(torch.zeros(shape))
        self.register_buffer("mean", torch.zeros(shape))
        self.register_buffer("var", torch.ones(shape))
        self.register_buffer("batches", torch.zeros(()))

    def forward(self, x: Tensor, train: bool) -> Tensor:
        if not train:
            return torch.addcmul(self.shift, (x - self.mean) * torch.rsqrt(self.var + EPSILON), self.scale)
        x = x.float()  # with precision=bf16, statistics would have three digits
        var, mean = torch.var_mean(x, -2, correction=0, keepdim=True)
        std = (var + EPSILON).sqrt()
        r, d = self._correction(mean.detach(), std.detach())
        self._update(mean.detach(), var.detach())
        return torch.addcmul(self.shift, (x - mean) * (r / std) + d, self.scale)

    def _correction(self, mean: Tensor, std: Tensor) -> tuple[Tensor, Tensor]:
        running_std = (self.var + EPSILON).sqrt()
        r = (std / running_std).clamp(1 / MAX_SCALE, MAX_SCALE)
        d = ((mean - self.mean) / running_std).clamp(-MAX_SHIFT, MAX_SHIFT)
        is_warm = self.batches >= self.warmup
        return torch.where(is_warm, r, 1.0), torch.where(is_warm, d, 0.0)

    @torch.no_grad()
    def _update(self, mean: Tensor, var: Tensor) -> None:
        self.mean.lerp_(mean, 1 - MOMENTUM)
        self.var.lerp_(var, 1 - MOMENTUM)
        self.batches += 1


class BatchNormTowers(nn.Module):
    """K networks with batch renormalization as one batched module: `x [B,n]` to `[K,B,outputs]`.

    MLPs normalize their inputs and the outputs of each activation. SimBa networks normalize their inputs and have it in
    place of layer normalization.
    """

    def __init__(self, networks: Sequence[Network], warmup: int) -> None:
        super().__init__()
        first = networks[0]
        self.residual, self.activation = isinstance(first, SimBa), first.activation
        layers: list[Any] = list(zip(*(network.linears for network in networks), strict=True))
        self.weights = nn.ParameterList([torch.stack([l.weight.T for l in layer]) for layer in layers])
        self.biases = nn.ParameterList([torch.stack([l.bias for l in layer])[:, None] for layer in layers])
        # of the inputs, and of every input of a block or a layer that isn't the first layer of the network
        inputs = [weight.shape[1] for weight in self.weights]
        widths = [inputs[0], *(inputs[1::2] if self.residual else inputs[1:])]
        self.norms = nn.ModuleList([BatchRenorm(len(networks), width, warmup) for width in widths])

    def forward(self, x: Tensor, train: bool) -> Tensor:
        first, *norms = self.norms
        h = self.linear(0, first(x.expand(len(self.weights[0]), *x.shape), train))
        for i, norm in enumerate(norms):
            if not self.residual:
                h = self.linear(i + 1, norm(self.activation(h), train))
            elif i < len(norms) - 1:
                inner = self.activation(self.linear(2 * i + 1, norm(h, train)))
                h = h + self.linear(2 * i + 2, inner)
            else:
                h = self.linear(-1, norm(h, train))
        return h

    def linear(self, i: int, x: Tensor) -> Tensor:
        return batched_linear(x, self.weights[i], self.biases[i])

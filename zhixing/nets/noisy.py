"""Noisy networks (Fortunato et al., 2018).   w = μ + σ · ε,   ε = f(ε_out) f(ε_in)ᵀ

The noise is factorized and shared by a whole batch. Only `resample` draws it. It is not saved: callers resample or zero
it before each use.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class NoisyLinear(nn.Module):
    """A linear layer with learned noise on its weights. The noise is zero until `resample`."""

    noise_in: Tensor
    noise_out: Tensor

    def __init__(self, inputs: int, outputs: int, sigma_init: float = 0.5) -> None:
        super().__init__()
        bound = inputs**-0.5
        self.weight = nn.Parameter(torch.empty(outputs, inputs).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(outputs).uniform_(-bound, bound))
        self.weight_sigma = nn.Parameter(torch.full((outputs, inputs), sigma_init * bound))
        self.bias_sigma = nn.Parameter(torch.full((outputs,), sigma_init * bound))
        self.register_buffer("noise_in", torch.zeros(inputs), persistent=False)
        self.register_buffer("noise_out", torch.zeros(outputs), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.outer(self.noise_out, self.noise_in)
        weight = torch.addcmul(self.weight, self.weight_sigma, noise)
        return F.linear(x, weight, torch.addcmul(self.bias, self.bias_sigma, self.noise_out))


def is_noisy(module: nn.Module) -> bool:
    return bool(_noise_buffers(module))


def resample(module: nn.Module, rng: torch.Generator) -> None:
    """Draw new noise for all noisy layers of a module."""
    noises = _noise_buffers(module)
    normal = torch.randn(sum(map(len, noises)), generator=rng, device=rng.device)
    scaled = normal.sign() * normal.abs().sqrt()  # f(x) = sign(x) sqrt(|x|)
    for noise, new in zip(noises, scaled.split([len(noise) for noise in noises]), strict=True):
        noise.copy_(new)


def zero_noise(module: nn.Module) -> None:
    """Set the noise to zero, so the layers use their mean weights."""
    for noise in _noise_buffers(module):
        noise.zero_()


def _noise_buffers(module: nn.Module) -> list[Tensor]:
    layers = [layer for layer in module.modules() if isinstance(layer, NoisyLinear)]
    return [noise for layer in layers for noise in (layer.noise_in, layer.noise_out)]

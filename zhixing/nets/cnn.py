"""Convolutional networks for images `[B,C,H,W]` or `[B,H,W,C]`, bytes or floats in 0..255."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from zhixing.errors import UserError
from zhixing.nets.mlp import init_orthogonal

CnnKind = Literal["auto", "nature", "small", "simple"]


class CNNSpec(NamedTuple):
    convolutions: list[tuple[int, int, int, int]]  # channels, kernel size, stride, padding
    features: int  # units of the final fully connected layer


CNN_SPECS: dict[CnnKind, CNNSpec] = {
    "nature": CNNSpec([(32, 8, 4, 0), (64, 4, 2, 0), (64, 3, 1, 0)], 512),  # Mnih et al. (2015)
    "small": CNNSpec([(16, 8, 4, 0), (32, 4, 2, 0)], 256),  # Mnih et al. (2013): takes a third of the time
    "simple": CNNSpec([(32, 3, 2, 1)] * 4, 512),
}


NATURE_MIN_PIXELS = 36  # smaller images leave no pixels for the last convolution


class CNN(nn.Module):
    """Convolutions and a fully connected layer, as given in `CNN_SPECS`."""

    def __init__(self, shape: tuple[int, ...], kind: CnnKind = "auto") -> None:
        super().__init__()
        # the channels are the smaller of the first and the last dimension
        self.channels_last = shape[-1] < shape[0]
        channels, height, width = (shape[-1], *shape[:2]) if self.channels_last else shape
        if kind == "auto":
            kind = "nature" if min(height, width) >= NATURE_MIN_PIXELS else "simple"
        spec = CNN_SPECS[kind]
        layers: list[nn.Module] = []
        for out, kernel, stride, padding in spec.convolutions:
            height, width = ((n + 2 * padding - kernel) // stride + 1 for n in (height, width))
            conv = nn.Conv2d(channels, out, kernel, stride, padding)
            init_orthogonal(conv, 2**0.5)
            layers += [conv, nn.ReLU()]
            channels = out
        if height < 1 or width < 1:
            raise UserError(f"images of shape {shape} are too small for net.cnn={kind}; try net.cnn=simple")
        linear = nn.Linear(channels * height * width, spec.features)
        init_orthogonal(linear, 2**0.5)
        self.layers = nn.Sequential(*layers, nn.Flatten(), linear, nn.ReLU())
        self.layers.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, x: Tensor) -> Tensor:
        if self.channels_last:
            x = x.movedim(-1, -3)
        x = x.float().mul(1 / 255).contiguous(memory_format=torch.channels_last)
        return self.layers(x)

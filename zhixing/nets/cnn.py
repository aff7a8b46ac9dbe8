"""Networks for images `[B,C,H,W]` or `[B,H,W,C]`, bytes or floats in 0..255."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from zhixing.errors import UserError
from zhixing.nets.mlp import init_orthogonal

CnnKind = Literal["auto", "nature", "small", "simple"]


class Plan(NamedTuple):
    convolutions: list[tuple[int, int, int, int]]  # channels, size, stride, padding
    units: int  # of the layer behind them


PLANS: dict[CnnKind, Plan] = {
    "nature": Plan([(32, 8, 4, 0), (64, 4, 2, 0), (64, 3, 1, 0)], 512),  # Mnih et al. (2015)
    "small": Plan([(16, 8, 4, 0), (32, 4, 2, 0)], 256),  # Mnih et al. (2013): a third of the time
    "simple": Plan([(32, 3, 2, 1)] * 4, 512),
}


NATURE_PIXELS = 36  # fewer leave nothing for its last convolution


class CNN(nn.Module):
    """Convolutions and a fully connected layer, as `PLANS` has them."""

    def __init__(self, shape: tuple[int, ...], kind: CnnKind = "auto") -> None:
        super().__init__()
        # the smallest of the outer dimensions holds the channels
        self.channels_last = shape[-1] < shape[0]
        channels, height, width = (shape[-1], *shape[:2]) if self.channels_last else shape
        if kind == "auto":
            kind = "nature" if min(height, width) >= NATURE_PIXELS else "simple"
        plan = PLANS[kind]
        layers: list[nn.Module] = []
        for out, size, stride, padding in plan.convolutions:
            height, width = ((n + 2 * padding - size) // stride + 1 for n in (height, width))
            conv = nn.Conv2d(channels, out, size, stride, padding)
            init_orthogonal(conv, 2**0.5)
            layers += [conv, nn.ReLU()]
            channels = out
        if height < 1 or width < 1:
            raise UserError(f"images of shape {shape} are too small for net.cnn={kind} (try net.cnn=simple)")
        linear = nn.Linear(channels * height * width, plan.units)
        init_orthogonal(linear, 2**0.5)
        self.layers = nn.Sequential(*layers, nn.Flatten(), linear, nn.ReLU())
        self.layers.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, x: Tensor) -> Tensor:
        if self.channels_last:
            x = x.movedim(-1, -3)
        x = x.float().mul(1 / 255).contiguous(memory_format=torch.channels_last)
        return self.layers(x)

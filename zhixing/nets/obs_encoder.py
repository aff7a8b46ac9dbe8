"""What a model of the world sees and shows: observations as numbers and pictures, into features and back."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any, NamedTuple

import gymnasium as gym
import torch
from gymnasium.spaces import Dict
from torch import Tensor, nn
from torch.nn import functional as F

from zhixing.config import NetConfig
from zhixing.core.tree import Tree
from zhixing.errors import UserError
from zhixing.nets.mlp import ACTIVATIONS, Activation
from zhixing.nets.rssm import LayerNormMLP
from zhixing.nets.torso import Encoder, is_image, num_features
from zhixing.ops.symlog import symlog

SMALLEST = 4  # side of what convolutions leave of a picture, at most


class ObsTensors(NamedTuple):
    """Observations `[B,...]` as networks take them: all numbers in one vector `[B,n]`, and pictures in 0..1."""

    numbers: Tensor
    images: tuple[Tensor, ...]  # [B,C,H,W] each

    def drop_first(self, rows: int) -> ObsTensors:
        """All but the first so many rows."""
        return ObsTensors(self.numbers[rows:], tuple(picture[rows:] for picture in self.images))


class ObsPreprocessor(nn.Module):
    """Observations to `ObsTensors`: numbers on the scale of symlog, choices one-hot, bytes of pictures as floats."""

    def __init__(self, space: gym.Space[Any]) -> None:
        super().__init__()
        leaves = _leaves(space)
        self.seen = [path for path, part in leaves if is_image(part)]
        self.shapes = [_channels_first(tuple(part.shape or ())) for _, part in leaves if is_image(part)]
        numbers = [(path, part) for path, part in leaves if not is_image(part)]
        self.read = [path for path, _ in numbers]
        self.parts = nn.ModuleList([Encoder(part, "simple", normalize=False) for _, part in numbers])
        self.num_numbers = sum(num_features(net, part) for net, (_, part) in zip(self.parts, numbers, strict=True))

    def forward(self, obs: Tree) -> ObsTensors:
        pictures = tuple(_as_floats(_at(obs, path)) for path in self.seen)
        numbers = [net(_at(obs, path)) for net, path in zip(self.parts, self.read, strict=True)]
        if not numbers:
            numbers = [pictures[0].new_zeros(len(pictures[0]), 0)]
        return ObsTensors(symlog(numbers[0] if len(numbers) == 1 else torch.cat(numbers, -1)), pictures)


def _leaves(space: gym.Space[Any], path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], gym.Space[Any]]]:
    if not isinstance(space, Dict):
        return [(path, space)]
    return [leaf for key, part in space.spaces.items() for leaf in _leaves(part, (*path, key))]


def _at(obs: Tree, path: tuple[str, ...]) -> Tree:
    for key in path:
        obs = obs[key]
    return obs


def _channels_first(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The smallest of the outer dimensions holds the channels."""
    return (shape[-1], *shape[:2]) if shape[-1] < shape[0] else shape


def _as_floats(picture: Tensor) -> Tensor:
    if picture.shape[-1] < picture.shape[1]:
        picture = picture.movedim(-1, 1)
    return picture.float().mul(1 / 255).contiguous(memory_format=torch.channels_last)


class _NormedChannels(nn.Module):
    """Normalises the channels of each pixel, then activates."""

    def __init__(self, channels: int, activation: Activation) -> None:
        super().__init__()
        self.norm, self.activation = nn.LayerNorm(channels, eps=1e-3), ACTIVATIONS[activation]

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.norm(x.permute(0, 2, 3, 1))).permute(0, 3, 1, 2)


class ImageEncoder(nn.Module):
    """Convolutions that halve a picture and double its channels, from `depth` on, until a side is 4 or less."""

    def __init__(self, shape: tuple[int, ...], depth: int, activation: Activation) -> None:
        super().__init__()
        self.channels, self.sides = [shape[0]], [shape[1:]]
        if min(shape[1:]) < 2:
            raise UserError(f"pictures of shape {shape} are too small for convolutions; make them numbers, not bytes")
        layers: list[nn.Module] = []
        while min(self.sides[-1]) > SMALLEST or not layers:
            out = depth * 2 ** (len(self.sides) - 1)
            layers += [nn.Conv2d(self.channels[-1], out, 4, 2, 1, bias=False), _NormedChannels(out, activation)]
            self.channels.append(out)
            self.sides.append(tuple(n // 2 for n in self.sides[-1]))
        self.layers = nn.Sequential(*layers, nn.Flatten())
        self.layers.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.outputs = self.channels[-1] * math.prod(self.sides[-1])

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class ImageDecoder(nn.Module):
    """The way back of a `ImageEncoder`: features to a picture `[B,C,H,W]`, dark at first.

    Each pixel becomes two by two, by one matrix: on a CPU a tenth of the cost of transposed convolutions, whose overlap
    isn't needed where the first layer sees everything.
    """

    def __init__(self, features: int, encoder: ImageEncoder, activation: Activation) -> None:
        super().__init__()
        self.side, times = encoder.sides[0], len(encoder.sides) - 1
        smallest = [-(-n // 2**times) for n in self.side]  # doubled so often, at least the picture: the rest is cut off
        channels = encoder.channels[::-1]
        self.enter = nn.Linear(features, channels[0] * math.prod(smallest), bias=False)
        self.smallest = (*smallest, channels[0])
        self.norms = nn.ModuleList([nn.LayerNorm(n, eps=1e-3) for n in channels[:-1]])
        self.doublings = nn.ModuleList([nn.Linear(n, 4 * m) for n, m in pairwise(channels)])
        self.activation = ACTIVATIONS[activation]

    def forward(self, features: Tensor) -> Tensor:
        x = self.enter(features).unflatten(-1, self.smallest)  # [B,H,W,C], the channels last
        for norm, double in zip(self.norms, self.doublings, strict=True):
            x = double(self.activation(norm(x))).unflatten(-1, (2, 2, -1))
            x = x.transpose(2, 3).flatten(3, 4).flatten(1, 2)  # from [B,H,W,2,2,C]
        height, width = self.side
        return x[:, :height, :width].permute(0, 3, 1, 2)


class ObsEncoder(nn.Module):
    """`ObsTensors` to features `[B,outputs]`."""

    def __init__(self, preprocessor: ObsPreprocessor, net: NetConfig, depth: int) -> None:
        super().__init__()
        self.images = [ImageEncoder(shape, depth, net.activation) for shape in preprocessor.shapes]
        self.numbers = (
            LayerNormMLP(preprocessor.num_numbers, net.hidden_sizes, net.activation)
            if preprocessor.num_numbers
            else None
        )
        self.parts = nn.ModuleList(self.images)
        self.outputs = sum(part.outputs for part in self.images)
        self.outputs += 0 if self.numbers is None else self.numbers.outputs

    def forward(self, sight: ObsTensors) -> Tensor:
        parts = [net(picture) for net, picture in zip(self.images, sight.images, strict=True)]
        if self.numbers is not None:
            parts.append(self.numbers(sight.numbers))
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


class ObsDecoder(nn.Module):
    """Features `[B,n]` to what `ObsTensors` they stand for."""

    def __init__(self, features: int, preprocessor: ObsPreprocessor, encoder: ObsEncoder, net: NetConfig) -> None:
        super().__init__()
        size = preprocessor.num_numbers
        self.images = nn.ModuleList([ImageDecoder(features, part, net.activation) for part in encoder.images])
        self.numbers = LayerNormMLP(features, net.hidden_sizes, net.activation, size) if size else None

    def forward(self, features: Tensor) -> ObsTensors:
        numbers = features.new_zeros(len(features), 0) if self.numbers is None else self.numbers(features)
        return ObsTensors(numbers, tuple(net(features) for net in self.images))

    def loss(self, features: Tensor, sight: ObsTensors) -> Tensor:
        """Squared errors of all that was seen, `[B]`."""
        told = self(features)
        pairs = zip((told.numbers, *told.images), (sight.numbers, *sight.images), strict=True)
        return torch.stack([F.mse_loss(a, b, reduction="none").flatten(1).sum(-1) for a, b in pairs]).sum(0)

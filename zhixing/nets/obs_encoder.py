"""Encoders and decoders of world models: map observations, split into a vector and images, to features and back."""

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

MAX_FINAL_SIDE = 4  # convolutions halve an image until its shorter side is at most this


class ObsTensors(NamedTuple):
    """Observations `[B,...]` as inputs of networks: all numbers in one vector `[B,n]`, and images in 0..1."""

    vector: Tensor
    images: tuple[Tensor, ...]  # [B,C,H,W] each

    def drop_first(self, rows: int) -> ObsTensors:
        """Return all but the first `rows` rows."""
        return ObsTensors(self.vector[rows:], tuple(image[rows:] for image in self.images))


class ObsPreprocessor(nn.Module):
    """Converts observations to `ObsTensors`: symlog of numbers, discrete values one-hot, images scaled to 0..1."""

    def __init__(self, space: gym.Space[Any]) -> None:
        super().__init__()
        leaves = _leaves(space)
        self.image_paths = [path for path, part in leaves if is_image(part)]
        self.image_shapes = [_channels_first(tuple(part.shape or ())) for _, part in leaves if is_image(part)]
        vectors = [(path, part) for path, part in leaves if not is_image(part)]
        self.vector_paths = [path for path, _ in vectors]
        self.parts = nn.ModuleList([Encoder(part, "simple", normalize=False) for _, part in vectors])
        self.vector_size = sum(num_features(net, part) for net, (_, part) in zip(self.parts, vectors, strict=True))

    def forward(self, obs: Tree) -> ObsTensors:
        images = tuple(_to_float_image(_get(obs, path)) for path in self.image_paths)
        vectors = [net(_get(obs, path)) for net, path in zip(self.parts, self.vector_paths, strict=True)]
        if not vectors:
            vectors = [images[0].new_zeros(len(images[0]), 0)]
        return ObsTensors(symlog(vectors[0] if len(vectors) == 1 else torch.cat(vectors, -1)), images)


def _leaves(space: gym.Space[Any], path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], gym.Space[Any]]]:
    if not isinstance(space, Dict):
        return [(path, space)]
    return [leaf for key, part in space.spaces.items() for leaf in _leaves(part, (*path, key))]


def _get(obs: Tree, path: tuple[str, ...]) -> Tree:
    for key in path:
        obs = obs[key]
    return obs


def _channels_first(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape as C,H,W. The channels are the smaller of the first and the last dimension."""
    return (shape[-1], *shape[:2]) if shape[-1] < shape[0] else shape


def _to_float_image(image: Tensor) -> Tensor:
    if image.shape[-1] < image.shape[1]:
        image = image.movedim(-1, 1)
    return image.float().mul(1 / 255).contiguous(memory_format=torch.channels_last)


class _ChannelNorm(nn.Module):
    """Layer norm over the channels of each pixel, followed by an activation."""

    def __init__(self, channels: int, activation: Activation) -> None:
        super().__init__()
        self.norm, self.activation = nn.LayerNorm(channels, eps=1e-3), ACTIVATIONS[activation]

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.norm(x.permute(0, 2, 3, 1))).permute(0, 3, 1, 2)


class ImageEncoder(nn.Module):
    """Convolutions that halve an image and double its channels, starting at `depth`, until a side is 4 or less."""

    def __init__(self, shape: tuple[int, ...], depth: int, activation: Activation) -> None:
        super().__init__()
        self.channels, self.sides = [shape[0]], [shape[1:]]
        if min(shape[1:]) < 2:
            raise UserError(
                f"images of shape {shape} are too small for convolutions; both sides must have at least 2 pixels. "
                f"Use a float Box instead of a uint8 image"
            )
        layers: list[nn.Module] = []
        while min(self.sides[-1]) > MAX_FINAL_SIDE or not layers:
            out = depth * 2 ** (len(self.sides) - 1)
            layers += [nn.Conv2d(self.channels[-1], out, 4, 2, 1, bias=False), _ChannelNorm(out, activation)]
            self.channels.append(out)
            self.sides.append(tuple(n // 2 for n in self.sides[-1]))
        self.layers = nn.Sequential(*layers, nn.Flatten())
        self.layers.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.outputs = self.channels[-1] * math.prod(self.sides[-1])

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class ImageDecoder(nn.Module):
    """Inverse of `ImageEncoder`: maps features to an image `[B,C,H,W]`, nearly black at initialization.

    Each layer maps a pixel to 2 x 2 pixels by one matrix. On a CPU this takes a tenth of the time of transposed
    convolutions. Their overlap is not needed, because the first layer is fully connected.
    """

    def __init__(self, features: int, encoder: ImageEncoder, activation: Activation) -> None:
        super().__init__()
        self.side, num_doublings = encoder.sides[0], len(encoder.sides) - 1
        start = [-(-n // 2**num_doublings) for n in self.side]  # rounded up; `forward` crops the result
        channels = encoder.channels[::-1]
        self.input_layer = nn.Linear(features, channels[0] * math.prod(start), bias=False)
        self.start_shape = (*start, channels[0])
        self.norms = nn.ModuleList([nn.LayerNorm(n, eps=1e-3) for n in channels[:-1]])
        self.doublings = nn.ModuleList([nn.Linear(n, 4 * m) for n, m in pairwise(channels)])
        self.activation = ACTIVATIONS[activation]

    def forward(self, features: Tensor) -> Tensor:
        x = self.input_layer(features).unflatten(-1, self.start_shape)  # [B,H,W,C]
        for norm, double in zip(self.norms, self.doublings, strict=True):
            x = double(self.activation(norm(x))).unflatten(-1, (2, 2, -1))
            x = x.transpose(2, 3).flatten(3, 4).flatten(1, 2)  # from [B,H,W,2,2,C]
        height, width = self.side
        return x[:, :height, :width].permute(0, 3, 1, 2)


class ObsEncoder(nn.Module):
    """Maps `ObsTensors` to features `[B,outputs]`."""

    def __init__(self, preprocessor: ObsPreprocessor, net: NetConfig, depth: int) -> None:
        super().__init__()
        self.image_nets = [ImageEncoder(shape, depth, net.activation) for shape in preprocessor.image_shapes]
        size = preprocessor.vector_size
        self.vector_net = LayerNormMLP(size, net.hidden_sizes, net.activation) if size else None
        self.parts = nn.ModuleList(self.image_nets)
        self.outputs = sum(part.outputs for part in self.image_nets)
        self.outputs += 0 if self.vector_net is None else self.vector_net.outputs

    def forward(self, obs: ObsTensors) -> Tensor:
        parts = [net(image) for net, image in zip(self.image_nets, obs.images, strict=True)]
        if self.vector_net is not None:
            parts.append(self.vector_net(obs.vector))
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


class ObsDecoder(nn.Module):
    """Reconstructs `ObsTensors` from features `[B,n]`."""

    def __init__(self, features: int, preprocessor: ObsPreprocessor, encoder: ObsEncoder, net: NetConfig) -> None:
        super().__init__()
        size = preprocessor.vector_size
        self.image_nets = nn.ModuleList([ImageDecoder(features, part, net.activation) for part in encoder.image_nets])
        self.vector_net = LayerNormMLP(features, net.hidden_sizes, net.activation, size) if size else None

    def forward(self, features: Tensor) -> ObsTensors:
        vector = features.new_zeros(len(features), 0) if self.vector_net is None else self.vector_net(features)
        return ObsTensors(vector, tuple(net(features) for net in self.image_nets))

    def loss(self, features: Tensor, obs: ObsTensors) -> Tensor:
        """Return the summed squared reconstruction error `[B]`."""
        decoded = self(features)
        pairs = zip((decoded.vector, *decoded.images), (obs.vector, *obs.images), strict=True)
        return torch.stack([F.mse_loss(a, b, reduction="none").flatten(1).sum(-1) for a, b in pairs]).sum(0)

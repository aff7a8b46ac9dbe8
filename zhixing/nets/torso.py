"""Torsos: networks that map observations to features. Learners add heads.

A torso is any `nn.Module`: `net(obs) -> features [B,n]`, or recurrent `net(obs, hidden) -> (features, hidden)`. Hidden
states are tensors or tuples of tensors `[B,...]`; `None` and zeros both stand for the start of an episode.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from itertools import pairwise
from operator import itemgetter
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete
from torch import Tensor, nn
from torch.nn import functional as F

from zhixing.config import BUILT_IN_NETS, Auto, NetConfig
from zhixing.core.spaces import space_fields
from zhixing.core.tree import Field, Tree, tree_map
from zhixing.errors import UserError
from zhixing.nets.cnn import CNN, CnnKind
from zhixing.nets.mlp import MLP
from zhixing.nets.simba import SimBa
from zhixing.ops.normalize import RunningNorm
from zhixing.utils.importing import import_object

NetFactory = Callable[[gym.Space[Any]], nn.Module]


class Encoder(nn.Module):
    """Encodes any observation as a flat vector: discrete values one-hot, images by a CNN, everything else flattened."""

    def __init__(self, space: gym.Space[Any], cnn: CnnKind, normalize: bool) -> None:
        super().__init__()
        self.space = space
        self.parts = nn.ModuleDict()
        self.norm: RunningNorm | None = None
        self.image: CNN | None = None
        if isinstance(space, Dict):
            self.parts.update({_module_name(key): Encoder(part, cnn, normalize) for key, part in space.items()})
        elif is_image(space):
            self.image = CNN(tuple(space.shape or ()), cnn)
        elif normalize and isinstance(space, Box):
            self.norm = RunningNorm((int(torch.Size(space.shape).numel()),))
        # callers skip the encoder for float vectors: calling a module costs as much as a small layer
        self.plain = (
            isinstance(space, Box) and len(space.shape) == 1 and space.dtype == np.float32 and self.norm is None
        )

    def forward(self, obs: Tree) -> Tensor:
        if isinstance(self.space, Dict):
            return torch.cat([self.parts[_module_name(key)](obs[key]) for key in self.space.spaces], -1)
        if self.image is not None:
            return self.image(obs)
        if isinstance(self.space, Discrete):
            return F.one_hot(obs - int(self.space.start), int(self.space.n)).float()
        if isinstance(self.space, MultiDiscrete):
            shifted = obs - torch.as_tensor(self.space.start, device=obs.device)
            columns = zip(shifted.flatten(1).unbind(-1), self.space.nvec.reshape(-1), strict=True)
            return torch.cat([F.one_hot(column.long(), int(n)) for column, n in columns], -1).float()
        flat = obs.flatten(1).float()
        return flat if self.norm is None else self.norm(flat)

    def part(self, key: str) -> Encoder:
        """Return the encoder of one key of a Dict space."""
        return self.parts[_module_name(key)]  # type: ignore[return-value]

    def update_norm(self, obs: Tree) -> None:
        """Update the running statistics with observations `[...,obs]`."""
        if self.norm is not None:
            self.norm.update(obs.float())
        for key, part in obs.items() if isinstance(self.space, Dict) else ():
            self.parts[_module_name(key)].update_norm(part)  # type: ignore[operator]


def _module_name(key: str) -> str:
    """Return a valid module name for an observation key. The prefix avoids clashes with attributes of `nn.Module`."""
    return "part_" + key.replace(".", "_")


def is_image(space: gym.Space[Any]) -> bool:
    return isinstance(space, Box) and len(space.shape) == 3 and space.dtype == "uint8"


class Torso(MLP):
    """An encoder followed by fully connected layers."""

    def __init__(
        self,
        space: gym.Space[Any],
        cfg: NetConfig,
        normalize: bool,
        orthogonal_init: bool,
        layer_norm: bool = False,
    ) -> None:
        encoder = Encoder(space, cfg.cnn, normalize)
        init = {"orthogonal_init": orthogonal_init, "layer_norm": layer_norm}
        super().__init__(num_features(encoder, space), cfg.hidden_sizes, cfg.activation, **init)
        self.encoder, self.plain = encoder, encoder.plain

    def forward(self, obs: Tree) -> Tensor:
        return super().forward(obs if self.plain else self.encoder(obs))


class SimBaTorso(SimBa):
    """An encoder followed by the residual blocks of SimBa."""

    def __init__(self, space: gym.Space[Any], cfg: NetConfig, normalize: bool) -> None:
        encoder = Encoder(space, cfg.cnn, normalize)
        super().__init__(num_features(encoder, space), cfg.hidden_sizes, cfg.activation)
        self.encoder = encoder

    def forward(self, obs: Tree) -> Tensor:
        return super().forward(self.encoder(obs))


def _feed_forward_torso(
    space: gym.Space[Any], cfg: NetConfig, normalize: bool, orthogonal_init: bool, layer_norm: bool = False
) -> Torso | SimBaTorso:
    if cfg.kind == "simba":
        return SimBaTorso(space, cfg, normalize)
    return Torso(space, cfg, normalize, orthogonal_init, layer_norm)


class RecurrentTorso(nn.Module):
    """An encoder, fully connected layers and a GRU or LSTM cell."""

    def __init__(
        self,
        space: gym.Space[Any],
        cfg: NetConfig,
        normalize: bool,
        orthogonal_init: bool,
        layer_norm: bool = False,
    ) -> None:
        super().__init__()
        self.torso = _feed_forward_torso(space, cfg, normalize, orthogonal_init, layer_norm)
        inputs = num_features(self.torso, space)
        cell = nn.LSTMCell if cfg.recurrent == "lstm" else nn.GRUCell
        self.cell = cell(inputs, cfg.recurrent_size)

    def forward(self, obs: Tree, hidden: Tree) -> tuple[Tensor, Tree]:
        return self.step_cell(self.torso(obs), hidden)

    def step_cell(self, features: Tensor, hidden: Tree) -> tuple[Tensor, Tree]:
        """Run only the recurrent cell, on the features of the feed-forward part."""
        hidden = self.cell(features, hidden)
        return (hidden[0] if isinstance(hidden, tuple) else hidden), hidden


def get_encoder(torso: nn.Module) -> Encoder | None:
    """Return the encoder of a built-in torso, or None for a custom network."""
    if isinstance(torso, RecurrentTorso):
        torso = torso.torso
    return torso.encoder if isinstance(torso, (Torso, SimBaTorso)) else None


def make_torso(
    space: gym.Space[Any],
    cfg: NetConfig,
    make_net: NetFactory | None = None,
    *,
    normalize: bool | Auto = False,
    orthogonal_init: bool = False,
    layer_norm: bool = False,
) -> nn.Module:
    """Return the custom network if there is one, else the built-in network that the settings describe.

    Only built-in networks support `normalize=True`. `"auto"` normalizes if the network is built-in. `layer_norm` is
    that of `MLP`; SimBa networks always have it.
    """
    if make_net is None and cfg.kind not in BUILT_IN_NETS:
        make_net = _import_net(cfg.kind)
    if make_net is not None:
        if normalize is True:
            raise UserError(
                "normalize_obs=true needs a built-in network; set it to false, or normalize inside your network"
            )
        if cfg.recurrent != "none":
            raise UserError(
                f"net.recurrent={cfg.recurrent} needs a built-in network; set it to none, or use a recurrent network"
            )
        torso = make_net(space)
        if not isinstance(torso, nn.Module):
            raise UserError(f"net must return a torch.nn.Module for the observation space, not {type(torso).__name__}")
        return torso
    make = _feed_forward_torso if cfg.recurrent == "none" else RecurrentTorso
    return make(space, cfg, bool(normalize), orthogonal_init, layer_norm)


def _import_net(name: str) -> NetFactory:
    if ":" not in name:
        raise UserError(f"net.kind={name!r} is invalid; use 'auto', 'simba' or 'your.module:Net'")
    return import_object(name)


def is_recurrent(net: nn.Module) -> bool:
    """Return whether `net.forward` has a parameter `hidden`."""
    return "hidden" in inspect.signature(net.forward).parameters


def example_obs(space: gym.Space[Any], rows: int = 2, device: torch.device | str = "cpu") -> Tree:
    """Return `rows` valid observations (the smallest value of discrete spaces, else zeros) to infer output shapes."""
    if isinstance(space, Dict):
        return {key: example_obs(part, rows, device) for key, part in space.spaces.items()}
    field = space_fields(space)
    first = np.broadcast_to(getattr(space, "start", 0), field.shape).astype(field.dtype)
    return torch.as_tensor(first, device=device).expand(rows, *field.shape)


@torch.no_grad()
def num_features(net: nn.Module, space: gym.Space[Any]) -> int:
    """Return n of the features `[B,n]` that a network outputs. Raise `UserError` for any other shape."""
    obs = example_obs(space)
    out = net(obs, None)[0] if is_recurrent(net) else net(obs)
    if not isinstance(out, Tensor) or out.ndim != 2 or out.shape[0] != 2:
        shape = list(out.shape) if isinstance(out, Tensor) else type(out).__name__
        raise UserError(f"a network must return features [B,n] for B observations; for B=2 it returned {shape}")
    return out.shape[1]


def unroll(torso: nn.Module, obs: Tree, hidden: Tree, is_first: Tensor) -> tuple[Tensor, Tree]:
    """Run a recurrent torso over `obs [T,N,...]` from `hidden [N,...]`, with a reset where `is_first [T,N]`.

    Returns the features `[T,N,n]` and the hidden state after each step, `[T,N,...]`.
    """
    step: Callable[[Tree, Tree], tuple[Tensor, Tree]] = torso
    if isinstance(torso, RecurrentTorso):  # the feed-forward part runs on all steps at once
        obs = torso.torso(tree_map(lambda leaf: leaf.flatten(0, 1), obs)).unflatten(0, is_first.shape)
        step = torso.step_cell
        if isinstance(torso.cell, nn.GRUCell):
            hidden = _run_gru(torso.cell, obs, hidden, is_first)
            return hidden, hidden
    features, hiddens = [], []
    for t, first in enumerate(is_first.unbind()):
        out, hidden = step(tree_map(itemgetter(t), obs), reset_hidden(hidden, first))
        features.append(out)
        hiddens.append(hidden)
    return torch.stack(features), tree_map(lambda *steps: torch.stack(steps), *hiddens)


def _run_gru(cell: nn.GRUCell, features: Tensor, hidden: Tensor, is_first: Tensor) -> Tensor:
    """Return the hidden state after each step.

    One call covers all steps up to the next reset, which is much faster than one call per step.
    """
    weights = [cell.weight_ih, cell.weight_hh, cell.bias_ih, cell.bias_hh]
    resets = is_first.any(1)
    resets[0] = True
    starts = [*resets.nonzero().flatten().tolist(), len(features)]
    outputs = []
    for begin, end in pairwise(starts):
        start = reset_hidden(hidden, is_first[begin]).unsqueeze(0)
        out, last = torch.gru(features[begin:end], start, weights, True, 1, 0.0, True, False, False)
        hidden = last.squeeze(0)
        outputs.append(out)
    return torch.cat(outputs)


def hidden_fields(hidden: Tree) -> Tree:
    """Return the shapes and dtypes to store a hidden state `[N,...]` with every step."""
    return tree_map(lambda leaf: Field(tuple(leaf.shape[1:]), np.dtype(np.float32)), hidden)


def reset_hidden(hidden: Tree, rows: Tensor) -> Tree:
    """Set the hidden state to zero where `rows [N]` is true."""
    return tree_map(lambda leaf: leaf.masked_fill(rows.view(-1, *[1] * (leaf.ndim - 1)), 0.0), hidden)

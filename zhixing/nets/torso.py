"""Bodies: networks from an observation to features, to which learners add their heads.

A torso is any `nn.Module`: `net(obs) -> features [B,n]`, or recurrent `net(obs, hidden) -> (features, hidden)`. Hidden
states are tensors or tuples of tensors `[B,...]`; `None`, like zeros, is the state at the start of an episode.
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

from zhixing.config import Auto, NetConfig
from zhixing.core.spaces import space_fields
from zhixing.core.tree import Field, Tree, tree_map
from zhixing.errors import UserError
from zhixing.nets.cnn import CNN, CnnKind
from zhixing.nets.mlp import MLP
from zhixing.ops.normalize import RunningNorm
from zhixing.utils.importing import import_object

NetFactory = Callable[[gym.Space[Any]], nn.Module]


class Encoder(nn.Module):
    """One flat vector out of any observation: one-hot for choices, convolutions for images, the rest as it is."""

    def __init__(self, space: gym.Space[Any], cnn: CnnKind, normalize: bool) -> None:
        super().__init__()
        self.space = space
        self.parts = nn.ModuleDict()
        self.norm: RunningNorm | None = None
        self.image: CNN | None = None
        if isinstance(space, Dict):
            self.parts.update({_part(key): Encoder(part, cnn, normalize) for key, part in space.items()})
        elif is_image(space):
            self.image = CNN(tuple(space.shape or ()), cnn)
        elif normalize and isinstance(space, Box):
            self.norm = RunningNorm((int(torch.Size(space.shape).numel()),))
        # a vector of floats needs no encoding, and the call of a module costs as much as a small layer
        self.plain = (
            isinstance(space, Box) and len(space.shape) == 1 and space.dtype == np.float32 and self.norm is None
        )

    def forward(self, obs: Tree) -> Tensor:
        if isinstance(self.space, Dict):
            return torch.cat([self.parts[_part(key)](obs[key]) for key in self.space.spaces], -1)
        if self.image is not None:
            return self.image(obs)
        if isinstance(self.space, Discrete):
            return F.one_hot(obs - int(self.space.start), int(self.space.n)).float()
        if isinstance(self.space, MultiDiscrete):
            shifted = obs - torch.as_tensor(self.space.start, device=obs.device)
            choices = zip(shifted.flatten(1).unbind(-1), self.space.nvec.reshape(-1), strict=True)
            return torch.cat([F.one_hot(choice.long(), int(n)) for choice, n in choices], -1).float()
        flat = obs.flatten(1).float()
        return flat if self.norm is None else self.norm(flat)

    def part(self, key: str) -> Encoder:
        """That of one entry of a dict."""
        return self.parts[_part(key)]  # type: ignore[return-value]

    def update_norm(self, obs: Tree) -> None:
        """Take observations `[...,obs]` into the running statistics."""
        if self.norm is not None:
            self.norm.update(obs.float())
        for key, part in obs.items() if isinstance(self.space, Dict) else ():
            self.parts[_part(key)].update_norm(part)  # type: ignore[operator]


def _part(key: str) -> str:
    """A module's name for an observation's key: it can hold no dots, and some words are taken."""
    return "part_" + key.replace(".", "_")


def is_image(space: gym.Space[Any]) -> bool:
    return isinstance(space, Box) and len(space.shape) == 3 and space.dtype == "uint8"


class Torso(MLP):
    """Fully connected layers behind an encoder."""

    def __init__(self, space: gym.Space[Any], cfg: NetConfig, normalize: bool, orthogonal_init: bool) -> None:
        encoder = Encoder(space, cfg.cnn, normalize)
        inputs = num_features(encoder, space)
        super().__init__(inputs, cfg.hidden_sizes, cfg.activation, orthogonal_init=orthogonal_init)
        self.encoder, self.plain = encoder, encoder.plain

    def forward(self, obs: Tree) -> Tensor:
        return super().forward(obs if self.plain else self.encoder(obs))


class RecurrentTorso(nn.Module):
    """Encoder, fully connected layers and a memory: a GRU's or LSTM's cell."""

    def __init__(self, space: gym.Space[Any], cfg: NetConfig, normalize: bool, orthogonal_init: bool) -> None:
        super().__init__()
        self.torso = Torso(space, cfg, normalize, orthogonal_init)
        inputs = num_features(self.torso, space)
        cell = nn.LSTMCell if cfg.recurrent == "lstm" else nn.GRUCell
        self.cell = cell(inputs, cfg.recurrent_size)

    def forward(self, obs: Tree, hidden: Tree) -> tuple[Tensor, Tree]:
        return self.step_cell(self.torso(obs), hidden)

    def step_cell(self, seen: Tensor, hidden: Tree) -> tuple[Tensor, Tree]:
        """The part with memory, after what each observation alone becomes."""
        hidden = self.cell(seen, hidden)
        return (hidden[0] if isinstance(hidden, tuple) else hidden), hidden


def get_encoder(torso: nn.Module) -> Encoder | None:
    """The encoder of a built-in torso; a user's own network has none."""
    if isinstance(torso, RecurrentTorso):
        torso = torso.torso
    return torso.encoder if isinstance(torso, Torso) else None


def make_torso(
    space: gym.Space[Any],
    cfg: NetConfig,
    make_net: NetFactory | None = None,
    *,
    normalize: bool | Auto = False,
    orthogonal_init: bool = False,
) -> nn.Module:
    """The user's own network, else the one that the settings describe. Only built-in networks normalize observations;
    `auto` leaves it to them."""
    if make_net is None and cfg.kind != "auto":
        make_net = _import_net(cfg.kind)
    if make_net is not None:
        if normalize is True:
            raise UserError(
                "normalize_obs=true needs a built-in network; normalize inside your own, or set it to false"
            )
        if cfg.recurrent != "none":
            raise UserError("net.recurrent is for built-in networks; your own has what memory it makes itself")
        torso = make_net(space)
        if not isinstance(torso, nn.Module):
            raise UserError(f"net must give a torch.nn.Module for the observation space, not {type(torso).__name__}")
        return torso
    kind = Torso if cfg.recurrent == "none" else RecurrentTorso
    return kind(space, cfg, bool(normalize), orthogonal_init)


def _import_net(name: str) -> NetFactory:
    if ":" not in name:
        raise UserError(f"net.kind={name!r}: allowed are 'auto' and your.module:Net")
    return import_object(name)


def is_recurrent(net: nn.Module) -> bool:
    return "hidden" in inspect.signature(net.forward).parameters


def example_obs(space: gym.Space[Any], rows: int = 2, device: torch.device | str = "cpu") -> Tree:
    """Observations (zeros, or the first of choices) to learn the shapes of what a network makes of them."""
    if isinstance(space, Dict):
        return {key: example_obs(part, rows, device) for key, part in space.spaces.items()}
    field = space_fields(space)
    first = np.broadcast_to(getattr(space, "start", 0), field.shape).astype(field.dtype)
    return torch.as_tensor(first, device=device).expand(rows, *field.shape)


@torch.no_grad()
def num_features(net: nn.Module, space: gym.Space[Any]) -> int:
    obs = example_obs(space)
    out = net(obs, None)[0] if is_recurrent(net) else net(obs)
    if not isinstance(out, Tensor) or out.ndim != 2 or out.shape[0] != 2:
        shape = list(out.shape) if isinstance(out, Tensor) else type(out).__name__
        raise UserError(f"a network must give features [B,n] for B observations; for B=2 it gave {shape}")
    return out.shape[1]


def unroll(torso: nn.Module, obs: Tree, hidden: Tree, is_first: Tensor) -> tuple[Tensor, Tree]:
    """Run a recurrent torso over `obs [T,N,...]` from `hidden [N,...]`; memory is cleared where `is_first [T,N]`.

    Returns the features `[T,N,n]` and the memory after each step, `[T,N,...]`.
    """
    step: Callable[[Tree, Tree], tuple[Tensor, Tree]] = torso
    if isinstance(torso, RecurrentTorso):  # what needs no memory is computed for all steps at once
        obs = torso.torso(tree_map(lambda leaf: leaf.flatten(0, 1), obs)).unflatten(0, is_first.shape)
        step = torso.step_cell
        if isinstance(torso.cell, nn.GRUCell):
            memory = _run_gru(torso.cell, obs, hidden, is_first)
            return memory, memory
    features, memories = [], []
    for t, first in enumerate(is_first.unbind()):
        out, hidden = step(tree_map(itemgetter(t), obs), reset_hidden(hidden, first))
        features.append(out)
        memories.append(hidden)
    return torch.stack(features), tree_map(lambda *steps: torch.stack(steps), *memories)


def _run_gru(cell: nn.GRUCell, seen: Tensor, hidden: Tensor, is_first: Tensor) -> Tensor:
    """The memory after each step, by one call for all steps up to where some memory is cleared: much faster than a
    call per step."""
    weights = [cell.weight_ih, cell.weight_hh, cell.bias_ih, cell.bias_hh]
    cleared = is_first.any(1)
    cleared[0] = True
    starts = [*cleared.nonzero().flatten().tolist(), len(seen)]
    memories = []
    for begin, end in pairwise(starts):
        start = reset_hidden(hidden, is_first[begin]).unsqueeze(0)
        out, last = torch.gru(seen[begin:end], start, weights, True, 1, 0.0, True, False, False)
        hidden = last.squeeze(0)
        memories.append(out)
    return torch.cat(memories)


def hidden_fields(hidden: Tree) -> Tree:
    """What storage needs to know to keep a hidden state `[N,...]` of each step."""
    return tree_map(lambda leaf: Field(tuple(leaf.shape[1:]), np.dtype(np.float32)), hidden)


def reset_hidden(hidden: Tree, rows: Tensor) -> Tree:
    """Zeros where `rows [N]` is true: an episode starts there."""
    return tree_map(lambda leaf: leaf.masked_fill(rows.view(-1, *[1] * (leaf.ndim - 1)), 0.0), hidden)

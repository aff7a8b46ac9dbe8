"""What a new node of a search is worth: by playing on at random, or by a network."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from zhixing.core.policy import as_tensor, device_of
from zhixing.envs.vector.step_buffers import Array
from zhixing.errors import UserError
from zhixing.search.games import Model

SPREAD = np.uint64(0x9E3779B97F4A7C15)  # an odd number whose products differ in their highest bits


class Playouts:
    """The mean of `count` random playouts; all actions look alike."""

    def __init__(self, count: int = 1) -> None:
        if count < 1:
            raise UserError(f"playouts {count} must be at least 1")
        self.count = count

    def __call__(self, model: Model, states: Array, legal: Array, rng: np.random.Generator) -> tuple[None, Array]:
        outcomes = model.playout(states.repeat(self.count, 0), rng)
        return None, outcomes.reshape(-1, self.count).mean(-1)


class Network:
    """What `net(obs [B,...], mask [B,n]) -> (logits [B,n], value [B])` says.

    With `memory` it keeps what it said of so many states (a power of two), since searches that follow one another in a
    game meet most of them again. Call `forget` when the weights have changed. States must be whole numbers then.
    """

    def __init__(self, net: Callable[[Any, Tensor], tuple[Tensor, Tensor]], memory: int = 0) -> None:
        if memory & (memory - 1):
            raise UserError(f"memory {memory} must be a power of two, such as {1 << memory.bit_length()}")
        self.net, self.memory = net, memory
        self.asked = self.answered = 0  # states, and those of them that the memory knew
        self._known: tuple[Array, Array, Array] | None = None  # states [M,k], priors [M,n], values [M]

    def forget(self) -> None:
        self._known = None

    def __call__(self, model: Model, states: Array, legal: Array, rng: np.random.Generator) -> tuple[Array, Array]:
        if not self.memory:
            return self._ask(model, states, legal)
        words = states.reshape(len(states), -1)
        if self._known is None:
            keys = np.full((self.memory, words.shape[1]), -1, np.int64)
            shape = self.memory, legal.shape[1]
            self._known = keys, np.zeros(shape, np.float32), np.zeros(self.memory, np.float32)
        keys, priors, values = self._known
        place = _places(words, self.memory)
        prior, value = priors.take(place, 0), values.take(place)
        new = np.flatnonzero((keys.take(place, 0) != words).any(-1))
        self.asked += len(states)
        self.answered += len(states) - len(new)
        if len(new):
            _, first, which = np.unique(words[new], axis=0, return_index=True, return_inverse=True)
            rows, which = new[first], which.reshape(-1)  # of equal states one is asked for
            found_prior, found_value = self._ask(model, states[rows], legal[rows])
            prior[new], value[new] = found_prior[which], found_value[which]
            keys[place[new]], priors[place[new]], values[place[new]] = words[new], prior[new], value[new]
        return prior, value

    @torch.inference_mode()
    def _ask(self, model: Model, states: Array, legal: Array) -> tuple[Array, Array]:
        device = device_of(self.net) if isinstance(self.net, nn.Module) else torch.device("cpu")
        logits, value = self.net(as_tensor(model.observe(states), device), as_tensor(legal, device))
        return logits.softmax(-1).cpu().numpy(), value.cpu().numpy()


def _places(words: Array, memory: int) -> Array:
    """Where in the memory states `[B,k]` lie: the highest bits of a product that depends on all of their bits."""
    mixed = words[:, 0].astype(np.uint64)
    for word in words.T[1:]:
        mixed = (mixed ^ mixed >> np.uint64(29)) * SPREAD + word.astype(np.uint64)
    mixed = (mixed ^ mixed >> np.uint64(32)) * SPREAD
    return (mixed >> np.uint64(65 - memory.bit_length())).astype(np.int64)


def numpy_generator(rng: torch.Generator) -> np.random.Generator:
    """A generator for a search by a policy, which has torch's: seeded by its next number."""
    return np.random.default_rng(int(torch.randint(2**63 - 1, (), generator=rng, device=rng.device)))

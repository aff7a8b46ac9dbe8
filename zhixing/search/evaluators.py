"""Evaluators of new search nodes: random playouts, or a network."""

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

HASH_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # odd; mixes all input bits into the highest bits of the product


class PlayoutEvaluator:
    """Evaluate a state by the mean return of `count` random playouts, with uniform priors."""

    def __init__(self, count: int = 1) -> None:
        if count < 1:
            raise UserError(f"playouts {count} must be at least 1")
        self.count = count

    def __call__(self, model: Model, states: Array, legal: Array, rng: np.random.Generator) -> tuple[None, Array]:
        returns = model.playout(states.repeat(self.count, 0), rng)
        return None, returns.reshape(-1, self.count).mean(-1)


class NetworkEvaluator:
    """Evaluate states by a network `net(obs [B,...], mask [B,n]) -> (logits [B,n], value [B])`.

    `cache_size`, a power of two, is the number of states whose results are cached: successive searches in a game visit
    most states again. Caching needs integer states. Call `clear_cache` when the weights have changed.
    """

    def __init__(self, net: Callable[[Any, Tensor], tuple[Tensor, Tensor]], cache_size: int = 0) -> None:
        if cache_size & (cache_size - 1):
            raise UserError(f"cache_size {cache_size} must be a power of two, such as {1 << cache_size.bit_length()}")
        self.net, self.cache_size = net, cache_size
        self.num_queries = self.num_cache_hits = 0
        self._cache: tuple[Array, Array, Array] | None = None  # states [M,k], priors [M,n], values [M]

    def clear_cache(self) -> None:
        self._cache = None

    def __call__(self, model: Model, states: Array, legal: Array, rng: np.random.Generator) -> tuple[Array, Array]:
        if not self.cache_size:
            return self._evaluate(model, states, legal)
        flat = states.reshape(len(states), -1)
        if self._cache is None:
            keys = np.full((self.cache_size, flat.shape[1]), -1, np.int64)
            shape = self.cache_size, legal.shape[1]
            self._cache = keys, np.zeros(shape, np.float32), np.zeros(self.cache_size, np.float32)
        keys, priors, values = self._cache
        slot = _cache_slots(flat, self.cache_size)
        prior, value = priors.take(slot, 0), values.take(slot)
        new = np.flatnonzero((keys.take(slot, 0) != flat).any(-1))
        self.num_queries += len(states)
        self.num_cache_hits += len(states) - len(new)
        if len(new):
            _, first, inverse = np.unique(flat[new], axis=0, return_index=True, return_inverse=True)
            rows, inverse = new[first], inverse.reshape(-1)  # evaluate equal states once
            new_prior, new_value = self._evaluate(model, states[rows], legal[rows])
            prior[new], value[new] = new_prior[inverse], new_value[inverse]
            keys[slot[new]], priors[slot[new]], values[slot[new]] = flat[new], prior[new], value[new]
        return prior, value

    @torch.inference_mode()
    def _evaluate(self, model: Model, states: Array, legal: Array) -> tuple[Array, Array]:
        device = device_of(self.net) if isinstance(self.net, nn.Module) else torch.device("cpu")
        logits, value = self.net(as_tensor(model.observe(states), device), as_tensor(legal, device))
        return logits.softmax(-1).cpu().numpy(), value.cpu().numpy()


def _cache_slots(states: Array, cache_size: int) -> Array:
    """Hash states `[B,k]` to slots of the cache: the highest bits of a product that depends on all their bits."""
    mixed = states[:, 0].astype(np.uint64)
    for column in states.T[1:]:
        mixed = (mixed ^ mixed >> np.uint64(29)) * HASH_MULTIPLIER + column.astype(np.uint64)
    mixed = (mixed ^ mixed >> np.uint64(32)) * HASH_MULTIPLIER
    return (mixed >> np.uint64(65 - cache_size.bit_length())).astype(np.int64)


def numpy_generator(rng: torch.Generator) -> np.random.Generator:
    """Make a NumPy generator seeded by the next number of a torch generator."""
    return np.random.default_rng(int(torch.randint(2**63 - 1, (), generator=rng, device=rng.device)))

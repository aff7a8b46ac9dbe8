"""Sum tree: sample items in proportion to their weights, and change weights, with a few array operations."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

Array = np.ndarray[Any, Any]
BITS = 4
FANOUT = 1 << BITS  # 16 children: in NumPy a few levels of small array operations are faster than 20 binary levels
TOP = 16384  # up to so many sums, one cumsum and one binary search are faster than more levels


class SumTree:
    """Weights of `size` items. Level i+1 holds the sums of 16 neighbors of level i, up to a top of at most 16,384 sums.

    Sums are recomputed from their children, never adjusted by differences. So they don't drift, and one update may set
    an item twice. They are recomputed only when needed.
    """

    def __init__(self, size: int) -> None:
        self.levels: list[Array] = []
        while not self.levels or size > TOP:
            blocks = -(-size // FANOUT)
            self.levels.append(np.zeros(blocks * FANOUT))
            size = blocks
        self.levels.append(np.zeros(size))
        self._edges = np.zeros(size + 1)  # cumulative sums of the top level, beginning with 0
        self._changed: list[Array] = []

    @property
    def weights(self) -> Array:
        """The weight of each item, padded with zeros to a full block. Change it only with `set`."""
        return self.levels[0]

    def set(self, items: Array, weights: Array | float) -> None:
        self.weights[items] = weights
        self._changed.append(items)
        if len(self._changed) > 1000:  # bounds the list if nothing is sampled for long
            self._refresh()

    @property
    def total(self) -> float:
        self._refresh()
        return float(self._edges[-1])

    def find(self, mass: Array) -> Array:
        """Return, for each number in [0, total), the item whose interval of the cumulative weights contains it."""
        mass = np.minimum(mass, math.nextafter(self.total, 0.0))
        node = self._edges[1:].searchsorted(mass, side="right")
        mass -= self._edges.take(node)
        for level in reversed(self.levels[:-1]):
            sums = _cumulative_sums(level.reshape(-1, FANOUT).take(node, 0))
            if 1 in (mass >= sums[:, -1]).tobytes():
                # rounding has moved a mass to or past the end of its block: move it back onto an item with weight
                np.minimum(mass, np.nextafter(sums[:, -1], 0.0), out=mass)
            child = (sums > mass[:, None]).argmax(1)
            node = node * FANOUT + child
            if level is not self.weights:
                before = np.arange(-1, len(mass) * FANOUT - 1, FANOUT) + child
                mass -= np.where(child > 0, sums.take(before, mode="wrap"), 0.0)
        return node

    def _refresh(self) -> None:
        """Recompute the sums of changed items."""
        if not self._changed:
            return
        nodes = self._changed[0] if len(self._changed) == 1 else np.concatenate(self._changed)
        self._changed = []
        for children, parents in zip(self.levels[:-1], self.levels[1:], strict=True):
            blocks = children.reshape(-1, FANOUT)
            nodes = nodes >> BITS
            if len(nodes) >= len(blocks):  # then recomputing all of them is cheaper
                nodes = np.arange(len(blocks))
            parents[nodes] = blocks.take(nodes, 0).sum(1)
        self._edges[1:] = _cumulative_sums(self.levels[-1])


def _cumulative_sums(array: Array) -> Array:
    """Sum along the last dimension. Torch takes a quarter of NumPy's time and returns the same bits."""
    sums: Array = torch.from_numpy(array).cumsum(-1).numpy()
    return sums

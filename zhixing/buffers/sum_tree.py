"""A sum tree: draw an item in proportion to its weight among millions, and change weights, in a few array calls."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

Array = np.ndarray[Any, Any]
BITS = 4
FANOUT = 1 << BITS  # 16 children: few levels, each one a small array operation, suit NumPy better than 20 binary ones
TOP = 16384  # sums that one cumsum and one binary search go through faster than through further levels


class SumTree:
    """Weights of `size` items; level i+1 holds the sums of 16 neighbours of level i, up to a top of at most 16384.

    Sums are recomputed from the children, never adjusted by differences: no drift, and an item given twice in one
    update is no special case. Sums are brought up to date only when something is drawn.
    """

    def __init__(self, size: int) -> None:
        self.levels: list[Array] = []
        while not self.levels or size > TOP:
            blocks = -(-size // FANOUT)
            self.levels.append(np.zeros(blocks * FANOUT))
            size = blocks
        self.levels.append(np.zeros(size))
        self._edges = np.zeros(size + 1)  # where the stretch of each sum of the top begins, and the end
        self._changed: list[Array] = []

    @property
    def weights(self) -> Array:
        """One per item (and zeros up to a full block); to be changed through `set` only."""
        return self.levels[0]

    def set(self, items: Array, weights: Array | float) -> None:
        self.weights[items] = weights
        self._changed.append(items)
        if len(self._changed) > 1000:  # a long time without draws must not pile up
            self._refresh()

    @property
    def total(self) -> float:
        self._refresh()
        return float(self._edges[-1])

    def find(self, mass: Array) -> Array:
        """For each number in [0, total), the item whose stretch of the summed weights holds it."""
        mass = np.minimum(mass, math.nextafter(self.total, 0.0))
        node = self._edges[1:].searchsorted(mass, side="right")
        mass -= self._edges.take(node)
        for level in reversed(self.levels[:-1]):
            sums = _running_sums(level.reshape(-1, FANOUT).take(node, 0))
            if 1 in (mass >= sums[:, -1]).tobytes():
                # rounding has left a mass at or past the end of its block: stay below, on an item with weight
                np.minimum(mass, np.nextafter(sums[:, -1], 0.0), out=mass)
            child = (sums > mass[:, None]).argmax(1)
            node = node * FANOUT + child
            if level is not self.weights:
                before = np.arange(-1, len(mass) * FANOUT - 1, FANOUT) + child
                mass -= np.where(child > 0, sums.take(before, mode="wrap"), 0.0)
        return node

    def _refresh(self) -> None:
        if not self._changed:
            return
        nodes = self._changed[0] if len(self._changed) == 1 else np.concatenate(self._changed)
        self._changed = []
        for children, parents in zip(self.levels[:-1], self.levels[1:], strict=True):
            blocks = children.reshape(-1, FANOUT)
            nodes = nodes >> BITS
            if len(nodes) >= len(blocks):  # cheaper all at once
                nodes = np.arange(len(blocks))
            parents[nodes] = blocks.take(nodes, 0).sum(1)
        self._edges[1:] = _running_sums(self.levels[-1])


def _running_sums(array: Array) -> Array:
    """Along the last dimension. Torch takes a quarter of NumPy's time for the same bits."""
    sums: Array = torch.from_numpy(array).cumsum(-1).numpy()
    return sums

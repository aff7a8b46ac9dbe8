"""Storage of scattered transitions: a uniform subset of all that were ever added (algorithm R, Vitter 1985).

Rows are no neighbours here, so each holds its successor itself.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from zhixing.buffers.fields import SUCCESSORS, Array, ArrayStore, BatchValidator
from zhixing.core.batch import Batch
from zhixing.core.tree import Tree


class ReservoirStorage:
    """The t-th transition (from 0) goes to place t while there is room, then to place j drawn from 0..t if j is one."""

    def __init__(
        self, spec: Mapping[str, Tree], capacity: int, seed: int, device: str = "cpu", folder: Path | None = None
    ) -> None:
        self.reader = BatchValidator(spec)
        self.capacity = capacity
        self.rng = np.random.default_rng(seed)
        self.table = ArrayStore(spec, capacity, device, folder)
        successors = {SUCCESSORS[name]: tree for name, tree in spec.items() if name in SUCCESSORS}
        self.successors = ArrayStore(successors, capacity, device, folder)
        self.number = np.full(capacity, -1, np.int64)  # which of all transitions ever added lies in each place
        self.count = np.zeros(1, np.int64)  # transitions ever added
        self.base = np.zeros(1, np.int64)  # those before this one were cleared

    def __len__(self) -> int:
        return int(min(self.count[0] - self.base[0], self.capacity))

    def add(self, batch: Batch, ids: Array | None = None) -> Array:
        """Offer all transitions of the batch; returns the places that changed."""
        values, lead = self.reader.read(batch)
        n = int(np.prod(lead))
        seen = int(self.count[0] - self.base[0]) + np.arange(n)
        place = seen.copy()
        late = seen >= self.capacity
        place[late] = self.rng.integers(0, seen[late] + 1)
        # of several for one place only the last stays
        offered = np.flatnonzero(place < self.capacity)[::-1]
        place, newest = np.unique(place[offered], return_index=True)
        taken = offered[newest]
        if len(taken):
            for table in (self.table, self.successors):
                for name in table.spec:
                    table.put(name, place, [leaf.reshape(n, *leaf.shape[len(lead) :])[taken] for leaf in values[name]])
            self.number[place] = self.count[0] + taken
        self.count += n
        return place

    def uniform(self, n: int, rng: np.random.Generator) -> Array:
        return (rng.random(n) * len(self)).astype(np.int64)

    def flat(self, index: Array) -> Array:
        return index

    def take(self, name: str, flat: Array) -> Tree:
        return self.table.take(name, flat)

    def take_all(self, flat: Array) -> dict[str, Tree]:
        return self.table.take_all(flat)

    def successor(self, name: str, flat: Array) -> Tree:
        return self.successors.take(SUCCESSORS[name], flat)

    def clear(self) -> None:
        self.base = self.count.copy()
        self.number[:] = -1

    # ------------------------------------------------------------ saving, see segments.py

    def mark(self) -> Array:
        return self.count.copy()

    def keeps(self, start: Array, end: Array) -> bool:
        return bool(((self.number >= start[0]) & (self.number < end[0])).any())

    def contents(self, since: Array | None = None) -> dict[str, Array]:
        place = np.flatnonzero(self.number >= (0 if since is None else since[0]))
        return {
            "index": place,
            "number": self.number[place],
            **self.table.rows(place),
            **self.successors.rows(place),
        }

    def restore(self, rows: Mapping[str, Array]) -> int:
        """Put back those rows that `load_state` said are in their place; returns how many."""
        keep = self.number[rows["index"]] == rows["number"]
        for table in (self.table, self.successors):
            table.set_rows(rows["index"], rows, keep)
        return int(keep.sum())

    def state(self) -> dict[str, Any]:
        rng = json.dumps(self.rng.bit_generator.state)
        return {"count": self.count, "base": self.base, "number": self.number, "rng": rng}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.count[:], self.base[:], self.number[:] = state["count"], state["base"], state["number"]
        self.rng.bit_generator.state = json.loads(state["rng"])

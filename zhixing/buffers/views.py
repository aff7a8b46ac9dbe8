"""What a sample shows of the rows drawn: a transition of one or n steps, a window, a whole episode.

A view says which rows may be drawn (`ahead` rows must follow them, or `candidates` lists them) and gathers them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch

from zhixing.buffers.fields import SUCCESSORS, Array
from zhixing.buffers.reservoir import ReservoirStorage
from zhixing.buffers.ring import Ring
from zhixing.core.tree import Tree, tree_map
from zhixing.errors import UserError

Storage = Ring | ReservoirStorage


class View(Protocol):
    @property
    def ahead(self) -> int:
        """How many rows must follow a row for it to be drawn."""

    @property
    def rows(self) -> int:
        """How many rows of each environment a buffer must hold for a full sample."""

    def candidates(self, storage: Storage) -> Array | None:
        """The only rows that may be drawn, or None for all that `ahead` allows."""

    def gather(self, storage: Storage, index: Array) -> dict[str, Tree]:
        """The fields of a sample that begins at the rows `index`."""


@dataclass(frozen=True)
class NStep:
    """Transitions over up to `n` steps [B]: target = reward + discount · ~terminated · value(next_obs).

    `reward` is Σ γ^i r_i over the k steps used and `discount` γ^k. k < n at an episode's end and at the newest row;
    `terminated`, `truncated` and the successors are those of the last step used. With `alive_only`, an agent's rewards
    after it has left (`alive` false before the step) are not added.
    """

    n: int
    gamma: float
    alive_only: bool = False
    ahead = 0

    @property
    def rows(self) -> int:
        return self.n

    def __post_init__(self) -> None:
        if self.n < 1 or not 0.0 <= self.gamma <= 1.0:
            raise UserError(f"NStep(n={self.n}, gamma={self.gamma}): n must be at least 1 and gamma in [0, 1]")

    def candidates(self, storage: Storage) -> Array | None:
        return None

    def gather(self, storage: Storage, index: Array) -> dict[str, Tree]:
        first = storage.flat(index)
        fields = storage.take_all(first)
        if self.n > 1 and isinstance(storage, Ring):
            steps, fields["reward"] = self._sums(storage, index)
            last = storage.flat(index + (steps - 1) * storage.num_envs)
            fields |= {name: storage.take(name, last) for name in ("terminated", "truncated")}
            discount = (self.gamma ** np.arange(self.n + 1)).astype(np.float32)[steps]
        else:
            last = first
            discount = np.full(len(index), self.gamma, np.float32)
        for name in [name for name in SUCCESSORS if name in fields]:
            fields[SUCCESSORS[name]] = storage.successor(name, last)
        fields["discount"] = storage.table.tensor(discount)
        return fields

    def _sums(self, storage: Ring, index: Array) -> tuple[Array, torch.Tensor]:
        """How many steps are used [B], and the sum of their rewards."""
        path = index[:, None] + np.arange(self.n) * storage.num_envs  # [B,n]
        newest = storage.count[index % storage.num_envs] - 1
        goes_on = ~storage.cut(path[:, :-1]) & (path[:, :-1] // storage.num_envs < newest[:, None])
        used = np.ones(path.shape, bool)
        used[:, 1:] = np.logical_and.accumulate(goes_on, axis=1)
        factor = np.where(used, self.gamma ** np.arange(self.n), 0.0).astype(np.float32)
        # an unused step may lie on a row of another time: its reward must not enter, not even as 0 · NaN
        rows = storage.flat(np.where(used, path, index[:, None]).reshape(-1))
        reward = storage.take("reward", rows)
        if self.alive_only:
            reward = reward.masked_fill(~storage.take("alive", rows), 0.0)
        reward = reward.reshape(*path.shape, *reward.shape[1:])
        weight = storage.table.tensor(factor)
        return used.sum(1), (reward * weight.reshape(*path.shape, *[1] * (reward.dim() - 2))).sum(1)


@dataclass(frozen=True)
class Sequence:
    """Windows [B,T] of consecutive rows of one column, T = burn_in + length; they may cross episodes' ends.

    `is_first` marks the first row of an episode, where a recurrent state must be reset. The first `burn_in` rows
    are there to warm that state up; the learner gives them no loss.
    """

    length: int
    burn_in: int = 0

    def __post_init__(self) -> None:
        if self.length < 1 or self.burn_in < 0:
            raise UserError(f"Sequence(length={self.length}, burn_in={self.burn_in}): need length >= 1, burn_in >= 0")

    @property
    def ahead(self) -> int:
        return self.burn_in + self.length - 1

    @property
    def rows(self) -> int:
        return self.ahead + 1

    def candidates(self, storage: Storage) -> Array | None:
        return None

    def gather(self, storage: Storage, index: Array) -> dict[str, Tree]:
        assert isinstance(storage, Ring)
        return _windows(storage, index[:, None] + np.arange(self.ahead + 1) * storage.num_envs)


@dataclass(frozen=True)
class Episode:
    """Complete episodes [B,T], T that of the longest drawn. After its end (`valid` false) a shorter one's last row
    repeats, so that padding holds ordinary numbers."""

    ahead = 0
    rows = 1

    def candidates(self, storage: Storage) -> Array | None:
        """First rows of the episodes that ended and lie in the ring from first to last row."""
        assert isinstance(storage, Ring)
        flat = np.flatnonzero(storage.slot >= 0)
        ended = (storage.table.take("terminated", flat) | storage.table.take("truncated", flat)).cpu().numpy()
        first = storage.episode_start[flat] * storage.num_envs + flat % storage.num_envs
        return np.sort(first[ended & storage.live(first)])

    def gather(self, storage: Storage, index: Array) -> dict[str, Tree]:
        assert isinstance(storage, Ring)
        length = _episode_lengths(storage, index)
        time = np.arange(length.max())
        path = index[:, None] + np.minimum(time, length[:, None] - 1) * storage.num_envs
        valid = storage.table.tensor(time < length[:, None])
        return {**_windows(storage, path), "valid": valid}


def _episode_lengths(ring: Ring, index: Array) -> Array:
    """Rows up to the first cut, looking ahead in doubling strides."""
    reach = 64
    while True:
        cut = ring.cut(index[:, None] + np.arange(reach) * ring.num_envs)
        if cut.any(1).all():
            return cut.argmax(1) + 1
        reach *= 2


def _windows(ring: Ring, path: Array) -> dict[str, Tree]:
    """The rows `path` [B,T] of every field.

    Successors are put together only when read, for most learners shift `obs`; but all that needs the ring is taken
    now, because later rows may overwrite it: what follows the last row and the rows that the next doesn't follow.
    """

    def shape(leaf: torch.Tensor) -> torch.Tensor:
        return leaf.reshape(*path.shape, *leaf.shape[1:])

    flat = ring.flat(path)
    fields: dict[str, Any] = {name: tree_map(shape, ring.take(name, flat.reshape(-1))) for name in ring.table.spec}
    cuts = np.nonzero(ring.cut(path[:, :-1]))
    at = tuple(ring.table.tensor(part) for part in cuts)
    for name in [name for name in SUCCESSORS if name in ring.table.spec]:
        last, lost = ring.successor(name, flat[:, -1]), ring.successor(name, flat[:, :-1][cuts])

        def shifted(rows: torch.Tensor, last: torch.Tensor, lost: torch.Tensor) -> torch.Tensor:
            after = torch.cat([rows[:, 1:], last[:, None]], dim=1)
            after[at] = lost
            return after

        fields[SUCCESSORS[name]] = partial(tree_map, shifted, fields[name], last, lost)
    fields["is_first"] = ring.table.tensor(ring.is_first(path))
    return fields

"""Views: the form in which sampled rows are returned, as transitions of one or n steps, windows or whole episodes.

A view determines which rows can be sampled (`lookahead` rows must follow, or `candidates` lists them) and gathers them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch

from zhixing.buffers.fields import SUCCESSORS, Array
from zhixing.buffers.ring import Ring
from zhixing.core.tree import Tree, tree_map
from zhixing.errors import UserError


class View(Protocol):
    @property
    def lookahead(self) -> int:
        """The number of rows that must follow a row for it to be sampled."""

    @property
    def min_rows(self) -> int:
        """The number of rows per environment that a buffer must have room for."""

    def candidates(self, ring: Ring) -> Array | None:
        """Return the only rows that can be sampled, or None for all that `lookahead` allows."""

    def gather(self, ring: Ring, index: Array) -> dict[str, Tree]:
        """Return the fields of samples that begin at the rows `index` [B]."""


@dataclass(frozen=True)
class NStep:
    """Transitions over up to `n` steps [B]: target = reward + discount · ~terminated · value(next_obs).

    `reward` is Σ γ^i r_i over the k steps used, `discount` is γ^k. k < n at the end of an episode and at the newest
    row. `terminated`, `truncated` and the successors are those of the last step used. With `alive_only`, the rewards of
    an agent that has left the episode (`alive` is false before the step) are not added.
    """

    n: int
    gamma: float
    alive_only: bool = False
    lookahead = 0

    @property
    def min_rows(self) -> int:
        return self.n

    def __post_init__(self) -> None:
        if self.n < 1 or not 0.0 <= self.gamma <= 1.0:
            raise UserError(f"NStep(n={self.n}, gamma={self.gamma}): n must be at least 1 and gamma in [0, 1]")

    def candidates(self, ring: Ring) -> Array | None:
        return None

    def gather(self, ring: Ring, index: Array) -> dict[str, Tree]:
        first = ring.to_row(index)
        fields = ring.take_all(first)
        if self.n > 1:
            steps, fields["reward"] = self._sum_rewards(ring, index)
            last = ring.to_row(index + (steps - 1) * ring.num_envs)
            fields |= {name: ring.take(name, last) for name in ("terminated", "truncated")}
            discount = (self.gamma ** np.arange(self.n + 1)).astype(np.float32)[steps]
        else:
            last = first
            discount = np.full(len(index), self.gamma, np.float32)
        for name in [name for name in SUCCESSORS if name in fields]:
            fields[SUCCESSORS[name]] = ring.take_successors(name, last)
        fields["discount"] = ring.store.to_tensor(discount)
        return fields

    def _sum_rewards(self, ring: Ring, index: Array) -> tuple[Array, torch.Tensor]:
        """Return the number of steps used [B] and the discounted sum of their rewards."""
        path = index[:, None] + np.arange(self.n) * ring.num_envs  # [B,n]
        newest = ring.count[index % ring.num_envs] - 1
        continues = ~ring.is_boundary(path[:, :-1]) & (path[:, :-1] // ring.num_envs < newest[:, None])
        used = np.ones(path.shape, bool)
        used[:, 1:] = np.logical_and.accumulate(continues, axis=1)
        factor = np.where(used, self.gamma ** np.arange(self.n), 0.0).astype(np.float32)
        # unused steps may be unrelated rows, whose reward must not count, even if it is NaN, since 0 · NaN is NaN
        rows = ring.to_row(np.where(used, path, index[:, None]).reshape(-1))
        reward = ring.take("reward", rows)
        if self.alive_only:
            reward = reward.masked_fill(~ring.take("alive", rows), 0.0)
        reward = reward.reshape(*path.shape, *reward.shape[1:])
        weight = ring.store.to_tensor(factor)
        return used.sum(1), (reward * weight.reshape(*path.shape, *[1] * (reward.dim() - 2))).sum(1)


@dataclass(frozen=True)
class SequenceView:
    """Windows [B,T] of consecutive rows of one environment, T = burn_in + length. They may span several episodes.

    `is_first` marks the first row of an episode, where a recurrent state must be reset. The first `burn_in` rows warm
    up that state; the learner computes no loss on them.
    """

    length: int
    burn_in: int = 0

    def __post_init__(self) -> None:
        if self.length < 1 or self.burn_in < 0:
            raise UserError(
                f"SequenceView(length={self.length}, burn_in={self.burn_in}): length must be at least 1, burn_in at "
                f"least 0"
            )

    @property
    def lookahead(self) -> int:
        return self.burn_in + self.length - 1

    @property
    def min_rows(self) -> int:
        return self.lookahead + 1

    def candidates(self, ring: Ring) -> Array | None:
        return None

    def gather(self, ring: Ring, index: Array) -> dict[str, Tree]:
        return _gather_windows(ring, index[:, None] + np.arange(self.lookahead + 1) * ring.num_envs)


@dataclass(frozen=True)
class EpisodeView:
    """Complete episodes [B,T], where T is the length of the longest one sampled.

    `valid` is false on the padding of shorter episodes, which repeats their last row to contain valid numbers.
    """

    lookahead = 0
    min_rows = 1

    def candidates(self, ring: Ring) -> Array | None:
        """Return the first rows of the finished episodes that are stored completely."""
        rows = np.flatnonzero(ring.slot >= 0)
        ended = (ring.store.take("terminated", rows) | ring.store.take("truncated", rows)).cpu().numpy()
        first = ring.episode_start[rows] * ring.num_envs + rows % ring.num_envs
        return np.sort(first[ended & ring.is_stored(first)])

    def gather(self, ring: Ring, index: Array) -> dict[str, Tree]:
        length = _episode_lengths(ring, index)
        time = np.arange(length.max())
        path = index[:, None] + np.minimum(time, length[:, None] - 1) * ring.num_envs
        valid = ring.store.to_tensor(time < length[:, None])
        return {**_gather_windows(ring, path), "valid": valid}


def _episode_lengths(ring: Ring, index: Array) -> Array:
    """Return the number of rows up to the first boundary. Doubles the search window until all have one."""
    window = 64
    while True:
        boundary = ring.is_boundary(index[:, None] + np.arange(window) * ring.num_envs)
        if boundary.any(1).all():
            return boundary.argmax(1) + 1
        window *= 2


def _gather_windows(ring: Ring, path: Array) -> dict[str, Tree]:
    """Return every field at the rows `path` [B,T].

    Successors are assembled only when read, because most learners shift `obs` instead. Values outside the window (after
    its last row and after boundaries) are copied immediately, because new rows may overwrite them.
    """

    def unflatten(leaf: torch.Tensor) -> torch.Tensor:
        return leaf.reshape(*path.shape, *leaf.shape[1:])

    rows = ring.to_row(path)
    fields: dict[str, Any] = {name: tree_map(unflatten, ring.take(name, rows.reshape(-1))) for name in ring.store.spec}
    boundaries = np.nonzero(ring.is_boundary(path[:, :-1]))
    at = tuple(ring.store.to_tensor(part) for part in boundaries)
    for name in [name for name in SUCCESSORS if name in ring.store.spec]:
        last = ring.take_successors(name, rows[:, -1])
        at_boundaries = ring.take_successors(name, rows[:, :-1][boundaries])

        def shift(values: torch.Tensor, last: torch.Tensor, at_boundaries: torch.Tensor) -> torch.Tensor:
            successors = torch.cat([values[:, 1:], last[:, None]], dim=1)
            successors[at] = at_boundaries
            return successors

        fields[SUCCESSORS[name]] = partial(tree_map, shift, fields[name], last, at_boundaries)
    fields["is_first"] = ring.store.to_tensor(ring.is_first(path))
    return fields

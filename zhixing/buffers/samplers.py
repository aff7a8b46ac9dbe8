"""Samplers: which rows of a ring are sampled, uniformly or in proportion to their priority."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from zhixing.buffers.fields import Array
from zhixing.buffers.ring import Ring
from zhixing.buffers.sum_tree import SumTree
from zhixing.buffers.views import View
from zhixing.errors import UserError
from zhixing.ops.schedules import linear_schedule


@dataclass(frozen=True)
class Uniform:
    """Sample all rows that the view allows with equal probability."""


@dataclass(frozen=True)
class Prioritized:
    """Proportional prioritized replay (Schaul et al., 2016).   P(i) = p_i^α / Σ p^α,   p_i = |priority| + ε

    weight_i = (P(i) · len)^-β / max_j weight_j, with the maximum over the batch as in the paper's algorithm 1, so the
    largest weight is 1. Sampling is stratified: one row from each of n equal parts of the total. β grows from
    `beta_start` to `beta_end` with the progress that `Buffer.set_progress` sets.
    """

    alpha: float = 0.6
    beta_start: float = 0.4
    beta_end: float = 1.0
    epsilon: float = 1e-6

    def __post_init__(self) -> None:
        if self.alpha < 0 or self.epsilon <= 0:
            raise UserError(
                f"Prioritized(alpha={self.alpha}, epsilon={self.epsilon}): alpha must be at least 0 and epsilon "
                f"positive"
            )


def sample_uniform(n: int, rng: np.random.Generator, ring: Ring, view: View) -> Array:
    """Return the indices of `n` rows among those that the view allows."""
    candidates = view.candidates(ring)
    if candidates is not None or len(ring) == 0:
        return _choose(candidates, n, rng, ring)
    index = ring.sample_uniform(n, rng)
    if view.lookahead == 0 and ring.frame_stack == 1:
        return index
    # rejection sampling: redraw the rows that aren't complete
    for _ in range(20):
        rejected = np.flatnonzero(~ring.is_complete(index, view.lookahead))
        if len(rejected) == 0:
            return index
        index[rejected] = ring.sample_uniform(len(rejected), rng)
    # hardly any row is complete: list those that are
    index = ring.indices()
    return _choose(index[ring.is_complete(index, view.lookahead)], n, rng, ring)


def _choose(candidates: Array | None, n: int, rng: np.random.Generator, ring: Ring) -> Array:
    if candidates is None or len(candidates) == 0:
        raise_empty(ring)
    return candidates[(rng.random(n) * len(candidates)).astype(np.int64)]


def raise_empty(ring: Ring) -> NoReturn:
    raise UserError(
        f"nothing to sample yet: {len(ring)} transitions are stored, and none of them can begin a sample of "
        f"this view; add more steps first"
    )


class Priorities:
    """The priorities of a ring's rows under `Prioritized`. Rows that can't be sampled have the weight 0.

    New rows get their priority when it is first needed (`_add_new_rows`): many at once cost little more than one.
    """

    def __init__(self, settings: Prioritized, ring: Ring, lookahead: int) -> None:
        self.settings, self.ring, self.lookahead = settings, ring, lookahead
        self._all_complete = lookahead == 0 and ring.frame_stack == 1
        self.tree = SumTree(ring.size)
        self.priority = np.zeros(ring.size)  # p^α of every row
        self.max_priority = 1.0  # for new rows: the maximum so far, so each is soon sampled once
        self.progress = 0.0  # used fraction of the run's budget, 0 to 1
        self._count = ring.count.copy()  # rows before these positions have their priority

    def _add_new_rows(self) -> None:
        """Give rows added since the last call the highest priority so far."""
        ring, N = self.ring, self.ring.num_envs
        if self._count.tobytes() == ring.count.tobytes():
            return
        old_count, self._count = self._count, ring.count.copy()
        index = ring.indices_since(old_count)
        rows = ring.to_row(index)
        self.priority[rows] = self.max_priority
        columns = np.arange(N)
        # the row of the newest successor isn't a transition
        self.tree.set(ring.to_row(ring.count * N + columns), 0.0)
        if self._all_complete:
            self.tree.set(rows, self.max_priority)
            return
        # rows before the new ones may have become complete, the oldest ones may have lost frames
        before = (old_count - np.arange(1, self.lookahead + 1)[:, None]) * N + columns
        oldest = (ring.oldest + np.arange(ring.frame_stack)[:, None]) * N + columns
        self._update_weights(np.concatenate([index, before.reshape(-1), oldest.reshape(-1)]))

    def fill(self) -> None:
        """Give all stored rows the same priority."""
        self.priority[:] = self.max_priority
        self._update_weights(self.ring.indices())

    def _update_weights(self, index: Array) -> None:
        index = index[(index >= 0) & self.ring.is_stored(index)]
        rows = index % self.ring.size
        self.tree.set(rows, np.where(self.ring.is_complete(index, self.lookahead), self.priority[rows], 0.0))

    def set(self, index: Array, priority: Array) -> None:
        """Set the priorities of sampled rows, except rows that have been overwritten."""
        if index.shape != priority.shape:
            raise UserError(f"set_priority got {list(priority.shape)} priorities for {list(index.shape)} indices")
        self._add_new_rows()
        # non-finite errors are not priorities; the check of losses reports them
        usable = self.ring.is_stored(index) & np.isfinite(priority)
        if 0 in usable.tobytes():
            index, priority = index[usable], priority[usable]
        if len(index) == 0:
            return
        weight = (np.abs(priority.astype(np.float64)) + self.settings.epsilon) ** self.settings.alpha
        self.max_priority = max(self.max_priority, float(weight.max()))
        rows = index % self.ring.size
        self.priority[rows] = weight
        if self._all_complete:
            self.tree.set(rows, weight)
        else:
            self._update_weights(index)

    def sample(self, n: int, rng: np.random.Generator) -> tuple[Array, Array]:
        """Return the indices of `n` rows and their importance weights."""
        self._add_new_rows()
        total = self.tree.total
        if total <= 0:
            raise_empty(self.ring)
        rows = self.tree.find((np.arange(n) + rng.random(n)) * (total / n))
        s = self.settings
        beta = linear_schedule(s.beta_start, s.beta_end, self.progress)
        weight = self.tree.weights[rows]
        # Σ p^α and len cancel in the division by the largest weight, which is that of the smallest priority
        return self.ring.to_index(rows), ((weight.min() / weight) ** beta).astype(np.float32)

    def clear(self) -> None:
        self.tree, self._count = SumTree(self.ring.size), self.ring.count.copy()

    def state_dict(self) -> dict[str, Any]:
        self._add_new_rows()
        return {"priority": self.priority, "max_priority": self.max_priority}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore priorities. The rows of the ring must be restored before."""
        self.priority[:] = state["priority"]
        self.max_priority = float(state["max_priority"])
        self.clear()
        self._update_weights(self.ring.indices())

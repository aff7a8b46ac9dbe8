"""Which rows a sample takes: all alike, in proportion to a priority, or from a reservoir."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from zhixing.buffers.fields import Array
from zhixing.buffers.ring import Ring
from zhixing.buffers.sum_tree import SumTree
from zhixing.buffers.views import Storage, View
from zhixing.errors import UserError
from zhixing.ops.schedules import linear_schedule


@dataclass(frozen=True)
class Uniform:
    """Every row that the view allows is as likely as any other."""


@dataclass(frozen=True)
class Reservoir:
    """Uniform over a subset that is itself uniform over all transitions ever added; see reservoir.py."""

    seed: int = 0


@dataclass(frozen=True)
class Prioritized:
    """Proportional prioritized replay (Schaul et al., 2016).   P(i) = p_i^α / Σ p^α,   p_i = |priority| + ε

    weight_i = (P(i) · len)^-β / max_j weight_j, the maximum over the batch as in the paper's algorithm 1; so the
    largest weight is always 1. Draws are stratified: one from each of n equal parts of the total. β grows from
    `beta_start` to `beta_end` over the run, with what `Buffer.set_progress` is given.
    """

    alpha: float = 0.6
    beta_start: float = 0.4
    beta_end: float = 1.0
    epsilon: float = 1e-6

    def __post_init__(self) -> None:
        if self.alpha < 0 or self.epsilon <= 0:
            raise UserError(f"Prioritized(alpha={self.alpha}, epsilon={self.epsilon}): need alpha >= 0 and epsilon > 0")


def draw_uniform(n: int, rng: np.random.Generator, storage: Storage, view: View) -> Array:
    """Indices of `n` rows among those the view allows."""
    candidates = view.candidates(storage)
    if candidates is not None or len(storage) == 0:
        return _pick(candidates, n, rng, storage)
    index = storage.uniform(n, rng)
    if not isinstance(storage, Ring) or (view.ahead == 0 and storage.frame_stack == 1):
        return index
    # draw anew what isn't allowed: the rest stays uniform
    for _ in range(20):
        wrong = np.flatnonzero(~storage.allowed(index, view.ahead))
        if len(wrong) == 0:
            return index
        index[wrong] = storage.uniform(len(wrong), rng)
    # hardly any row is allowed: look at all of them
    index = storage.all()
    return _pick(index[storage.allowed(index, view.ahead)], n, rng, storage)


def _pick(candidates: Array | None, n: int, rng: np.random.Generator, storage: Storage) -> Array:
    if candidates is None or len(candidates) == 0:
        raise UserError(
            f"nothing to sample yet: {len(storage)} transitions are stored and the view finds none to begin with"
        )
    return candidates[(rng.random(n) * len(candidates)).astype(np.int64)]


class Priorities:
    """The priorities of a ring's rows under `Prioritized`. Rows that the view forbids keep theirs but weigh nothing.

    Rows that were added get theirs only when somebody asks (`_catch_up`): many at once cost little more than one.
    """

    def __init__(self, settings: Prioritized, ring: Ring, ahead: int) -> None:
        self.settings, self.ring, self.ahead = settings, ring, ahead
        self._all_allowed = ahead == 0 and ring.frame_stack == 1
        self.tree = SumTree(ring.size)
        self.priority = np.zeros(ring.size)  # p^α of every row
        self.highest = 1.0  # for new rows: the maximum so far, that each is seen once soon
        self.progress = 0.0  # how much of the run's budget is used, 0 to 1
        self._seen = ring.mark()  # rows up to here have their priority

    def _catch_up(self) -> None:
        """Rows that were added since the last time get the highest priority so far."""
        ring, N = self.ring, self.ring.num_envs
        if self._seen.tobytes() == ring.count.tobytes():
            return
        seen, self._seen = self._seen, ring.mark()
        index = ring.since(seen)
        flat = ring.flat(index)
        self.priority[flat] = self.highest
        columns = np.arange(N)
        # where the newest successor lies is no transition
        self.tree.set(ring.flat(ring.count * N + columns), 0.0)
        if self._all_allowed:
            self.tree.set(flat, self.highest)
            return
        # rows before the new ones may now have enough after them, the oldest ones may have lost frames
        before = (seen - np.arange(1, self.ahead + 1)[:, None]) * N + columns
        oldest = (ring.oldest + np.arange(ring.frame_stack)[:, None]) * N + columns
        self._weigh(np.concatenate([index, before.reshape(-1), oldest.reshape(-1)]))

    def fill(self) -> None:
        """All rows are there already, each as likely as any other."""
        self.priority[:] = self.highest
        self._weigh(self.ring.all())

    def _weigh(self, index: Array) -> None:
        index = index[(index >= 0) & self.ring.live(index)]
        flat = index % self.ring.size
        self.tree.set(flat, np.where(self.ring.allowed(index, self.ahead), self.priority[flat], 0.0))

    def set(self, index: Array, priority: Array) -> None:
        """New priorities after an update; rows overwritten since they were drawn are passed over."""
        if index.shape != priority.shape:
            raise UserError(f"set_priority got {list(priority.shape)} priorities for {list(index.shape)} indices")
        self._catch_up()
        # an error that isn't finite says nothing of its row; whoever watches the losses will tell
        usable = self.ring.live(index) & np.isfinite(priority)
        if 0 in usable.tobytes():
            index, priority = index[usable], priority[usable]
        if len(index) == 0:
            return
        weight = (np.abs(priority.astype(np.float64)) + self.settings.epsilon) ** self.settings.alpha
        self.highest = max(self.highest, float(weight.max()))
        flat = index % self.ring.size
        self.priority[flat] = weight
        if self._all_allowed:
            self.tree.set(flat, weight)
        else:
            self._weigh(index)

    def draw(self, n: int, rng: np.random.Generator) -> tuple[Array, Array]:
        """Indices of `n` rows and their importance weights."""
        self._catch_up()
        total = self.tree.total
        if total <= 0:
            _pick(None, n, rng, self.ring)
        flat = self.tree.find((np.arange(n) + rng.random(n)) * (total / n))
        s = self.settings
        beta = linear_schedule(s.beta_start, s.beta_end, self.progress)
        weight = self.tree.weights[flat]
        # Σ p^α and len cancel against the largest weight, which is that of the smallest priority drawn
        return self.ring.index_of(flat), ((weight.min() / weight) ** beta).astype(np.float32)

    def clear(self) -> None:
        self.tree, self._seen = SumTree(self.ring.size), self.ring.mark()

    def state(self) -> dict[str, Any]:
        self._catch_up()
        return {"priority": self.priority, "highest": self.highest}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """After the ring's own rows were restored."""
        self.priority[:] = state["priority"]
        self.highest = float(state["highest"])
        self.clear()
        self._weigh(self.ring.all())

"""The steps of one `collect`, `[T,N]`, in memory that is allocated once and written again each time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from zhixing.buffers.fields import SUCCESSORS
from zhixing.core.batch import Batch
from zhixing.core.tree import Field, Tree, tree_map

Lasts = dict[str, list[tuple[int, np.ndarray[Any, Any], Tree]]]  # by name: at which step, of which environments, what


class Part(NamedTuple):
    """A rollout on its way from one process to another."""

    num_steps: int
    arrays: dict[str, Tree]  # fields with successors have a row more
    final_obs_pool: Lasts


class Rollout:
    """`next_obs` isn't kept twice: it is the next row's `obs`, but for the true last observations of episodes."""

    def __init__(self, spec: Mapping[str, Tree], num_steps: int, num_envs: int) -> None:
        self.num_steps, self.num_envs = num_steps, num_envs
        self.arrays: dict[str, Tree] = {}
        for name, tree in spec.items():
            rows = num_steps + (name in SUCCESSORS)

            def allocate(field: Field, rows: int = rows) -> np.ndarray[Any, Any]:
                return np.zeros((rows, num_envs, *field.shape), field.dtype)

            self.arrays[name] = tree_map(allocate, tree)
        self._lasts: Lasts = {}
        self._views: tuple[int, dict[str, Tree]] = (-1, {})  # the rows that `batch` gave last
        self.clear()

    def clear(self) -> None:
        self._lasts = {name: [] for name in SUCCESSORS if name in self.arrays}

    def write(self, t: int, **values: Tree) -> None:
        for name, value in values.items():
            _write(self.arrays[name], t, value)

    def write_last(self, t: int, envs: np.ndarray[Any, Any], name: str, tree: Tree) -> None:
        """What environments `envs` showed after step t, where their episodes ended (`tree [N,...]`)."""
        self._lasts[name].append((t, envs, tree_map(lambda leaf: leaf[envs].copy(), tree)))

    def take(self, other: Rollout) -> None:
        """Copy the rows and last observations of a shorter rollout to the front of this one."""
        for name, tree in other.arrays.items():
            tree_map(lambda mine, theirs: mine[: len(theirs)].__setitem__(..., theirs), self.arrays[name], tree)
        self._lasts = other._lasts

    def part(self, num_steps: int) -> Part:
        """The first `num_steps` rows to send away: successors once, not as a copy of their own."""
        arrays = {
            name: tree_map(lambda leaf, more=name in SUCCESSORS: leaf[: num_steps + more], tree)
            for name, tree in self.arrays.items()
        }
        return Part(num_steps, arrays, self._lasts)

    @staticmethod
    def joined(parts: Sequence[Part]) -> Batch:
        """Parts of equal length as one batch `[T,N]`, their environments side by side."""
        rollout = Rollout.__new__(Rollout)
        rollout.num_steps = parts[0].num_steps
        rollout.arrays = {  # copies even of a single one: what comes from elsewhere may only be read
            name: tree_map(lambda *leaves: np.concatenate(leaves, 1), *(part.arrays[name] for part in parts))
            for name in parts[0].arrays
        }
        rollout._lasts, first = {name: [] for name in parts[0].final_obs_pool}, 0
        for part in parts:
            for name, final_obs_pool in part.final_obs_pool.items():
                rollout._lasts[name] += [(t, first + envs, tree) for t, envs, tree in final_obs_pool]
            first += part.arrays["terminated"].shape[1]
        rollout.num_envs, rollout._views = first, (-1, {})
        return rollout.batch()

    def batch(self, num_steps: int | None = None) -> Batch:
        """The first `num_steps` rows, as views that the next `collect` overwrites."""
        steps = self.num_steps if num_steps is None else num_steps
        if steps != self._views[0]:
            rows = {name: tree_map(lambda leaf: leaf[:steps], tree) for name, tree in self.arrays.items()}
            after = {SUCCESSORS[name]: partial(self._successors, name, steps) for name in self._lasts}
            self._views = steps, rows | after
        return Batch(**self._views[1])

    def _successors(self, name: str, steps: int) -> Tree:
        following = tree_map(lambda leaf: leaf[1 : steps + 1].copy(), self.arrays[name])
        for t, envs, last in self._lasts[name]:
            tree_map(lambda leaf, rows, t=t, envs=envs: leaf[t].__setitem__(envs, rows), following, last)
        return following


def _write(target: Tree, t: int, value: Tree) -> None:
    if isinstance(target, np.ndarray):
        target[t] = value
    elif isinstance(target, Mapping):
        for key in target:
            _write(target[key], t, value[key])
    else:
        for part, new in zip(target, value, strict=True):
            _write(part, t, new)

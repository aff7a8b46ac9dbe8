"""The steps `[T,N]` of one `collect`, in arrays that are allocated once and reused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from zhixing.buffers.fields import SUCCESSORS
from zhixing.core.batch import Batch
from zhixing.core.tree import Field, Tree, tree_map

# by field: the step at which episodes ended, the environments, and the values after their last step
FinalFields = dict[str, list[tuple[int, np.ndarray[Any, Any], Tree]]]


class RolloutPart(NamedTuple):
    """The data of a rollout, to be sent to another process."""

    num_steps: int
    arrays: dict[str, Tree]  # fields with successors have one row more
    final_fields: FinalFields


class Rollout:
    """Store steps without a second copy of `next_obs`: it is the next row's `obs`, except at the end of episodes."""

    def __init__(self, spec: Mapping[str, Tree], num_steps: int, num_envs: int) -> None:
        self.num_steps, self.num_envs = num_steps, num_envs
        self.arrays: dict[str, Tree] = {}
        for name, tree in spec.items():
            rows = num_steps + (name in SUCCESSORS)

            def allocate(field: Field, rows: int = rows) -> np.ndarray[Any, Any]:
                return np.zeros((rows, num_envs, *field.shape), field.dtype)

            self.arrays[name] = tree_map(allocate, tree)
        self._final_fields: FinalFields = {}
        self._views: tuple[int, dict[str, Tree]] = (-1, {})  # the length and fields of the last `batch`
        self.clear()

    def clear(self) -> None:
        """Discard the final values of the last `collect`."""
        self._final_fields = {name: [] for name in SUCCESSORS if name in self.arrays}

    def write(self, t: int, **values: Tree) -> None:
        for name, value in values.items():
            _write(self.arrays[name], t, value)

    def write_final(self, t: int, envs: np.ndarray[Any, Any], name: str, tree: Tree) -> None:
        """Store the values `tree [N,...]` of a field after step t for `envs`, whose episodes ended at this step."""
        self._final_fields[name].append((t, envs, tree_map(lambda leaf: leaf[envs].copy(), tree)))

    def copy_from(self, shorter: Rollout) -> None:
        """Copy the rows and final values of a shorter rollout to the beginning of this one."""
        for name, tree in shorter.arrays.items():
            tree_map(lambda target, source: target[: len(source)].__setitem__(..., source), self.arrays[name], tree)
        self._final_fields = shorter._final_fields

    def to_part(self, num_steps: int) -> RolloutPart:
        """Return the data of the first `num_steps` rows, without a second copy of successors."""
        arrays = {
            name: tree_map(lambda leaf, extra=name in SUCCESSORS: leaf[: num_steps + extra], tree)
            for name, tree in self.arrays.items()
        }
        return RolloutPart(num_steps, arrays, self._final_fields)

    @staticmethod
    def join(parts: Sequence[RolloutPart]) -> Batch:
        """Concatenate the environments of parts of equal length to one batch `[T,N]`."""
        rollout = Rollout.__new__(Rollout)
        rollout.num_steps = parts[0].num_steps
        rollout.arrays = {  # copies even a single part: arrays from another process may be read-only
            name: tree_map(lambda *leaves: np.concatenate(leaves, 1), *(part.arrays[name] for part in parts))
            for name in parts[0].arrays
        }
        rollout._final_fields, first = {name: [] for name in parts[0].final_fields}, 0
        for part in parts:
            for name, entries in part.final_fields.items():
                rollout._final_fields[name] += [(t, first + envs, tree) for t, envs, tree in entries]
            first += part.arrays["terminated"].shape[1]
        rollout.num_envs, rollout._views = first, (-1, {})
        return rollout.batch()

    def batch(self, num_steps: int | None = None) -> Batch:
        """Return the first `num_steps` rows as views, which the next `collect` overwrites."""
        steps = self.num_steps if num_steps is None else num_steps
        if steps != self._views[0]:
            rows = {name: tree_map(lambda leaf: leaf[:steps], tree) for name, tree in self.arrays.items()}
            successors = {SUCCESSORS[name]: partial(self._successors, name, steps) for name in self._final_fields}
            self._views = steps, rows | successors
        return Batch(**self._views[1])

    def _successors(self, name: str, steps: int) -> Tree:
        successors = tree_map(lambda leaf: leaf[1 : steps + 1].copy(), self.arrays[name])
        for t, envs, final in self._final_fields[name]:
            tree_map(lambda leaf, values, t=t, envs=envs: leaf[t].__setitem__(envs, values), successors, final)
        return successors


def _write(target: Tree, t: int, value: Tree) -> None:
    if isinstance(target, np.ndarray):
        target[t] = value
    elif isinstance(target, Mapping):
        for key in target:
            _write(target[key], t, value[key])
    else:
        for part, new in zip(target, value, strict=True):
            _write(part, t, new)

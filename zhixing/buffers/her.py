"""Hindsight experience replay (Andrychowicz et al., 2017): what was reached, though not asked for, becomes the goal.

For tasks whose observations are dicts with `achieved_goal` and `desired_goal` and that tell the reward of any pair of
them, as Gymnasium-Robotics has it. The strategy is `future`, `ratio` the paper's k / (k + 1).
Differs from the paper: goals are drawn when transitions are sampled, not stored when episodes end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from zhixing.buffers.fields import Array
from zhixing.buffers.ring import Ring
from zhixing.core.goals import Compute, one_per_row
from zhixing.core.tree import Field, Tree
from zhixing.errors import UserError

GOALS = ("achieved_goal", "desired_goal")


@dataclass(frozen=True)
class Hindsight:
    """`ratio` of the transitions get a goal that their own episode reached at that or a later step, as far as stored.

    `compute_reward` is the task's own; `compute_terminated` too, if reaching the goal ends its episodes. They get an
    empty info. Those that don't take many rows at once are called for each.
    """

    compute_reward: Compute
    compute_terminated: Compute | None = None
    ratio: float = 0.8

    def __post_init__(self) -> None:
        if not 0.0 <= self.ratio <= 1.0:
            raise UserError(f"Hindsight(ratio={self.ratio}): ratio must be in [0, 1]")

    def check(self, spec: Mapping[str, Tree]) -> None:
        """Refuse a buffer's spec without goals."""
        obs = spec["obs"]
        parts = dict(obs) if isinstance(obs, Mapping) else {}
        missing = [part for part in GOALS if not isinstance(parts.get(part), Field)]
        if missing:
            shown = f"only {', '.join(parts)}" if parts else "one array"
            raise UserError(
                f"hindsight needs observations with {' and '.join(GOALS)}; {' and '.join(missing)} "
                f"{'is' if len(missing) == 1 else 'are'} missing, the task shows {shown}"
            )
        achieved, desired = (parts[part].shape for part in GOALS)
        if achieved != desired:
            raise UserError(
                f"hindsight: achieved_goal has shape {achieved}, desired_goal {desired}; they must be equal"
            )

    def relabel(self, ring: Ring, index: Array, fields: dict[str, Tree], rng: np.random.Generator) -> dict[str, Tree]:
        """The fields of the transitions `index` [B], some of them with other goals."""
        rows = np.flatnonzero(rng.random(len(index)) < self.ratio)
        if len(rows) == 0:
            return fields
        index = index[rows]
        later = (rng.random(len(rows)) * (steps_left(ring, index) + 1)).astype(np.int64)
        goal = ring.successor("obs", ring.flat(index + later * ring.num_envs))["achieved_goal"]
        at = ring.table.tensor(rows)

        def exchanged(old: Any, new: Any) -> Any:
            """A copy with `new` at the rows."""
            return old.index_copy(0, at, new.to(old.dtype))

        changed = {
            name: {**fields[name], "desired_goal": exchanged(fields[name]["desired_goal"], goal)}
            for name in ("obs", "next_obs")
        }
        achieved, desired = (changed["next_obs"][part][at].cpu().numpy() for part in GOALS)
        found = {"reward": one_per_row(self.compute_reward, achieved, desired)}
        if self.compute_terminated is not None:
            found["terminated"] = one_per_row(self.compute_terminated, achieved, desired)
        told = {name: exchanged(fields[name], ring.table.tensor(values)) for name, values in found.items()}
        return {**fields, **changed, **told}


def steps_left(ring: Ring, index: Array) -> Array:
    """How many stored rows of the same episode follow each of these.

    The row k later belongs to the episode exactly if its own began at the same row. So the last such k is found by
    doubling and halving, however long episodes are.
    """
    position, column = np.divmod(index, ring.num_envs)
    stored = ring.count[column] - 1 - position
    episode_start = ring.episode_start[ring.flat(index)]

    def belongs(k: Any) -> Array:
        same: Array = (k <= stored) & (ring.episode_start[ring.flat(index + k * ring.num_envs)] == episode_start)
        return same

    stride = 1
    while belongs(stride).any():
        stride *= 2
    left = np.zeros_like(index)
    while stride > 1:
        stride //= 2
        left += stride * belongs(left + stride)
    return left

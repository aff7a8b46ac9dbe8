"""Hindsight experience replay (Andrychowicz et al., 2017): replace goals by goals that the episode achieved later.

For environments whose observations are dicts with `achieved_goal` and `desired_goal` and that compute the reward of any
pair of goals, as in Gymnasium-Robotics. The strategy is `future`; `ratio` is the paper's k / (k + 1).
Differs from the paper: goals are replaced when transitions are sampled, not stored when episodes end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from zhixing.buffers.fields import Array
from zhixing.buffers.ring import Ring
from zhixing.core.goals import GoalFunction, compute_per_row
from zhixing.core.tree import Field, Tree
from zhixing.errors import UserError

GOALS = ("achieved_goal", "desired_goal")


@dataclass(frozen=True)
class HER:
    """Relabel the fraction `ratio` of sampled transitions with a goal achieved at that or a later stored step.

    `compute_reward` is the environment's method; so is `compute_terminated`, for environments where reaching the goal
    ends the episode. Their info has the values that `env.info_fields` declares. Functions that don't accept batches are
    called once per row.
    """

    compute_reward: GoalFunction
    compute_terminated: GoalFunction | None = None
    ratio: float = 0.8

    def __post_init__(self) -> None:
        if not 0.0 <= self.ratio <= 1.0:
            raise UserError(f"HER(ratio={self.ratio}): ratio must be in [0, 1]")

    def check(self, spec: Mapping[str, Tree]) -> None:
        """Raise `UserError` if a buffer's spec has no goals."""
        obs = spec["obs"]
        parts = dict(obs) if isinstance(obs, Mapping) else {}
        missing = [part for part in GOALS if not isinstance(parts.get(part), Field)]
        if missing:
            actual = f"only {', '.join(parts)}" if parts else "one array"
            raise UserError(
                f"HER needs observations with {' and '.join(GOALS)}; {' and '.join(missing)} "
                f"{'is' if len(missing) == 1 else 'are'} missing, the environment has {actual}"
            )
        achieved, desired = (parts[part].shape for part in GOALS)
        if achieved != desired:
            raise UserError(f"HER: achieved_goal has shape {achieved}, desired_goal {desired}; they must be equal")

    def relabel(self, ring: Ring, index: Array, fields: dict[str, Tree], rng: np.random.Generator) -> dict[str, Tree]:
        """Return the fields of the transitions `index` [B] with some goals replaced and their rewards recomputed."""
        chosen = np.flatnonzero(rng.random(len(index)) < self.ratio)
        if len(chosen) == 0:
            return fields
        index = index[chosen]
        offset = (rng.random(len(chosen)) * (steps_left(ring, index) + 1)).astype(np.int64)
        goal = ring.take_successors("obs", ring.to_row(index + offset * ring.num_envs))["achieved_goal"]
        at = ring.store.to_tensor(chosen)

        def replace(old: Any, new: Any) -> Any:
            """Return a copy with `new` at the chosen transitions."""
            return old.index_copy(0, at, new.to(old.dtype))

        obs = {
            name: {**fields[name], "desired_goal": replace(fields[name]["desired_goal"], goal)}
            for name in ("obs", "next_obs")
        }
        achieved, desired = (obs["next_obs"][part][at].cpu().numpy() for part in GOALS)
        info = {key: values[at].cpu().numpy() for key, values in fields.get("info", {}).items()}
        outcome = {"reward": compute_per_row(self.compute_reward, achieved, desired, info)}
        if self.compute_terminated is not None:
            outcome["terminated"] = compute_per_row(self.compute_terminated, achieved, desired, info)
        replaced = {name: replace(fields[name], ring.store.to_tensor(values)) for name, values in outcome.items()}
        return {**fields, **obs, **replaced}


def steps_left(ring: Ring, index: Array) -> Array:
    """Return how many stored rows of the same episode follow each of these.

    The row k steps later belongs to the episode if both have the same `episode_start`. So a binary search finds the
    last such k, however long episodes are.
    """
    position, column = np.divmod(index, ring.num_envs)
    newest_offset = ring.count[column] - 1 - position
    episode_start = ring.episode_start[ring.to_row(index)]

    def in_episode(k: Any) -> Array:
        rows = ring.to_row(index + k * ring.num_envs)
        result: Array = (k <= newest_offset) & (ring.episode_start[rows] == episode_start)
        return result

    stride = 1
    while in_episode(stride).any():
        stride *= 2
    left = np.zeros_like(index)
    while stride > 1:
        stride //= 2
        left += stride * in_episode(left + stride)
    return left

"""Interfaces between collecting and training: `Collector` for training, `Evaluator` for evaluations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
from torch import Tensor

from zhixing.collectors.evaluation import Episode, Evaluation
from zhixing.core.batch import Batch
from zhixing.core.learner import Gradients, Update
from zhixing.core.policy import Phase
from zhixing.core.tree import tree_map
from zhixing.errors import UserError


class Experience(NamedTuple):
    """Result of `collect`: steps `[T,N]` and the episodes that ended in them."""

    batch: Batch
    episodes: list[Episode]


class WorkerExperience(NamedTuple):
    """Result of `collect_from_worker`: the experience of one worker, and what the worker computed from it."""

    batch: Batch | None  # steps [T,n]
    episodes: list[Episode]
    envs: np.ndarray[Any, Any]  # [n] indices of the worker's environments
    gradients: Gradients | None = None  # of the learner's loss on these steps
    update: Update | None = None  # set if parameter servers have applied the gradients
    priority: np.ndarray[Any, Any] | None = None  # [T,n] for a prioritized replay


class Collector(Protocol):
    """Collects experience for a trainer.

    To write a custom collector, derive from this class and implement `collect`, `state_dict` and `load_state_dict`. All
    other members have defaults.
    """

    env_steps: int = 0  # over all environments, from the start of the run
    schedule_lead: int = 0  # environment steps by which the policy's schedules are ahead of `env_steps`

    def collect(
        self, steps: int | None = None, episodes: int | None = None, phase: Phase = Phase.COLLECT
    ) -> Experience:
        """Take `steps` steps in each environment, or step until `episodes` have ended.

        The next call may overwrite the batch's arrays.
        """
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the state that `collect` needs to continue exactly."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> list[int]:
        """Restore a saved state. Return the indices of environments that start a new episode instead of continuing."""
        ...

    def start(self) -> None:
        """Start processes and the like. Called once before training; the time doesn't count as training time."""
        return None

    def drain(self) -> None:
        """Copy the current weights to the learner if another process has them.

        Called before evaluations and checkpoints.
        """
        return None

    def close(self) -> None:
        """Release environments and processes."""
        return None

    def copy_policy(self) -> None:
        """Switch to a copy of the policy, which changes only by `load_weights`."""
        raise UserError(f"{type(self).__name__} can't collect while the learner updates; set async_collect=false")

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Set the weights of the policy that `copy_policy` made."""
        raise UserError(f"{type(self).__name__} shares the learner's weights; it can't load others")

    def collect_from_worker(
        self, steps: int, phase: Phase = Phase.COLLECT, *, gradients: bool = False, priorities: bool = False
    ) -> WorkerExperience:
        """Return the experience of the first worker that has finished `steps` steps in its environments.

        With `gradients`, the worker computes gradients of its steps; with `priorities`, their priorities.
        """
        raise UserError(f"{type(self).__name__} has no workers; this trainer needs a distributed collector")

    @property
    def logged_info_keys(self) -> tuple[str, ...]:
        """Keys of `info` at the ends of episodes that are logged."""
        return ()

    @property
    def num_env_restarts(self) -> int:
        """Number of environments that failed and were restarted."""
        return 0

    @property
    def num_worker_restarts(self) -> int:
        """Number of workers that died and were restarted."""
        return 0

    @property
    def longest_running(self) -> int:
        """Steps of the longest unfinished episode; 0 if unknown."""
        return 0


class Evaluator(Protocol):
    """Plays fresh episodes with a policy: an `Actor` with separate environments, or matches in a game."""

    def evaluate(
        self, episodes: int, seed: int, on_step: Callable[[], None] = ..., max_steps: int | None = None
    ) -> Evaluation:
        """Play `episodes` fresh episodes and call `on_step` after each step. The same seed gives the same episodes."""
        ...

    @property
    def max_episode_steps(self) -> int | None:
        """The environment's time limit, if it has one."""
        ...

    def close(self) -> None: ...


def check_collect(steps: int | None, episodes: int | None) -> None:
    """Raise `ValueError` unless exactly one of the two is given."""
    if (steps is None) == (episodes is None):
        raise ValueError(f"collect takes either steps=... or episodes=..., not steps={steps} and episodes={episodes}")


def collect_episodes(collect: Callable[[int], Experience], episodes: int) -> Experience:
    """Call `collect(1)` until `episodes` have ended, and join the results."""
    batches: list[Batch] = []
    ended: list[Episode] = []
    while len(ended) < episodes:
        experience = collect(1)
        batches.append(_copy(experience.batch))
        ended += experience.episodes
    return Experience(Batch.cat(batches), ended)


def _copy(batch: Batch) -> Batch:
    """Copy all fields, including those computed when first read: the next `collect` overwrites their sources."""
    return Batch(**{name: tree_map(_copy_leaf, getattr(batch, name)) for name in batch.fields})


def _copy_leaf(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, Tensor) else np.array(leaf)

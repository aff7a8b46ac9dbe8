"""Environments that fail: what is done about it, and what counts as failing besides raising."""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Discrete, MultiDiscrete

from zhixing.core.spaces import Spaces, space_fields
from zhixing.core.tree import Tree, tree_leaves
from zhixing.envs.api import MisbehaviourError, problem_of
from zhixing.envs.env_spec import EnvSpec
from zhixing.envs.env_spec import Path as Keys
from zhixing.envs.vector.step_buffers import Array
from zhixing.errors import EnvCrashError

INTERRUPTED = "interrupted by a crash"  # stands among the last numbers of an episode that was
IN_A_ROW = 10  # failures without an episode that ended by itself: then replacing is no help
LONG = 8192  # numbers; BLAS may start threads for a longer product
ON_CRASH = ("stop", "replace")
CALL_SECONDS = 120.0  # simulators of games take a minute to start


@dataclass(frozen=True)
class FailurePolicy:
    """What is done when an environment raises, gives what it must not, hangs or dies."""

    on_crash: str = "stop"  # or `replace`: a new copy begins a new episode
    step_timeout: float | None = None  # how long a step may take; only worker processes can be ended
    folder: Path | None = None  # where capsules go that `zhixing replay` repeats
    call_timeout: float | None = None  # how long any other call may take, such as a constructor or a reset

    @staticmethod
    def of(vector: Any, folder: Path | None) -> FailurePolicy:
        """Return what the settings `vector` of a run ask for."""
        return FailurePolicy(vector.on_crash, vector.step_timeout, folder, vector.call_timeout)

    @property
    def replace(self) -> bool:
        return self.on_crash == "replace"

    @property
    def limited(self) -> bool:
        return self.step_timeout is not None or self.call_timeout is not None

    @property
    def guarded(self) -> bool:
        """Whether this asks for environments that can be ended, and so for worker processes."""
        return self.replace or self.limited

    @property
    def other_seconds(self) -> float | None:
        """The limit of calls that are no step. Where only steps have one, these have a generous one."""
        if self.call_timeout is not None or self.step_timeout is None:
            return self.call_timeout
        return max(CALL_SECONDS, 10.0 * self.step_timeout)


def crash_of(name: str, index: int, when: str, error: Exception, story: Mapping[str, Any] | None) -> EnvCrashError:
    """The error for one environment; `story` is what repeats its episode."""
    text = traceback.format_exc()
    problem = str(error) if isinstance(error, MisbehaviourError) else problem_of(error)
    if problem is not None:
        crash = EnvCrashError(f"environment {name} (index {index}) misbehaved at {when}: {problem}")
    else:
        crash = EnvCrashError(f"environment {name} (index {index}) crashed at {when}:\n{text}")
    if story is not None:
        what = {"type": type(error).__name__, "message": str(error), "traceback": text}
        crash.report = {"index": index, **story, "error": what}
    return crash


def keep_capsule(crash: EnvCrashError, faults: FailurePolicy, **about: Any) -> None:
    """Write down what repeats a crash, and say so in its message. Never hides the crash itself."""
    if faults.folder is None or crash.report is None:
        return
    from zhixing.envs.crash.crash_report import write  # only now: worker processes needn't wait for its imports

    try:
        told = write(
            faults.folder,
            {**about, "step_timeout": faults.step_timeout, "call_timeout": faults.call_timeout, **crash.report},
        )
    except OSError as error:
        told = f"its capsule can't be written to {faults.folder}: {error.strerror or error}"
    crash.report = None  # once is enough
    crash.args = (f"{str(crash).rstrip()}\n{told}",)


# --- observations ---


def fits_of(layout: EnvSpec) -> list[Callable[[Any], None]]:
    """For each array of an observation what refuses a value that its row can't hold: by shape, kind or size."""
    spaces, leaves = layout.spaces, leaf_spaces(layout.spaces.obs)
    return [_fit(space, spaces, keys) for space, keys in zip(leaves, layout.paths, strict=True)]


def leaf_spaces(space: gym.Space[Any]) -> list[gym.Space[Any]]:
    """In the order of a layout's paths."""
    if isinstance(space, gym.spaces.Dict):
        return [leaf for part in space.spaces.values() for leaf in leaf_spaces(part)]
    return [space]


def _fit(space: gym.Space[Any], spaces: Spaces, keys: Keys) -> Callable[[Any], None]:
    field = space_fields(space)
    shape, dtype, where = spaces.agents + field.shape, field.dtype, at(keys)

    def has_shape(value: Any) -> None:
        if getattr(value, "shape", None) != shape and np.shape(value) != shape:
            raise MisbehaviourError(f"its observation{where} has shape {np.shape(value)}; its space says {shape}")

    if dtype.kind == "f":
        return has_shape
    low, high = _whole_bounds(space, dtype)
    any_of_dtype = isinstance(space, Box)  # bounds narrower than the dtype's are the task's own business

    def is_whole(value: Any) -> None:
        has_shape(value)
        given = np.asarray(value)
        if any_of_dtype and given.dtype == dtype:
            return
        if given.dtype.kind not in "biu":
            raise MisbehaviourError(f"its observation{where} is of {given.dtype}; its space says {dtype}")
        wrong = (given < low) | (given > high)
        if wrong.any():
            raise MisbehaviourError(
                f"its observation{where} holds {given[wrong].flat[0]}; {space} takes {np.min(low)} to {np.max(high)}"
            )

    return is_whole


def _whole_bounds(space: gym.Space[Any], dtype: np.dtype[Any]) -> tuple[Any, Any]:
    if isinstance(space, Discrete):
        return space.start, space.start + space.n - 1
    if isinstance(space, MultiDiscrete):
        return space.start, space.start + space.nvec - 1
    if isinstance(space, Box) and dtype.kind in "iu":
        return np.iinfo(dtype).min, np.iinfo(dtype).max
    return 0, 1


def at(keys: Keys) -> str:
    """Where in an observation, for a message."""
    return f" at {'.'.join(map(str, keys))}" if keys else ""


# --- numbers that aren't finite ---


def finite(numbers: Array) -> bool:
    """Whether all are. Their sum mostly tells, and sooner than a question to each of them."""
    return math.isfinite(np.add.reduce(numbers)) or bool(np.isfinite(numbers).all())


def totals_of(*trees: Tree) -> list[Callable[[], float]]:
    """For each array of floats of many environments a number that isn't finite as soon as one of them isn't: a sum, of
    short arrays the product with zeros, which is quicker."""
    flat = [leaf.reshape(-1) for tree in trees for leaf in tree_leaves(tree) if leaf.dtype.kind == "f"]
    return [
        partial(leaf.dot, np.zeros_like(leaf)) if leaf.size < LONG else partial(np.add.reduce, leaf) for leaf in flat
    ]

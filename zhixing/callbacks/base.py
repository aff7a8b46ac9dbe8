"""Callbacks: what happens besides learning. Write your own by overriding what you need."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from zhixing.actor import Episode, Evaluation
    from zhixing.trainer import Loop


class Callback:
    """A context manager around training whose methods are told what happens. `loop.stop(reason)` ends training.

    What must survive a resume goes into `state_dict`, of plain things and tensors.
    """

    def __enter__(self) -> Callback:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def train_begin(self, loop: Loop) -> None: ...

    def iteration_begin(self, loop: Loop) -> None: ...

    def iteration_end(self, loop: Loop, metrics: Mapping[str, Tensor]) -> None:
        """After each round of collecting and updating. `metrics` is empty where nothing was updated yet."""

    def episode_end(self, loop: Loop, episode: Episode) -> None: ...

    def evaluation_end(self, loop: Loop, evaluation: Evaluation) -> None: ...

    def train_end(self, loop: Loop) -> None:
        """Training ended by its budget or by `loop.stop`; not after an exception."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def is_due(steps: int, before: int, every: int) -> bool:
    """Whether a multiple of `every` was passed since `before`; never where it is 0. Doesn't depend on resumes."""
    return every > 0 and steps // every > before // every

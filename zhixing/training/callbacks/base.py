"""Callbacks: what happens besides learning. Write your own by overriding what you need."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from zhixing.errors import UserError
from zhixing.training.callbacks.hooks import check_hooks

if TYPE_CHECKING:
    from torch import Tensor

    from zhixing.collect.evaluation import Episode, Evaluation
    from zhixing.training.loop import TrainingLoop


class EvaluationInterrupted(Exception):  # noqa: N818  # it is no error
    """An evaluation was asked to stop. It is repeated when the run is resumed."""


class Callback:
    """A context manager around training whose methods are told what happens. `loop.stop(reason)` ends training.

    What must survive a resume goes into `state_dict`, of plain things and tensors. A method that looks like a hook but
    is none, such as `on_step`, is an error when the class is made.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        check_hooks(cls)

    def __enter__(self) -> Callback:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def train_begin(self, loop: TrainingLoop) -> None: ...

    def iteration_begin(self, loop: TrainingLoop) -> None: ...

    def iteration_end(self, loop: TrainingLoop, metrics: Mapping[str, Tensor]) -> None:
        """After each round of collecting and updating. `metrics` is empty where nothing was updated yet."""

    def episode_end(self, loop: TrainingLoop, episode: Episode) -> None: ...

    def evaluation_step(self, loop: TrainingLoop) -> None:
        """After each step of an evaluation's environments."""

    def evaluation_end(self, loop: TrainingLoop, evaluation: Evaluation) -> None: ...

    def metric_logged(self, loop: TrainingLoop, name: str, value: float) -> None:
        """After `loop.log(name, value)`."""

    def video_recorded(self, loop: TrainingLoop, path: Path) -> None:
        """After an episode was recorded as an .mp4 file (`eval_video=true`)."""

    def train_end(self, loop: TrainingLoop) -> None:
        """Training ended by its budget or by `loop.stop`; not after an exception."""

    def close(self) -> None:
        """Release resources. Called when the session closes, also if training never started."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def is_due(steps: int, before: int, every: int) -> bool:
    """Whether a multiple of `every` was passed since `before`; never where it is 0. Doesn't depend on resumes."""
    return every > 0 and steps // every > before // every


def as_list(callbacks: Callback | Iterable[Callback]) -> list[Callback]:
    """Return one callback or several as a list; raise `UserError` for anything else."""
    several = [callbacks] if isinstance(callbacks, Callback | type) else list(callbacks)
    for one in several:
        if isinstance(one, type):
            raise UserError(f"callbacks are objects, not classes: write {one.__name__}() instead of {one.__name__}")
        if not isinstance(one, Callback):
            raise UserError(f"{one!r} is no callback: derive its class from zhixing.Callback")
    return several

"""Base class of callbacks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from zhixing.errors import UserError
from zhixing.training.callbacks.hooks import check_hooks

if TYPE_CHECKING:
    from torch import Tensor

    from zhixing.collectors.evaluation import Episode, Evaluation
    from zhixing.training.loop import TrainingLoop


class EvaluationInterrupted(Exception):  # noqa: N818  # not an error
    """Ends an evaluation early. A resumed run repeats it."""


class Callback:
    """A context manager around training. The loop calls its hooks; `loop.stop(reason)` in a hook ends training.

    Return state that a resumed run needs from `state_dict`: numbers, strings, tensors and containers of them. Defining
    a method that looks like a hook but isn't one, such as `on_step`, raises `UserError`.
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
        """Called after collecting and updating. `metrics` is empty before the first update."""

    def episode_end(self, loop: TrainingLoop, episode: Episode) -> None: ...

    def evaluation_step(self, loop: TrainingLoop) -> None:
        """Called after each step of the evaluation environments."""

    def evaluation_end(self, loop: TrainingLoop, evaluation: Evaluation) -> None: ...

    def metric_logged(self, loop: TrainingLoop, name: str, value: float) -> None:
        """Called by `loop.log(name, value)`."""

    def video_recorded(self, loop: TrainingLoop, path: Path) -> None:
        """Called after an episode was recorded as an .mp4 file (`eval_video=true`)."""

    def train_end(self, loop: TrainingLoop) -> None:
        """Called when the budget or `loop.stop` ends training, not after an exception."""

    def close(self) -> None:
        """Release resources. Called when the session closes, even if training never started."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def as_list(callbacks: Callback | Iterable[Callback]) -> list[Callback]:
    """Return one or several callbacks as a list. Raise `UserError` for anything else."""
    result = [callbacks] if isinstance(callbacks, Callback | type) else list(callbacks)
    for callback in result:
        if isinstance(callback, type):
            name = callback.__name__
            raise UserError(f"callbacks are objects, not classes: write {name}() instead of {name}")
        if not isinstance(callback, Callback):
            raise UserError(f"{callback!r} is not a callback: derive its class from zhixing.Callback")
    return result

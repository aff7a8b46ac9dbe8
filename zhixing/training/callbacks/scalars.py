"""Base of loggers that record scalars at environment steps."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from zhixing.core.state import check_state
from zhixing.training.callbacks.base import Callback
from zhixing.training.callbacks.csv import metrics_row, row_is_due

if TYPE_CHECKING:
    from torch import Tensor

    from zhixing.collectors.evaluation import Evaluation
    from zhixing.training.loop import TrainingLoop

TIME = ("updates", "episodes", "seconds", "steps_per_second")


class ScalarLogger(Callback):
    """Log the values of metrics.csv, at the same steps, in the groups of `tag`, and the results of evaluations."""

    saved: ClassVar[Mapping[str, Any]] = {"logged": dict[str, float]}  # attributes in checkpoints, and their types

    def __init__(self) -> None:
        self.logged: dict[str, float] = {}  # by `loop.log` since the last row
        self._evaluation: dict[str, float] = {}  # of this iteration

    @abstractmethod
    def write_scalars(self, values: Mapping[str, float], steps: int) -> None:
        """Record values by tag. Called at most once per step."""

    def evaluation_end(self, loop: TrainingLoop, evaluation: Evaluation) -> None:
        self._evaluation = {f"eval/{name}": value for name, value in evaluation.summary().items()}

    def metric_logged(self, loop: TrainingLoop, name: str, value: float) -> None:
        self.logged[name if "/" in name else f"custom/{name}"] = value

    def iteration_end(self, loop: TrainingLoop, metrics: Mapping[str, Tensor]) -> None:
        self._write(loop, row_is_due(loop))

    def train_end(self, loop: TrainingLoop) -> None:
        self._write(loop, not loop.interrupted)  # a resumed run writes the last row

    def _write(self, loop: TrainingLoop, with_row: bool) -> None:
        values, self._evaluation = self._evaluation, {}
        if with_row:
            row = metrics_row(loop)
            row.pop("env_steps")
            values = values | {tag(name, loop): row[name] for name in row if row[name] == row[name]} | self.logged
            self.logged = {}
        if values:
            self.write_scalars(values, loop.steps)

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.saved}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(check_state(type(self).__name__, state, self.saved))


def tag(column: str, loop: TrainingLoop) -> str:
    """Return the tag of a column of metrics.csv, with its group."""
    if column in TIME:
        return f"time/{column}"
    return f"train/{column}" if column in loop.learner.metrics else f"rollout/{column}"

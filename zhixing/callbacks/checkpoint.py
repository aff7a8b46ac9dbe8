"""Checkpoints: the newest few, and the best by evaluation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from zhixing.callbacks.base import Callback, is_due
from zhixing.checkpoint import RunFolder

if TYPE_CHECKING:
    from torch import Tensor

    from zhixing.actor import Evaluation
    from zhixing.trainer import Loop


class Checkpoint(Callback):
    """Stands last among the callbacks, so that what it saves has heard everything of its iteration."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self.best_return = math.nan

    def iteration_end(self, loop: Loop, metrics: Mapping[str, Tensor]) -> None:
        if is_due(loop.steps, loop.steps_before, loop.cfg.checkpoint_every_steps):
            self._save(loop)

    def evaluation_end(self, loop: Loop, evaluation: Evaluation) -> None:
        if not evaluation.mean_return <= self.best_return:
            self.best_return = evaluation.mean_return
            with loop.paused():
                self.folder.save_best(loop.learner.policy.state_dict(), loop.steps, evaluation.mean_return)

    def train_end(self, loop: Loop) -> None:
        self._save(loop)

    def _save(self, loop: Loop) -> None:
        with loop.paused():
            self.folder.save(loop)

    def state_dict(self) -> dict[str, Any]:
        return {"best_return": self.best_return}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)

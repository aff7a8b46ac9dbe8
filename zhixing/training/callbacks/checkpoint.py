"""Checkpoints: the newest few, and the best by evaluation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from zhixing.core.state import check_state
from zhixing.errors import UserError, note
from zhixing.training.callbacks.base import Callback, is_due
from zhixing.training.run_folder import RunFolder

if TYPE_CHECKING:
    from torch import Tensor

    from zhixing.collect.evaluation import Evaluation
    from zhixing.training.loop import TrainingLoop


class Checkpoint(Callback):
    """Stands last among the callbacks, so that what it saves has heard everything of its iteration.

    Where one can't be written training goes on, and the next one is tried when it is due. Only that of the end must be
    written: without it what was learned since the last one is lost.
    """

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self.best_return = math.nan

    def iteration_end(self, loop: TrainingLoop, metrics: Mapping[str, Tensor]) -> None:
        # also before the evaluation at the end, which may take long
        if is_due(loop.steps, loop.steps_before, loop.cfg.checkpoint_every_steps) or loop.ending:
            try:
                self._save(loop)
            except OSError as error:
                kept = self.folder.newest_step()
                last = "there is none yet" if kept is None else f"the last one is of step {kept:,}"
                note(f"no checkpoint at step {loop.steps:,}, {self._reason(error)}; {last}, and training goes on")

    def evaluation_end(self, loop: TrainingLoop, evaluation: Evaluation) -> None:
        if not evaluation.mean_return <= self.best_return:
            self.best_return = evaluation.mean_return
            try:
                with loop.paused():
                    self.folder.save_best(
                        loop.learner.policy.state_dict(), loop.steps, evaluation.mean_return, loop.longest_so_far
                    )
            except OSError as error:
                note(f"the best weights so far aren't kept, {self._reason(error)}; training goes on")

    def train_end(self, loop: TrainingLoop) -> None:
        loop.finished = not loop.interrupted
        try:
            self._save(loop)
        except OSError as error:
            kept = self.folder.newest_step()
            again = "" if kept is None else f" to do again what came after step {kept:,}"
            raise UserError(
                f"the last checkpoint is lost, {self._reason(error)}; make room or mend the folder, then "
                f"`zhixing resume {self.folder.path}`{again}"
            ) from None

    def _reason(self, error: OSError) -> str:
        return f"{self.folder.path} can't be written: {error.strerror or error}"

    def _save(self, loop: TrainingLoop) -> None:
        with loop.paused():
            self.folder.save(loop)

    def state_dict(self) -> dict[str, Any]:
        return {"best_return": self.best_return}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(check_state("the best checkpoint", state, {"best_return": float}))

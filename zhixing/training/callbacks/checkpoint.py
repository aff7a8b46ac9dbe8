"""Save the newest checkpoints and the best weights by evaluation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from zhixing.core.state import check_state
from zhixing.errors import UserError, note
from zhixing.training.callbacks.base import Callback
from zhixing.training.run_folder import RunFolder

if TYPE_CHECKING:
    from torch import Tensor

    from zhixing.collectors.evaluation import Evaluation
    from zhixing.training.loop import TrainingLoop


class Checkpoint(Callback):
    """Save checkpoints every `checkpoint_every` and at the end of training.

    It comes last among the callbacks, so a checkpoint holds the state of the others after the iteration. If a
    checkpoint can't be written, training continues and tries again when the next one is due. Only a failure at the end
    is an error, since the progress since the last checkpoint would be lost.
    """

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self.best_return = math.nan

    def iteration_end(self, loop: TrainingLoop, metrics: Mapping[str, Tensor]) -> None:
        # also before the final evaluation, which may take long
        if loop.is_due(loop.cfg.checkpoint_every) or loop.ending:
            try:
                self._save(loop)
            except OSError as error:
                newest = self.folder.newest_step()
                last = "there is none yet" if newest is None else f"the last one is from step {newest:,}"
                note(f"no checkpoint at step {loop.steps:,}, {self._reason(error)}; {last}, training continues")

    def evaluation_end(self, loop: TrainingLoop, evaluation: Evaluation) -> None:
        if not evaluation.mean_return <= self.best_return:
            self.best_return = evaluation.mean_return
            try:
                with loop.paused():
                    self.folder.save_best(
                        loop.learner.policy.state_dict(), loop.steps, evaluation.mean_return, loop.longest_so_far
                    )
            except OSError as error:
                note(f"the best weights so far aren't saved, {self._reason(error)}; training continues")

    def train_end(self, loop: TrainingLoop) -> None:
        loop.finished = not loop.interrupted
        try:
            self._save(loop)
        except OSError as error:
            newest = self.folder.newest_step()
            repeated = "" if newest is None else f" to repeat the training after step {newest:,}"
            raise UserError(
                f"the last checkpoint is lost, {self._reason(error)}; free disk space or repair the folder, then run "
                f"`zhixing resume {self.folder.path}`{repeated}"
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

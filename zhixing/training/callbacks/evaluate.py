"""Evaluation on environments of its own, and the end of training at a return."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from zhixing.collect.collector import Evaluator
from zhixing.collect.evaluation import Evaluation, default_eval_steps
from zhixing.core.seeding import derive_seed
from zhixing.core.state import check_state
from zhixing.errors import note
from zhixing.training.callbacks.base import Callback, is_due

if TYPE_CHECKING:
    from torch import Tensor

    from zhixing.training.loop import TrainingLoop

SAVED = {"last_return": float, "best_return": float, "at_steps": int, "reached": bool}
CONFIRM_EPISODES = 100  # what `stop_return` is judged by


class Evaluate(Callback):
    """Play `eval_episodes` fresh episodes every `eval_every_steps` and at the end of training.

    Episodes are cut after `eval_max_steps`. An evaluation that is interrupted has no result; it is repeated when the
    run is resumed.

    With `stop_return`, an evaluation that reaches it is confirmed by 100 further fresh episodes; if these average at
    least as much, training ends and the weights stay as they are.
    """

    def __init__(self, evaluator: Evaluator | None) -> None:
        """Without an evaluator the callback does nothing."""
        self.evaluator = evaluator
        self.last_return, self.best_return = math.nan, math.nan
        self.at_steps = -1
        self.reached = False
        self._noted = False

    def train_begin(self, loop: TrainingLoop) -> None:
        if self.reached:  # and was stopped before all that belongs to the end was done
            loop.stop("reached the return before")

    def iteration_end(self, loop: TrainingLoop, metrics: Mapping[str, Tensor]) -> None:
        # the last evaluation follows in `train_end`, after the checkpoint
        if is_due(loop.steps, loop.steps_before, loop.cfg.eval_every_steps) and not loop.ending:
            self._evaluate(loop)

    def train_end(self, loop: TrainingLoop) -> None:
        if self.at_steps != loop.steps and not loop.interrupted:
            self._evaluate(loop)

    def _evaluate(self, loop: TrainingLoop) -> None:
        if self.evaluator is None:
            return
        # the same stop gives the same seed, so a resumed run evaluates as one never stopped
        seed = derive_seed(loop.cfg.seed, "evaluation", loop.steps)
        target = loop.cfg.stop_return
        with loop.paused():
            evaluation = self._play(loop, loop.cfg.eval_episodes, seed)
            if target is not None and evaluation.mean_return >= target:
                evaluation = self._play(loop, CONFIRM_EPISODES, seed + 1)
                if evaluation.mean_return >= target:
                    self.reached = True
                    loop.stop(f"reached a mean return of {evaluation.mean_return:.6g} over {CONFIRM_EPISODES} episodes")
        self.at_steps = loop.steps
        self.last_return = evaluation.mean_return
        if not self.last_return <= self.best_return:  # also true of the first, after NaN
            self.best_return = self.last_return
        loop.evaluation_end(evaluation)

    def _play(self, loop: TrainingLoop, episodes: int, seed: int) -> Evaluation:
        assert self.evaluator is not None
        most = loop.cfg.eval_max_steps or default_eval_steps(self.evaluator.max_episode_steps, loop.longest_so_far)
        evaluation = self.evaluator.evaluate(episodes, seed, loop.evaluation_step, most)
        if evaluation.cut_episodes and not self._noted:
            self._noted = True
            note(
                f"{evaluation.cut_episodes} of {episodes} evaluation episodes were cut after {most:,} steps, at step "
                f"{loop.steps:,} of training; set env.max_episode_steps=... for a time limit, or another eval_max_steps"
            )
        return evaluation

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in SAVED}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(check_state("evaluations", state, SAVED))

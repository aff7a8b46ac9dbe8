"""Evaluate during training, and stop at a target return."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from zhixing.collectors.collector import Evaluator
from zhixing.collectors.evaluation import Evaluation, default_eval_steps
from zhixing.core.seeding import derive_seed
from zhixing.core.state import check_state
from zhixing.errors import note
from zhixing.training.callbacks.base import Callback

if TYPE_CHECKING:
    from torch import Tensor

    from zhixing.training.loop import TrainingLoop

SAVED = {"last_return": float, "best_return": float, "at_steps": int, "reached": bool}
CONFIRM_EPISODES = 100  # that must average `stop_return`


class Evaluate(Callback):
    """Play `eval_episodes` fresh episodes every `eval_every` and at the end of training.

    Episodes are cut after `eval_max_steps`. An interrupted evaluation has no result; a resumed run repeats it.

    If an evaluation reaches `stop_return`, 100 more fresh episodes follow. If they average at least `stop_return`,
    training ends with these weights.
    """

    def __init__(self, evaluator: Evaluator | None) -> None:
        """Without an evaluator the callback does nothing."""
        self.evaluator = evaluator
        self.last_return, self.best_return = math.nan, math.nan
        self.at_steps = -1
        self.reached = False
        self._noted = False

    def train_begin(self, loop: TrainingLoop) -> None:
        if self.reached:  # the run was interrupted after that and before it ended
            loop.stop("reached stop_return before the interruption")

    def iteration_end(self, loop: TrainingLoop, metrics: Mapping[str, Tensor]) -> None:
        # the last evaluation follows in `train_end`, after the checkpoint
        if loop.is_due(loop.cfg.eval_every) and not loop.ending:
            self._evaluate(loop)

    def train_end(self, loop: TrainingLoop) -> None:
        if self.at_steps != loop.steps and not loop.interrupted:
            self._evaluate(loop)

    def _evaluate(self, loop: TrainingLoop) -> None:
        if self.evaluator is None:
            return
        # the seed depends on the step only, so resumed runs evaluate the same episodes
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
        if not self.last_return <= self.best_return:  # also true for the first, as best_return is NaN
            self.best_return = self.last_return
        loop.evaluation_end(evaluation)

    def _play(self, loop: TrainingLoop, episodes: int, seed: int) -> Evaluation:
        assert self.evaluator is not None
        max_steps = loop.cfg.eval_max_steps or default_eval_steps(self.evaluator.max_episode_steps, loop.longest_so_far)
        evaluation = self.evaluator.evaluate(episodes, seed, loop.evaluation_step, max_steps)
        if evaluation.cut_episodes and not self._noted:
            self._noted = True
            note(
                f"{evaluation.cut_episodes} of {episodes} evaluation episodes were cut after {max_steps:,} steps, at "
                f"step {loop.steps:,} of training; set env.max_episode_steps for a time limit, or change eval_max_steps"
            )
        return evaluation

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in SAVED}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(check_state("evaluations", state, SAVED))

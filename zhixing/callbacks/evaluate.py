"""Evaluation on environments of its own, and the end of training at a return."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from zhixing.actor import Actor
from zhixing.callbacks.base import Callback, is_due
from zhixing.ops.seeding import stream

if TYPE_CHECKING:
    from torch import Tensor

    from zhixing.matches import Matches
    from zhixing.trainer import Loop

CONFIRM_EPISODES = 100  # what `stop_return` is judged by


class Evaluate(Callback):
    """Play `eval_episodes` fresh episodes every `eval_every_steps` and at the end of training.

    With `stop_return`, an evaluation that reaches it is confirmed by 100 further fresh episodes; if these average at
    least as much, training ends and the weights stay as they are.
    """

    def __init__(self, actor: Actor | Matches | None) -> None:
        """Without an actor there is nothing to play in, and nothing is done."""
        self.actor = actor
        self.last_return, self.best_return = math.nan, math.nan
        self.at_steps = -1
        self.reached = False

    def iteration_end(self, loop: Loop, metrics: Mapping[str, Tensor]) -> None:
        if is_due(loop.steps, loop.steps_before, loop.cfg.eval_every_steps):
            self._evaluate(loop)

    def train_end(self, loop: Loop) -> None:
        if self.at_steps != loop.steps and not loop.interrupted:
            self._evaluate(loop)

    def _evaluate(self, loop: Loop) -> None:
        if self.actor is None:
            return
        # the same stop gives the same seed, so a resumed run evaluates as one never stopped
        seed = stream(loop.cfg.seed, "evaluation", loop.steps)
        target = loop.cfg.stop_return
        with loop.paused():
            evaluation = self.actor.evaluate(loop.cfg.eval_episodes, seed)
            if target is not None and evaluation.mean_return >= target:
                evaluation = self.actor.evaluate(CONFIRM_EPISODES, seed + 1)
                if evaluation.mean_return >= target:
                    self.reached = True
                    loop.stop(f"reached a mean return of {evaluation.mean_return:.6g} over {CONFIRM_EPISODES} episodes")
        self.at_steps = loop.steps
        self.last_return = evaluation.mean_return
        if not self.last_return <= self.best_return:  # also true of the first, after NaN
            self.best_return = self.last_return
        loop.evaluation_end(evaluation)

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("last_return", "best_return", "at_steps", "reached")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)

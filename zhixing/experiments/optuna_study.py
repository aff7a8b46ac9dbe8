"""The trials of one folder in Optuna's hands: which values next, and whether one is worth going on with.

The only file that imports Optuna. Everything is kept in `study.db`, so that a kill loses nothing.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from zhixing import config
from zhixing.core.seeding import stream
from zhixing.errors import UserError
from zhixing.experiments.jobs import Job, JobEvent
from zhixing.experiments.sweep import result_of, single_threaded
from zhixing.experiments.tune import Choice, Outcome, Space, settings_of
from zhixing.utils.extras import require_extra

with require_extra("tuning", "tune"):
    import optuna
    from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
    from optuna.trial import Trial, TrialState

WAIT_TRIALS = 5  # that have ended, before others are judged by them
WAIT_FRACTION = 0.2  # of a trial's budget, before it is judged: early evaluations say little
STATES = {TrialState.COMPLETE: "complete", TrialState.PRUNED: "pruned", TrialState.FAIL: "failed"}


class Running(NamedTuple):
    trial: Trial
    reported: set[int]  # evaluations, by their number
    eval_every_steps: int = 0


class Study:
    """A trial is pruned when its best evaluation so far is below the median of the others' at that time."""

    def __init__(
        self, layers: Sequence[Mapping[str, Any]], spaces: Mapping[str, Space], out: Path, trials: int
    ) -> None:
        self.layers, self.spaces, self.out, self.trials = layers, spaces, out, trials
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.study = optuna.create_study(
            storage=f"sqlite:///{out / 'study.db'}",
            study_name="zhixing",
            direction="maximize",
            pruner=optuna.pruners.MedianPruner(n_startup_trials=WAIT_TRIALS),
            load_if_exists=True,
        )
        asked = json.dumps([list(layers), {name: list(space) for name, space in spaces.items()}], default=str)
        if self.study.user_attrs.get("asked", asked) != asked:
            raise UserError(f"{out} holds trials with other settings or ranges; choose another --out")
        self.study.set_user_attr("asked", asked)
        seed = next((layer["seed"] for layer in reversed(layers) if "seed" in layer), 0)
        before = self.study.get_trials(deepcopy=False)
        # with the same random numbers again, one that goes on would draw its first trials again
        self.study.sampler = optuna.samplers.TPESampler(seed=stream(seed, "trials", len(before)) % 2**32)
        self.distributions = {name: _distribution(space) for name, space in spaces.items()}
        self.running: dict[str, Running] = {}  # by the names of their jobs
        self.interrupted = deque(trial for trial in before if trial.state == TrialState.RUNNING)

    def next_job(self) -> Job | None:
        """First what was interrupted, then new trials."""
        while self.interrupted:
            frozen = self.interrupted.popleft()
            if frozen.params.keys() != self.spaces.keys():  # killed while it was drawn
                self.study.tell(frozen.number, state=TrialState.FAIL)
                continue
            trial = Trial(self.study, frozen._trial_id)  # Optuna has no public way back to one
            job = self._job(trial, set(frozen.intermediate_values))
            if job is not None:
                return job
        while len(self.study.get_trials(deepcopy=False)) < self.trials:
            job = self._job(self.study.ask(fixed_distributions=self.distributions), set())
            if job is not None:
                return job
        return None

    def _job(self, trial: Trial, reported: set[int]) -> Job | None:
        """None where there is nothing to do: it makes no sense, or it had ended when this process was killed."""
        name = f"trial-{trial.number:04d}"
        try:
            cfg = single_threaded(config.build(self.layers, settings_of(trial.params, self.spaces)))
        except UserError as error:
            self._tell_failure(trial, str(error))
            return None
        # a seed of its own: with one for all, settings would win that suit just this one
        cfg = cfg.model_copy(update={"seed": cfg.seed + trial.number})
        self.running[name] = Running(trial, reported, cfg.eval_every_steps)
        job = Job(name, self.out / name, cfg.model_dump(mode="json"), asks=True)
        result = result_of(job)
        if result is not None:
            self.end(name, result)
            return None
        return job

    def go_on(self, news: JobEvent) -> bool:
        """After an evaluation: whether the trial is worth it."""
        trial, reported, every = self.running[news.job]
        # compared by their number: trials with other rollouts evaluate at somewhat other steps
        number = news.told["steps"] // max(1, every)
        if number not in reported:  # one that goes on from a checkpoint repeats some
            trial.report(news.told["ret"], number)
            reported.add(number)
        if not WAIT_FRACTION <= news.told["fraction"] < 1.0 or not trial.should_prune():
            return True
        trial.set_user_attr("pruned", True)  # now: after a kill, its end would look like any other
        return False

    def end(self, name: str, result: Mapping[str, Any]) -> bool:
        """Returns whether it was pruned."""
        trial = self.running.pop(name).trial
        pruned = bool(trial.user_attrs.get("pruned"))
        if pruned:
            self.study.tell(trial, state=TrialState.PRUNED)
        else:
            self.study.tell(trial, result["final_return"])
        return pruned

    def fail(self, name: str, error: str) -> None:
        self._tell_failure(self.running.pop(name).trial, error)

    def _tell_failure(self, trial: Trial, error: str) -> None:
        trial.set_user_attr("error", error)
        self.study.tell(trial, state=TrialState.FAIL)

    def outcomes(self) -> list[Outcome]:
        found = []
        for trial in self.study.get_trials(deepcopy=False):
            told = trial.intermediate_values
            last = told[max(told)] if told else math.nan
            ret = last if trial.value is None else trial.value
            state = STATES.get(trial.state, "running")
            found.append(Outcome(trial.number, state, ret, dict(trial.params), trial.user_attrs.get("error", "")))
        return found


def _distribution(space: Space) -> BaseDistribution:
    if isinstance(space, Choice):
        return CategoricalDistribution(space.texts)
    if space.whole:
        return IntDistribution(int(space.low), int(space.high), log=space.log)
    return FloatDistribution(space.low, space.high, log=space.log)

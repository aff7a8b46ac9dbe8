"""An Optuna study of one folder: proposes the values of each trial and decides which trials to prune.

This is the only file that imports Optuna. The study is stored in `study.db`, so a killed process loses nothing.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from zhixing import config
from zhixing.core.seeding import derive_seed
from zhixing.errors import UserError
from zhixing.experiments.jobs import Job, JobEvent
from zhixing.experiments.sweep import read_result, single_threaded
from zhixing.experiments.tune import Choice, SearchSpace, TrialResult, trial_settings
from zhixing.utils.extras import require_extra

with require_extra("tuning", "tune"):
    import optuna
    from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
    from optuna.trial import Trial, TrialState

STARTUP_TRIALS = 5  # complete trials before any is pruned
PRUNE_AFTER_FRACTION = 0.2  # of a trial's budget: earlier evaluations don't predict the final return
STATES = {TrialState.COMPLETE: "complete", TrialState.PRUNED: "pruned", TrialState.FAIL: "failed"}


class Running(NamedTuple):
    trial: Trial
    reported: set[int]  # evaluations reported to Optuna, by number


class Study:
    """Prunes a trial whose best evaluation so far is below the median of the other trials' at the same point."""

    def __init__(
        self, layers: Sequence[Mapping[str, Any]], spaces: Mapping[str, SearchSpace], out: Path, num_trials: int
    ) -> None:
        self.layers, self.spaces, self.out, self.num_trials = layers, spaces, out, num_trials
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.study = optuna.create_study(
            storage=f"sqlite:///{out / 'study.db'}",
            study_name="zhixing",
            direction="maximize",
            pruner=optuna.pruners.MedianPruner(n_startup_trials=STARTUP_TRIALS),
            load_if_exists=True,
        )
        settings = json.dumps([list(layers), {name: list(space) for name, space in spaces.items()}], default=str)
        if self.study.user_attrs.get("settings", settings) != settings:
            raise UserError(f"{out} holds trials with other settings or ranges; choose another --out")
        self.study.set_user_attr("settings", settings)
        seed = next((layer["seed"] for layer in reversed(layers) if "seed" in layer), 0)
        earlier = self.study.get_trials(deepcopy=False)
        # the seed depends on the number of trials: otherwise a continued study would propose its first values again
        self.study.sampler = optuna.samplers.TPESampler(seed=derive_seed(seed, "trials", len(earlier)) % 2**32)
        self.distributions = {name: _distribution(space) for name, space in spaces.items()}
        self.running: dict[str, Running] = {}  # by job name
        self.interrupted = deque(trial for trial in earlier if trial.state == TrialState.RUNNING)

    def next_job(self) -> Job | None:
        """Return an interrupted trial's job if there is one, else a new trial's, or None if there are enough."""
        while self.interrupted:
            frozen = self.interrupted.popleft()
            if frozen.params.keys() != self.spaces.keys():  # killed while its values were sampled
                self.study.tell(frozen.number, state=TrialState.FAIL)
                continue
            trial = Trial(self.study, frozen._trial_id)  # Optuna has no public way to reopen a trial
            job = self._start_trial(trial, set(frozen.intermediate_values))
            if job is not None:
                return job
        while len(self.study.get_trials(deepcopy=False)) < self.num_trials:
            job = self._start_trial(self.study.ask(fixed_distributions=self.distributions), set())
            if job is not None:
                return job
        return None

    def _start_trial(self, trial: Trial, reported: set[int]) -> Job | None:
        """Return the trial's job, or None if its settings are invalid or its run has already ended."""
        name = f"trial-{trial.number:04d}"
        try:
            cfg = single_threaded(config.build(self.layers, trial_settings(trial.params, self.spaces)))
        except UserError as error:
            self._record_failure(trial, str(error))
            return None
        # a different seed per trial: a shared one would favor settings that suit only that seed
        cfg = cfg.model_copy(update={"seed": cfg.seed + trial.number})
        self.running[name] = Running(trial, reported)
        job = Job(name, self.out / name, cfg.model_dump(mode="json"), prunable=True)
        result = read_result(job)
        if result is not None:
            self.finish_trial(name, result)
            return None
        return job

    def should_continue(self, event: JobEvent) -> bool:
        """Report an evaluation to Optuna and return whether the trial continues. False means it is pruned."""
        trial, reported = self.running[event.job]
        # numbered, since trials with other rollout sizes evaluate at slightly different steps
        number = event.data["evaluation"]
        if number not in reported:  # a trial resumed from a checkpoint repeats some
            trial.report(event.data["mean_return"], number)
            reported.add(number)
        if not PRUNE_AFTER_FRACTION <= event.data["fraction"] < 1.0 or not trial.should_prune():
            return True
        trial.set_user_attr("pruned", True)  # stored now: if this process is killed, the run's result doesn't show it
        return False

    def finish_trial(self, name: str, result: Mapping[str, Any]) -> bool:
        """Record the end of a trial and return whether it was pruned."""
        trial = self.running.pop(name).trial
        pruned = bool(trial.user_attrs.get("pruned"))
        if pruned:
            self.study.tell(trial, state=TrialState.PRUNED)
        else:
            self.study.tell(trial, result["final_return"])
        return pruned

    def fail_trial(self, name: str, error: str) -> None:
        self._record_failure(self.running.pop(name).trial, error)

    def _record_failure(self, trial: Trial, error: str) -> None:
        trial.set_user_attr("error", error)
        self.study.tell(trial, state=TrialState.FAIL)

    def trials(self) -> list[TrialResult]:
        results = []
        for trial in self.study.get_trials(deepcopy=False):
            evaluations = trial.intermediate_values
            last = evaluations[max(evaluations)] if evaluations else math.nan
            mean_return = last if trial.value is None else trial.value
            state = STATES.get(trial.state, "running")
            error = trial.user_attrs.get("error", "")
            results.append(TrialResult(trial.number, state, mean_return, dict(trial.params), error))
        return results


def _distribution(space: SearchSpace) -> BaseDistribution:
    if isinstance(space, Choice):
        return CategoricalDistribution(space.texts)
    if space.integer:
        return IntDistribution(int(space.low), int(space.high), log=space.log)
    return FloatDistribution(space.low, space.high, log=space.log)

"""Tuning: search for the values of settings that learn best, trial by trial, with Optuna.

A setting to search is written as a range, `gamma=0.9..0.999`, as a logarithmic range, `lr=1e-4..1e-2:log`, or as values
to choose from, `num_envs=4,8,16`. A range covers integers only if the setting does.

Only optuna_study.py imports Optuna.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from pydantic import BaseModel

from zhixing import algorithms, config
from zhixing.config import RunConfig
from zhixing.config.display import format_value
from zhixing.core.learner import Learner
from zhixing.errors import UserError
from zhixing.experiments.executors import ProgressBoard, locked, make_executor, run_jobs
from zhixing.experiments.jobs import JobEvent
from zhixing.experiments.sweep import check_buildable, format_result, single_threaded, split_values
from zhixing.training.resolve import NO_ENV
from zhixing.utils import tables
from zhixing.utils.files import write_atomically

NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"


class Range(NamedTuple):
    """All numbers from `low` to `high`; with `log`, on a logarithmic scale. Settings that are integers get integers."""

    low: float
    high: float
    log: bool = False
    integer: bool = False

    @property
    def extremes(self) -> list[Any]:
        return [int(self.low), int(self.high)] if self.integer else [self.low, self.high]


class Choice(NamedTuple):
    texts: list[str]  # YAML, as written by the user: any value can be a choice, also a list

    @property
    def extremes(self) -> list[Any]:
        """Return all values: choices have no order."""
        return [config.parse_yaml(text, "a value") for text in self.texts]


SearchSpace = Range | Choice


def parse_search_spaces(arguments: Sequence[str]) -> tuple[dict[str, SearchSpace], list[str]]:
    """Return the search spaces by setting, and the arguments that aren't searched."""
    spaces: dict[str, SearchSpace] = {}
    fixed: list[str] = []
    for argument in arguments:
        name, _, text = argument.partition("=")
        space = _parse_search_space(name, text)
        spaces.pop(name, None)  # the last argument for a setting wins
        fixed = [earlier for earlier in fixed if not earlier.startswith(f"{name}=")]
        if space is None:
            fixed.append(argument)
        else:
            spaces[name] = space
    return spaces, fixed


def _parse_search_space(name: str, text: str) -> SearchSpace | None:
    parts = split_values(text)
    if len(parts) > 1:
        texts = [part.strip() for part in parts]
        if not all(texts) or len(set(texts)) < len(texts):
            raise UserError(f"{name}={text}: give each value to choose from once, as in num_envs=4,8,16")
        return Choice(texts)
    if not re.match(rf"{NUMBER}\.\.", text):
        return None
    match = re.fullmatch(rf"({NUMBER})\.\.({NUMBER})(:log)?", text)
    if not match:
        raise UserError(f"{name}={text} is not a range; write for example {name}=0.1..0.9 or {name}=1e-4..1e-2:log")
    low, high, log = float(match[1]), float(match[2]), match[3] is not None
    if not low < high:
        raise UserError(f"{name}={text}: write a range from the lower to the higher value")
    if log and low <= 0:
        raise UserError(f"{name}={text}: a logarithmic range must start above 0")
    return Range(low, high, log, integer=match[1].isdigit() and match[2].isdigit())


def match_field_type(space: SearchSpace, model: type[BaseModel], name: str) -> SearchSpace:
    """Make a range integer if and only if the setting is. Ranges of env options stay as they were written."""
    if isinstance(space, Choice) or name.startswith("env."):
        return space
    field_type: Any = model
    for part in name.split("."):
        is_model = isinstance(field_type, type) and issubclass(field_type, BaseModel)
        field = field_type.model_fields.get(part) if is_model else None
        field_type = None if field is None else field.annotation
    integer = field_type is not None and "int" in str(field_type) and "float" not in str(field_type)
    if integer and (space.low % 1 or space.high % 1):
        raise UserError(f"{name} takes integers, but its range is {space.low:g}..{space.high:g}")
    return space._replace(integer=integer)


def trial_settings(params: Mapping[str, Any], spaces: Mapping[str, SearchSpace]) -> dict[str, Any]:
    """Return a trial's parameters as nested settings.

    The parameters come from a file, so values outside the search spaces are rejected.
    """
    settings: dict[str, Any] = {}
    for name, value in params.items():
        space = spaces[name]
        if isinstance(space, Choice):
            valid = value in space.texts
        else:
            valid = type(value) in (int, float) and space.low <= value <= space.high
        if not valid:
            raise UserError(f"a trial has {name}={str(value)[:80]!r}, which is outside the values to search")
        if isinstance(space, Choice):
            value = config.parse_yaml(value, f"the value of {name!r}")
        settings = config.merge(settings, config.nest(name, value))
    return settings


def check_spaces(layers: Sequence[Mapping[str, Any]], spaces: Mapping[str, SearchSpace]) -> None:
    """Build a run with each choice and with both ends of each range, other settings at their first value.

    Raises `UserError` if one is invalid. Other combinations aren't checked: an invalid one fails as a trial.
    """
    if not spaces:
        raise UserError("no setting to search; write a range such as lr=1e-4..1e-2:log or values such as lr=1e-3,1e-2")
    if "seed" in spaces:
        raise UserError("seed can't be searched: a lucky seed is not a better setting; each trial has its own seed")
    first = {name: space.extremes[0] for name, space in spaces.items()}
    for name, space in spaces.items():
        for value in space.extremes:
            overrides: dict[str, Any] = {}
            for setting, chosen in {**first, name: value}.items():
                overrides = config.merge(overrides, config.nest(setting, chosen))
            cfg = single_threaded(config.build(layers, overrides))
            if cfg.env.name == NO_ENV:
                raise UserError("tuning compares evaluations; name the environment to evaluate in with --env")
            check_buildable(cfg)


@dataclass(frozen=True)
class TrialResult:
    number: int
    state: str  # complete, pruned, failed or running
    mean_return: float  # of the last evaluation; NaN if there was none
    params: Mapping[str, Any]
    error: str = ""  # why it failed


def best_trial(trials: Sequence[TrialResult]) -> TrialResult | None:
    complete = [trial for trial in trials if trial.state == "complete" and not math.isnan(trial.mean_return)]
    return max(complete, key=lambda trial: trial.mean_return, default=None)


def table_rows(trials: Sequence[TrialResult]) -> list[dict[str, Any]]:
    """Return a row per trial, sorted by state (complete, pruned, running, failed) and then by return."""
    states = ["complete", "pruned", "running", "failed"]

    def sort_key(trial: TrialResult) -> tuple[int, float, int]:
        descending = math.inf if math.isnan(trial.mean_return) else -trial.mean_return
        return states.index(trial.state), descending, trial.number

    names = dict.fromkeys(name for trial in trials for name in trial.params)
    return [
        {
            "trial": trial.number,
            "state": trial.state,
            "return": trial.mean_return,
            **{name: trial.params.get(name, "") for name in names},
        }
        for trial in sorted(trials, key=sort_key)
    ]


def write_best(
    best: TrialResult, layers: Sequence[Mapping[str, Any]], spaces: Mapping[str, SearchSpace], path: Path
) -> None:
    """Write the best trial's settings as a file for `--config`, without a seed."""
    settings: dict[str, Any] = {}
    for layer in (*layers, trial_settings(best.params, spaces)):
        settings = config.merge(settings, layer)
    settings.pop("seed", None)
    text = f"# trial {best.number}: return {best.mean_return:.6g}\n" + yaml.safe_dump(settings, sort_keys=False)
    write_atomically(path, lambda file: file.write(text.encode()))


def plot_trials(trials: Sequence[TrialResult], spaces: Mapping[str, SearchSpace], path: Path) -> None:
    from zhixing.reports.plots.curves import save_figure
    from zhixing.reports.plots.trials import draw_trials

    log_scale = {name: isinstance(space, Range) and space.log for name, space in spaces.items()}
    save_figure(draw_trials(trials, log_scale), path)


# --- running ---


@dataclass(frozen=True)
class TuneResult:
    """The trials of a search. Notebooks display their table."""

    trials: list[TrialResult]
    spaces: dict[str, SearchSpace]
    out: Path

    @property
    def best(self) -> TrialResult | None:
        """The complete trial with the highest return, or None. `best.yaml` in the folder has its settings."""
        return best_trial(self.trials)

    def load_best(self, **overrides: Any) -> RunConfig:
        """Return the configuration of the best trial, without its seed."""
        if self.best is None:
            raise UserError(f"no trial completed; see {self.out / 'trials.csv'} and {self.out / 'output'}")
        return config.load(self.out / "best.yaml", **overrides)

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows of trials.csv."""
        return table_rows(self.trials)

    def write(self) -> list[Path]:
        """Write trials.csv and, if a trial completed, trials.png. Return their paths."""
        tables.write_table(self.rows(), self.out / "trials.csv")
        if self.best is None:
            return [self.out / "trials.csv"]
        plot_trials(self.trials, self.spaces, self.out / "trials.png")
        return [self.out / "trials.csv", self.out / "trials.png"]

    def _repr_html_(self) -> str:
        return tables.html_table(self.rows())


def tune(
    algorithm: str | type[Learner] | RunConfig,
    spaces: Mapping[str, SearchSpace | Sequence[Any]],
    trials: int,
    *,
    out: str | os.PathLike[str],
    workers: int | None = None,
    on: str = "local",
    **settings: Any,
) -> TuneResult:
    """Search for the best settings: `zx.tune("ppo", {"lr": zx.Range(1e-4, 1e-2, log=True)}, 20, env=..., out=...)`.

    The same call again continues a stopped search.

    Args:
        algorithm: Name of an algorithm, a class of learners, or a configuration that all trials share.
        spaces: For each setting to search, such as `lr` or `net.hidden_sizes`, a `Range` or a list of values.
        trials: Total number of trials, including finished ones.
        out: Folder for the trials.
        workers: Number of parallel trials; by default half the CPUs.
        on: Where to run: `local` (processes), `ray`, or the address of a Ray cluster.
        settings: Settings that all trials share.
    """
    named = {name.replace("__", "."): as_search_space(name, space) for name, space in spaces.items()}
    layers = [config.as_layer(algorithm), config.from_keywords(settings)]
    result = run_study(layers, named, trials, Path(out), workers, on)
    result.write()
    return result


def as_search_space(name: str, space: SearchSpace | Sequence[Any]) -> SearchSpace:
    """Return a search space as it is, and a list of values as a `Choice`."""
    if isinstance(space, (Range, Choice)):
        return space
    if isinstance(space, str) or not isinstance(space, Sequence) or not space:
        raise UserError(f"{name}: {space!r} is not a search space; write zx.Range(low, high) or a list of values")
    return Choice([_as_yaml(value) for value in space])


def _as_yaml(value: Any) -> str:
    text = format_value(value)
    return text if config.parse_yaml(text, "a value") == value else json.dumps(value)


def run_study(
    layers: Sequence[Mapping[str, Any]],
    parsed: Mapping[str, SearchSpace],
    num_trials: int,
    out: Path,
    workers: int | None = None,
    on: str = "local",
) -> TuneResult:
    """Run trials until there are `num_trials`, including those of earlier calls. `best.yaml` is always up to date."""
    from zhixing.experiments.optuna_study import Study

    names = [layer["algorithm"] for layer in layers if "algorithm" in layer]
    model = algorithms.get(names[-1]).settings if names else BaseModel  # `check_spaces` rejects a missing algorithm
    spaces = {name: match_field_type(space, model, name) for name, space in parsed.items()}
    check_spaces(layers, spaces)
    with locked(out) as lock:
        study = Study(layers, spaces, out, num_trials)
        board = ProgressBoard(num_trials, sum(trial.state != "running" for trial in study.trials()))
        executor = make_executor(on, workers, lock)

        def on_event(event: JobEvent) -> None:
            summary = ""
            if event.kind == "evaluation":
                executor.decide(event.job, study.should_continue(event))
            elif event.kind == "done":
                pruned = study.finish_trial(event.job, event.data)
                summary = ("pruned  " if pruned else "") + format_result(event.data)
            elif event.kind == "failed":
                study.fail_trial(event.job, event.data["error"])
                summary = event.data["error"].strip().split("\n")[-1]
            if event.is_final:
                best = best_trial(study.trials())
                if best is not None:
                    write_best(best, layers, spaces, out / "best.yaml")
            board.on_event(event, summary)

        run_jobs(executor, study.next_job, on_event)
        return TuneResult(study.trials(), spaces, out)

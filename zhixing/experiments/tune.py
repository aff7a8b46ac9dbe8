"""Tuning: which values of some settings learn best, searched for by Optuna, trial by trial.

A setting to search is written as a range, `gamma=0.9..0.999`, a range by its logarithm, `lr=1e-4..1e-2:log`, or as
values to choose from, `num_envs=4,8,16`. Its range is one of whole numbers where the setting takes only these.

Optuna itself is met in optuna_study.py only.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from pydantic import BaseModel

from zhixing import algorithms, config
from zhixing.errors import UserError
from zhixing.experiments.executors import ProgressBoard, drive, executor_on, locked
from zhixing.experiments.jobs import JobEvent
from zhixing.experiments.sweep import result_line, single_threaded, split_values, try_to_build
from zhixing.training.data import NO_ENV
from zhixing.utils.files import write_atomically

NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"


class Range(NamedTuple):
    low: float
    high: float
    log: bool = False
    whole: bool = False  # only whole numbers

    @property
    def ends(self) -> list[Any]:
        return [int(self.low), int(self.high)] if self.whole else [self.low, self.high]


class Choice(NamedTuple):
    texts: list[str]  # as they were written: any value can be chosen, also a list

    @property
    def ends(self) -> list[Any]:
        return [config.parse_yaml(text, "a value") for text in self.texts]


Space = Range | Choice


def parse_spaces(words: Sequence[str]) -> tuple[dict[str, Space], list[str]]:
    """Which settings are searched and where, and the other words."""
    spaces: dict[str, Space] = {}
    others: list[str] = []
    for word in words:
        name, _, text = word.partition("=")
        space = _space(name, text)
        spaces.pop(name, None)  # the last word wins
        others = [other for other in others if not other.startswith(f"{name}=")]
        if space is None:
            others.append(word)
        else:
            spaces[name] = space
    return spaces, others


def _space(name: str, text: str) -> Space | None:
    parts = split_values(text)
    if len(parts) > 1:
        texts = [part.strip() for part in parts]
        if not all(texts) or len(set(texts)) < len(texts):
            raise UserError(f"{name}={text}: name each value to choose from once, as in num_envs=4,8,16")
        return Choice(texts)
    if not re.match(rf"{NUMBER}\.\.", text):
        return None
    found = re.fullmatch(rf"({NUMBER})\.\.({NUMBER})(:log)?", text)
    if not found:
        raise UserError(f"{name}={text} is no range; write for example {name}=0.1..0.9 or {name}=1e-4..1e-2:log")
    low, high, log = float(found[1]), float(found[2]), found[3] is not None
    if not low < high:
        raise UserError(f"{name}={text}: a range goes from the lower to the higher value")
    if log and low <= 0:
        raise UserError(f"{name}={text}: a range by its logarithm must begin above 0")
    return Range(low, high, log, whole=found[1].isdigit() and found[2].isdigit())


def fitted(space: Space, model: type[BaseModel], name: str) -> Space:
    """A range of whole numbers where the setting takes only these. Options of tasks are taken as they are written."""
    if isinstance(space, Choice) or name.startswith("env."):
        return space
    owner: Any = model
    for part in name.split("."):
        field = owner.model_fields.get(part) if isinstance(owner, type) and issubclass(owner, BaseModel) else None
        owner = None if field is None else field.annotation
    whole = owner is not None and "int" in str(owner) and "float" not in str(owner)
    if whole and (space.low % 1 or space.high % 1):
        raise UserError(f"{name} takes whole numbers; its range {space.low:g}..{space.high:g} doesn't")
    return space._replace(whole=whole)


def settings_of(values: Mapping[str, Any], spaces: Mapping[str, Space]) -> dict[str, Any]:
    """What a trial has chosen, as nested settings. It stands in a file: only values that were asked for are taken."""
    settings: dict[str, Any] = {}
    for name, value in values.items():
        space = spaces[name]
        if isinstance(space, Choice):
            asked = value in space.texts
        else:
            asked = type(value) in (int, float) and space.low <= value <= space.high
        if not asked:
            raise UserError(f"a trial has {name}={str(value)[:80]!r}, which is none of the values to search")
        if isinstance(space, Choice):
            value = config.parse_yaml(value, f"the value of {name!r}")
        settings = config.merge(settings, config.nest(name, value))
    return settings


def check(layers: Sequence[Mapping[str, Any]], spaces: Mapping[str, Space]) -> None:
    """Tells what is wrong with the ends of each range and with each choice, the others at their first value. Not every
    combination: what is wrong with one makes its trial fail."""
    if not spaces:
        raise UserError("nothing is to be searched; write a range such as lr=1e-4..1e-2:log or values lr=1e-3,1e-2")
    if "seed" in spaces:
        raise UserError("seed can't be searched: luck is not a setting; each trial has a seed of its own")
    first = {name: space.ends[0] for name, space in spaces.items()}
    for name, space in spaces.items():
        for value in space.ends:
            overrides: dict[str, Any] = {}
            for other, chosen in {**first, name: value}.items():
                overrides = config.merge(overrides, config.nest(other, chosen))
            cfg = single_threaded(config.build(layers, overrides))
            if cfg.env.name == NO_ENV:
                raise UserError("tuning compares evaluations; name the environment to evaluate in with --env")
            try_to_build(cfg)


@dataclass(frozen=True)
class Outcome:
    """A trial as people see it."""

    number: int
    state: str  # complete, pruned, failed or running
    ret: float  # at its end, or when it was pruned; NaN if there is none
    values: Mapping[str, Any]
    error: str = ""  # why it failed


def best_of(outcomes: Sequence[Outcome]) -> Outcome | None:
    complete = [one for one in outcomes if one.state == "complete" and not math.isnan(one.ret)]
    return max(complete, key=lambda one: one.ret, default=None)


def table(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """A row per trial: those that ended, the best first, then those that were pruned, then the others."""
    order = ["complete", "pruned", "running", "failed"]
    by_rank = sorted(outcomes, key=lambda o: (order.index(o.state), -o.ret if o.ret == o.ret else math.inf, o.number))
    names = dict.fromkeys(name for one in outcomes for name in one.values)
    return [
        {
            "trial": one.number,
            "state": one.state,
            "return": one.ret,
            **{name: one.values.get(name, "") for name in names},
        }
        for one in by_rank
    ]


def write_best(
    best: Outcome, layers: Sequence[Mapping[str, Any]], spaces: Mapping[str, Space], path: Path
) -> dict[str, Any]:
    """The settings of the best trial, and all that was given, as a file for `--config`; without a seed."""
    settings: dict[str, Any] = {}
    for layer in (*layers, settings_of(best.values, spaces)):
        settings = config.merge(settings, layer)
    settings.pop("seed", None)
    text = f"# trial {best.number}: return {best.ret:.6g}\n" + yaml.safe_dump(settings, sort_keys=False)
    write_atomically(path, lambda file: file.write(text.encode()))
    return settings


def picture(outcomes: Sequence[Outcome], spaces: Mapping[str, Space], path: Path) -> None:
    from zhixing.report.plots.curves import save
    from zhixing.report.plots.trials import draw_trials

    save(draw_trials(outcomes, {name: isinstance(space, Range) and space.log for name, space in spaces.items()}), path)


# --- doing it ---


def tune(
    layers: Sequence[Mapping[str, Any]],
    words: Sequence[str],
    trials: int,
    out: Path,
    workers: int | None = None,
    on: str = "local",
) -> tuple[list[Outcome], dict[str, Space]]:
    """Go on until there are so many trials. The best settings so far are in `best.yaml` at any time."""
    from zhixing.experiments.optuna_study import Study

    found, others = parse_spaces(words)
    layers = [*layers, config.parse_overrides(others)]
    named = [layer["algorithm"] for layer in layers if "algorithm" in layer]
    model = algorithms.get(named[-1]).settings if named else BaseModel  # `check` tells that none is named
    spaces = {name: fitted(space, model, name) for name, space in found.items()}
    check(layers, spaces)
    with locked(out) as lock:
        study = Study(layers, spaces, out, trials)
        board = ProgressBoard(trials, sum(one.state != "running" for one in study.outcomes()))
        executor = executor_on(on, workers, lock)

        def on_event(news: JobEvent) -> None:
            ending = ""
            if news.kind == "evaluation":
                executor.answer(news.job, study.go_on(news))
            elif news.kind == "done":
                pruned = study.end(news.job, news.told)
                ending = ("pruned  " if pruned else "") + result_line(news.told)
            elif news.kind == "failed":
                study.fail(news.job, news.told["error"])
                ending = news.told["error"].strip().split("\n")[-1]
            if news.last:
                best = best_of(study.outcomes())
                if best is not None:
                    write_best(best, layers, spaces, out / "best.yaml")
            board.on_event(news, ending)

        drive(executor, study.next_job, on_event)
        return study.outcomes(), spaces

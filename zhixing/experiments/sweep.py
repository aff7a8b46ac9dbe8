"""Sweeps: every combination of some settings' values, with several seeds each, as ordinary runs in one folder.

A value is a list of values where it has commas outside of brackets and quotes: `lr=1e-3,3e-4`. So a setting that is a
list itself stays one, `net.hidden_sizes=[64,64]`, and several of them are `net.hidden_sizes=[64,64],[256,256]`.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import tempfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from zhixing import config
from zhixing.config import DistributedConfig, RunConfig, flat_settings
from zhixing.config.display import format_value
from zhixing.envs.crash.crash_report import REPRODUCE_HINT
from zhixing.errors import UserError, write_stderr
from zhixing.experiments.executors import ProgressBoard, drive, executor_on, locked
from zhixing.experiments.jobs import Job, JobEvent
from zhixing.report.plots.interval import student_t
from zhixing.report.plots.runs import Configuration, read_run
from zhixing.training.resolve import is_distributed
from zhixing.training.run_folder import RunFolder
from zhixing.training.session import Session
from zhixing.utils.importing import names_in

Values = dict[str, list[Any]]  # of each setting, by dotted name: what it is to be, one after the other
PICTURED = 12  # settings in the picture, the best ones: more can't be told apart


# --- what is asked ---


def split_values(text: str) -> list[str]:
    """The parts between commas that stand in no brackets and no quotes."""
    parts, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        elif letter in "[{(":
            depth += 1
        elif letter in ")}]":
            depth -= 1
        if letter == "," and depth == 0 and not quote:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def parse_values(words: Sequence[str]) -> Values:
    """`["lr=1e-3,3e-4", "gamma=0.9"]` as values by name; the last word on a setting wins."""
    values: Values = {}
    for word in words:
        name, sign, text = word.partition("=")
        if not sign or not name or name.startswith("-"):
            raise UserError(f"{word!r} is no setting; write name=value, or name=value,value for several")
        parts = split_values(text)
        if len(parts) > 1 and not all(part.strip() for part in parts):
            raise UserError(f"{word!r} has an empty value between its commas")
        values.pop(name, None)
        values[name] = [config.parse_yaml(part, f"the value of {name!r}") for part in parts]
    return values


def read_grid(path: Path) -> Values:
    """A YAML file in which every setting, by dotted name or in its group, is a list of values."""
    values = flat_settings(config.read_yaml(path))
    for name, several in values.items():
        if not isinstance(several, list) or not several:
            raise UserError(f"{path}: {name} must be a list of values, such as [{format_value(several)}]")
    return values


def parse_seeds(text: str) -> list[int]:
    """Return the seeds of `0-4`, `0,3,7` or `0-2,7`."""
    if re.fullmatch(r"\s*[1-9]\d*\s*", text):
        number = int(text)
        raise UserError(
            f"--seeds {number} is ambiguous: write --seeds 0-{number - 1} for {number} seeds, or "
            f"--seeds {number}-{number} for the seed {number} alone"
        )
    seeds: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        if not found or int(found[2] or found[1]) < int(found[1]):
            raise UserError(f"--seeds {text!r} is no list of seeds; write for example 0-4 or 0,3,7")
        seeds += range(int(found[1]), int(found[2] or found[1]) + 1)
    if len(set(seeds)) < len(seeds):
        raise UserError(f"--seeds {text!r} names a seed twice")
    return seeds


@dataclass
class Setting:
    """One combination of values, and its runs that have ended."""

    label: str  # the values that vary, as people write them
    values: dict[str, Any]
    jobs: list[Job]  # one per seed
    results: dict[str, Mapping[str, Any]] = field(default_factory=dict)  # by the name of the run

    def told(self, name: str) -> list[float]:
        """A number of all results that have it."""
        return [float(result[name]) for result in self.results.values() if result[name] is not None]

    @property
    def mean(self) -> float:
        returns = self.told("final_return")
        return float(np.mean(returns)) if returns else math.nan

    @property
    def half(self) -> float:
        """Of the 95 % interval of the mean; NaN for less than two seeds, of which nothing can be said."""
        returns = self.told("final_return")
        if len(returns) < 2:
            return math.nan
        return student_t(len(returns) - 1) * float(np.std(returns, ddof=1)) / math.sqrt(len(returns))


def plan(layers: Sequence[Mapping[str, Any]], values: Values, seeds: Sequence[int], out: Path) -> list[Setting]:
    """Every combination of the values with every seed; what is wrong with any of them is told here."""
    if "seed" in values:
        raise UserError("seed is not a setting of a sweep; name the seeds with --seeds, such as --seeds 0-4")
    for name, several in values.items():
        for i, one in enumerate(several):
            if one in several[:i]:
                raise UserError(f"{name} is to be {format_value(one)} twice; name each value once")
    varying = [name for name, several in values.items() if len(several) > 1]
    settings = []
    for chosen in itertools.product(*values.values()):
        overrides: dict[str, Any] = {}
        for name, value in zip(values, chosen, strict=True):
            overrides = config.merge(overrides, config.nest(name, value))
        mine = {name: value for name, value in zip(values, chosen, strict=True) if name in varying}
        label = " ".join(f"{name}={format_value(value)}" for name, value in mine.items())
        try:
            cfgs = [single_threaded(config.build(layers, {**overrides, "seed": seed})) for seed in seeds]
            try_to_build(cfgs[0])
        except UserError as error:
            raise UserError(f"{label}: {error}" if label else str(error)) from None
        settings.append(Setting(label, mine, [_job(mine, cfg, out) for cfg in cfgs]))
    names = [job.name for setting in settings for job in setting.jobs]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UserError(f"two runs would have the same folder {twice}; sweep over these values one after the other")
    return settings


def single_threaded(cfg: RunConfig) -> RunConfig:
    """Runs beside each other get a core each, unless somebody asks for more."""
    return cfg.model_copy(update={"num_threads": 1}) if cfg.num_threads == "auto" else cfg


def try_to_build(cfg: RunConfig) -> None:
    """Tells what is wrong with a configuration beyond its words: the task, its options, what suits the algorithm."""
    is_distributed(cfg)
    # nobody is to wait for processes that do nothing, unless the task must not run in this one
    if cfg.vector.backend in ("auto", "process", "mixed", "ray"):
        isolated = cfg.vector.isolated
        changes: dict[str, Any] = {"backend": "process" if isolated else "serial"}
        if not isinstance(cfg.vector.workers, int) or cfg.vector.workers <= cfg.num_envs:  # else that is told
            changes["workers"] = 1 if isolated else "auto"
        cfg = cfg.model_copy(update={"vector": cfg.vector.model_copy(update=changes)})
    cfg = cfg.model_copy(update={"distributed": DistributedConfig()})
    with tempfile.TemporaryDirectory() as aside:
        Session(cfg, aside, quiet=True).close()


def _job(values: Mapping[str, Any], cfg: RunConfig, out: Path) -> Job:
    told = [f"{name}={_safe(format_value(value))}" for name, value in {**values, "seed": cfg.seed}.items()]
    name = "_".join(told)
    if len(name) > 200:  # longer than names of folders can be
        name = f"{name[:180]}-{zlib.crc32(name.encode()):08x}_seed={cfg.seed}"
    return Job(name, out / name, cfg.model_dump(mode="json"))


def _safe(text: str) -> str:
    """As part of a folder's name."""
    return re.sub(r"[^\w.+-]+", " ", text).strip().replace(" ", "-")


# --- doing it ---


def sweep(
    layers: Sequence[Mapping[str, Any]],
    values: Values,
    seeds: Sequence[int],
    out: Path,
    workers: int | None = None,
    on: str = "local",
) -> tuple[list[Setting], dict[str, str]]:
    """Run all that hasn't ended yet, `on` what `executor_on` knows. Returns the settings, the best first, and what went
    wrong by the run's name."""
    settings = plan(layers, values, seeds, out)
    owner = {job.name: setting for setting in settings for job in setting.jobs}
    todo = []
    failed: dict[str, str] = {}
    with locked(out) as lock:
        for setting in settings:
            for job in setting.jobs:
                result = result_of(job)
                if result is None:
                    todo.append(job)
                else:
                    setting.results[job.name] = result
        executor = executor_on(on, workers, lock)
        before = len(owner) - len(todo)
        write_stderr(f"{len(owner)} runs in {out}, {before} of them done before; {executor.workers} at once")
        board = ProgressBoard(len(owner), before)

        def on_event(news: JobEvent) -> None:
            ending = ""
            if news.kind == "done":
                owner[news.job].results[news.job] = news.told
                ending = result_line(news.told)
            elif news.kind == "failed":
                failed[news.job] = ending = _reason(news.told["error"])
            board.on_event(news, ending)

        jobs = iter(todo)
        drive(executor, lambda: next(jobs, None), on_event)
    return ranked(settings), failed


def result_of(job: Job) -> dict[str, Any] | None:
    """Of a run that has ended; refuses a folder with another one, which would be taken for this."""
    folder = RunFolder(job.folder)
    if not folder.config_file.exists():
        return None
    found = flat_settings(folder.read_config(names_in(job.settings)).model_dump(mode="json"))
    asked = flat_settings(job.settings)
    # what is left to the run was decided when it began
    other = [name for name, value in asked.items() if value != "auto" and found.get(name) != value]
    if other:
        name = other[0]
        raise UserError(
            f"{job.folder} holds a run with {name}={format_value(found.get(name))}, not {format_value(asked[name])}; "
            f"choose another --out"
        )
    try:
        result: dict[str, Any] = json.loads(folder.result_file.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UserError(f"{folder.result_file} can't be read: {error}") from None
    return result


def result_line(result: Mapping[str, Any]) -> str:
    ret = "" if result["final_return"] is None else f"return {result['final_return']:.6g}  "
    return f"{ret}{result['env_steps'] or result['updates']:,} steps  {result['seconds']:.1f} s"


def ranked(settings: Sequence[Setting]) -> list[Setting]:
    """The best first. Where all were to stop at a return: those that reached it with more seeds, then sooner; else by
    the mean return."""

    def rank(setting: Setting) -> tuple[float, ...]:
        mean = -setting.mean if setting.results and not math.isnan(setting.mean) else math.inf
        if any(job.settings["stop_return"] is None for one in settings for job in one.jobs):
            return (mean,)
        steps = setting.told("env_steps_to_stop")
        return (-len(steps), float(np.mean(steps)) if steps else math.inf, mean)

    return sorted(settings, key=rank)


# --- telling it ---


def table(settings: Sequence[Setting]) -> list[dict[str, Any]]:
    """A row per setting. NaN where there is nothing to tell."""
    rows = []
    stops = any(job.settings["stop_return"] is not None for setting in settings for job in setting.jobs)
    for setting in settings:
        row: dict[str, Any] = {name: format_value(value) for name, value in setting.values.items()}
        row |= {"seeds": len(setting.results), "return_mean": setting.mean}
        row |= {"return_low": setting.mean - setting.half, "return_high": setting.mean + setting.half}
        if stops:
            steps = setting.told("env_steps_to_stop")
            row |= {"reached": len(steps), "env_steps_to_stop": float(np.mean(steps)) if steps else math.nan}
        seconds = setting.told("seconds")
        rows.append({**row, "seconds": float(np.mean(seconds)) if seconds else math.nan})
    return rows


def picture(settings: Sequence[Setting], path: Path) -> None:
    """Learning curves of the best settings."""
    from zhixing.report.plots.curves import draw, save

    configurations = []
    for setting in [one for one in settings if one.results][:PICTURED]:
        runs = [read_run(job.folder) for job in setting.jobs if job.name in setting.results]
        label = " ".join([runs[0].algorithm, setting.label]).strip()
        configurations.append(Configuration(label, runs[0].task, runs, repeats=0))
    save(draw(configurations), path)


def _reason(error: str) -> str:
    """The last line of a traceback, before the advice how to repeat it."""
    lines = [line for line in error.strip().split("\n") if not line.startswith(REPRODUCE_HINT)]
    return lines[-1] if lines else error

"""Sweeps: train every combination of values with several seeds, as ordinary runs in one folder.

Commas outside brackets and quotes separate values: `lr=1e-3,3e-4` has two. A setting that takes a list stays one value,
`net.hidden_sizes=[64,64]`, and `net.hidden_sizes=[64,64],[256,256]` has two.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import tempfile
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from zhixing import config
from zhixing.config import DistributedConfig, RunConfig, flat_settings
from zhixing.config.display import format_value
from zhixing.core.learner import Learner
from zhixing.envs.crash.crash_report import REPRODUCE_HINT
from zhixing.errors import UserError, note, write_stderr
from zhixing.experiments.executors import ProgressBoard, locked, make_executor, run_jobs
from zhixing.experiments.jobs import Job, JobEvent
from zhixing.reports.plots.interval import student_t
from zhixing.reports.plots.runs import Configuration, read_run
from zhixing.training.resolve import is_distributed
from zhixing.training.run_folder import RunFolder
from zhixing.training.session import Session
from zhixing.utils import tables
from zhixing.utils.importing import names_in

Values = dict[str, list[Any]]  # the values to try, by dotted setting name
MAX_CURVES = 12  # in the plot: more are hard to distinguish


# --- arguments ---


def split_values(text: str) -> list[str]:
    """Split at the commas that are outside brackets and quotes."""
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


def parse_values(arguments: Sequence[str]) -> Values:
    """Parse arguments such as `lr=1e-3,3e-4` into values by name. The last argument for a setting wins."""
    values: Values = {}
    for argument in arguments:
        name, sign, text = argument.partition("=")
        if not sign or not name or name.startswith("-"):
            raise UserError(f"{argument!r} is not a setting; write name=value, or name=value,value for several")
        parts = split_values(text)
        if len(parts) > 1 and not all(part.strip() for part in parts):
            raise UserError(f"{argument!r} has an empty value between its commas")
        values.pop(name, None)
        values[name] = [config.parse_yaml(part, f"the value of {name!r}") for part in parts]
    return values


def read_grid(path: Path) -> Values:
    """Read a YAML file that lists the values of each setting. Names may be dotted or nested."""
    values = flat_settings(config.read_yaml(path))
    for name, candidates in values.items():
        if not isinstance(candidates, list) or not candidates:
            raise UserError(f"{path}: {name} must be a list of values, such as [{format_value(candidates)}]")
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
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        if not match or int(match[2] or match[1]) < int(match[1]):
            raise UserError(f"--seeds {text!r} is not a list of seeds; write for example 0-4 or 0,3,7")
        seeds += range(int(match[1]), int(match[2] or match[1]) + 1)
    if len(set(seeds)) < len(seeds):
        raise UserError(f"--seeds {text!r} contains a seed twice")
    return seeds


# --- planning ---


@dataclass
class Variant:
    """One combination of values, its runs, and the results of those that have ended."""

    label: str  # the values that vary, as written on the command line
    values: dict[str, Any]
    jobs: list[Job]  # one per seed
    results: dict[str, Mapping[str, Any]] = field(default_factory=dict)  # by the run's name

    def numbers(self, key: str) -> list[float]:
        """Return a key's values in all results that have one."""
        return [float(result[key]) for result in self.results.values() if result[key] is not None]

    @property
    def runs(self) -> list[Path]:
        """The folders of the runs that have ended."""
        return [job.folder for job in self.jobs if job.name in self.results]

    @property
    def mean_return(self) -> float:
        returns = self.numbers("final_return")
        return float(np.mean(returns)) if returns else math.nan

    @property
    def half_width(self) -> float:
        """Return half the width of the mean's 95 % confidence interval, or NaN for fewer than two seeds."""
        returns = self.numbers("final_return")
        if len(returns) < 2:
            return math.nan
        return student_t(len(returns) - 1) * float(np.std(returns, ddof=1)) / math.sqrt(len(returns))


def plan(layers: Sequence[Mapping[str, Any]], values: Values, seeds: Sequence[int], out: Path) -> list[Variant]:
    """Combine all values with all seeds. Raises `UserError` if any combination is invalid."""
    if "seed" in values:
        raise UserError("seed is not a setting of a sweep; name the seeds with --seeds, such as --seeds 0-4")
    for name, candidates in values.items():
        for i, value in enumerate(candidates):
            if value in candidates[:i]:
                raise UserError(f"{name} has the value {format_value(value)} twice; give each value once")
    varying = [name for name, candidates in values.items() if len(candidates) > 1]
    variants = []
    for combination in itertools.product(*values.values()):
        overrides: dict[str, Any] = {}
        for name, value in zip(values, combination, strict=True):
            overrides = config.merge(overrides, config.nest(name, value))
        varied = {name: value for name, value in zip(values, combination, strict=True) if name in varying}
        label = " ".join(f"{name}={format_value(value)}" for name, value in varied.items())
        try:
            cfgs = [single_threaded(config.build(layers, {**overrides, "seed": seed})) for seed in seeds]
            check_buildable(cfgs[0])
        except UserError as error:
            raise UserError(f"{label}: {error}" if label else str(error)) from None
        variants.append(Variant(label, varied, [_make_job(varied, cfg, out) for cfg in cfgs]))
    names = [job.name for variant in variants for job in variant.jobs]
    duplicate = next((name for name in names if names.count(name) > 1), None)
    if duplicate is not None:
        raise UserError(f"two runs would share the folder {duplicate}; sweep these values in separate sweeps")
    return variants


def single_threaded(cfg: RunConfig) -> RunConfig:
    """Resolve `num_threads=auto` to one thread: parallel runs would compete for cores."""
    return cfg.model_copy(update={"num_threads": 1}) if cfg.num_threads == "auto" else cfg


def check_buildable(cfg: RunConfig) -> None:
    """Build the env, networks and buffers of a run once. Raises `UserError` if they don't fit together."""
    is_distributed(cfg)
    # no worker processes, which only cost time here, unless the env must not run in this process
    if cfg.vector.backend in ("auto", "process", "mixed", "ray"):
        isolated = cfg.vector.isolated
        changes: dict[str, Any] = {"backend": "process" if isolated else "serial"}
        if not isinstance(cfg.vector.workers, int) or cfg.vector.workers <= cfg.num_envs:  # keep an invalid number
            changes["workers"] = 1 if isolated else "auto"
        cfg = cfg.model_copy(update={"vector": cfg.vector.model_copy(update=changes)})
    cfg = cfg.model_copy(update={"distributed": DistributedConfig()})
    with tempfile.TemporaryDirectory() as folder:
        Session(cfg, folder, quiet=True).close()


def _make_job(values: Mapping[str, Any], cfg: RunConfig, out: Path) -> Job:
    name = "_".join(f"{name}={_path_safe(format_value(value))}" for name, value in {**values, "seed": cfg.seed}.items())
    if len(name) > 200:  # too long for a folder name
        name = f"{name[:180]}-{zlib.crc32(name.encode()):08x}_seed={cfg.seed}"
    return Job(name, out / name, cfg.model_dump(mode="json"))


def _path_safe(text: str) -> str:
    """Replace characters that don't belong in a folder name."""
    return re.sub(r"[^\w.+-]+", " ", text).strip().replace(" ", "-")


# --- running ---


@dataclass(frozen=True)
class SweepResult:
    """The results of a sweep. Notebooks display its table."""

    variants: list[Variant]  # combinations of values, best first
    failed: dict[str, str]  # errors of failed runs, by name
    out: Path

    @property
    def best(self) -> Variant | None:
        """The best combination of values, or None if no run has ended."""
        return next((variant for variant in self.variants if variant.results), None)

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows of sweep.csv."""
        return table_rows(self.variants)

    def write(self) -> list[Path]:
        """Write sweep.csv and sweep.png, and return their paths. Without evaluations, there is nothing to plot."""
        if self.best is None:
            return []
        tables.write_table(self.rows(), self.out / "sweep.csv")
        try:
            plot_best(self.variants, self.out / "sweep.png")
        except UserError as error:
            note(f"no plot: {error}")
            return [self.out / "sweep.csv"]
        return [self.out / "sweep.csv", self.out / "sweep.png"]

    def _repr_html_(self) -> str:
        return tables.html_table(self.rows())


def sweep(
    algorithm: str | type[Learner] | RunConfig,
    grid: Mapping[str, Sequence[Any]],
    *,
    seeds: Iterable[int] = range(3),
    out: str | os.PathLike[str],
    workers: int | None = None,
    on: str = "local",
    **settings: Any,
) -> SweepResult:
    """Train with all combinations of values and seeds: `zx.sweep("ppo", {"lr": [1e-3, 3e-4]}, env=..., out=...)`.

    The same call again continues a stopped sweep.

    Args:
        algorithm: Name of an algorithm, a class of learners, or a configuration that all runs share.
        grid: Values by setting, such as `lr` or `net.hidden_sizes`.
        seeds: Seeds of the runs.
        out: Folder for the runs; those already finished are not repeated.
        workers: Number of parallel runs; by default half the CPUs.
        on: Where to run: `local` (processes), `ray`, or the address of a Ray cluster.
        settings: Settings that all runs share.
    """
    layers = [config.as_layer(algorithm), config.from_keywords(settings)]
    values = {name.replace("__", "."): list(candidates) for name, candidates in grid.items()}
    result = run_sweep(layers, values, list(seeds), Path(out), workers, on)
    result.write()
    return result


def run_sweep(
    layers: Sequence[Mapping[str, Any]],
    values: Values,
    seeds: Sequence[int],
    out: Path,
    workers: int | None = None,
    on: str = "local",
) -> SweepResult:
    """Run everything that hasn't ended yet, `on` an executor of `make_executor`."""
    variants = plan(layers, values, seeds, out)
    variant_of = {job.name: variant for variant in variants for job in variant.jobs}
    todo = []
    failed: dict[str, str] = {}
    with locked(out) as lock:
        for variant in variants:
            for job in variant.jobs:
                result = read_result(job)
                if result is None:
                    todo.append(job)
                else:
                    variant.results[job.name] = result
        executor = make_executor(on, workers, lock)
        num_done = len(variant_of) - len(todo)
        write_stderr(f"{len(variant_of)} runs in {out}, {num_done} already done; {executor.workers} in parallel")
        board = ProgressBoard(len(variant_of), num_done)

        def on_event(event: JobEvent) -> None:
            summary = ""
            if event.kind == "done":
                variant_of[event.job].results[event.job] = event.data
                summary = format_result(event.data)
            elif event.kind == "failed":
                failed[event.job] = summary = _last_error_line(event.data["error"])
            board.on_event(event, summary)

        jobs = iter(todo)
        run_jobs(executor, lambda: next(jobs, None), on_event)
    return SweepResult(rank(variants), failed, out)


def read_result(job: Job) -> dict[str, Any] | None:
    """Return the result of a run that has ended, else None. Raises `UserError` if the folder holds a different run."""
    folder = RunFolder(job.folder)
    if not folder.config_file.exists():
        return None
    saved = flat_settings(folder.read_config(names_in(job.settings)).model_dump(mode="json"))
    settings = flat_settings(job.settings)
    # the run resolved each `auto` when it started
    differing = [name for name, value in settings.items() if value != "auto" and saved.get(name) != value]
    if differing:
        name = differing[0]
        raise UserError(
            f"{job.folder} holds a run with {name}={format_value(saved.get(name))}, "
            f"not {format_value(settings[name])}; choose another --out"
        )
    try:
        result: dict[str, Any] = json.loads(folder.result_file.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UserError(f"can't read {folder.result_file}: {error}") from None
    return result


def format_result(result: Mapping[str, Any]) -> str:
    final_return = "" if result["final_return"] is None else f"return {result['final_return']:.6g}  "
    return f"{final_return}{result['env_steps'] or result['updates']:,} steps  {result['seconds']:.1f} s"


def rank(variants: Sequence[Variant]) -> list[Variant]:
    """Sort the variants, best first: by mean return or, if all runs have a `stop_return`, by the number of seeds that
    reached it and then by their mean steps to reach it."""

    def sort_key(variant: Variant) -> tuple[float, ...]:
        mean = -variant.mean_return if variant.results and not math.isnan(variant.mean_return) else math.inf
        if any(job.settings["stop_return"] is None for variant in variants for job in variant.jobs):
            return (mean,)
        steps = variant.numbers("env_steps_to_stop")
        return (-len(steps), float(np.mean(steps)) if steps else math.inf, mean)

    return sorted(variants, key=sort_key)


# --- reporting ---


def table_rows(variants: Sequence[Variant]) -> list[dict[str, Any]]:
    """Return a row per variant, with NaN for missing numbers."""
    rows = []
    stops = any(job.settings["stop_return"] is not None for variant in variants for job in variant.jobs)
    for variant in variants:
        mean, half_width = variant.mean_return, variant.half_width
        row: dict[str, Any] = {name: format_value(value) for name, value in variant.values.items()}
        row |= {"seeds": len(variant.results), "return_mean": mean}
        row |= {"return_low": mean - half_width, "return_high": mean + half_width}
        if stops:
            steps = variant.numbers("env_steps_to_stop")
            row |= {"reached": len(steps), "env_steps_to_stop": float(np.mean(steps)) if steps else math.nan}
        seconds = variant.numbers("seconds")
        rows.append({**row, "seconds": float(np.mean(seconds)) if seconds else math.nan})
    return rows


def plot_best(variants: Sequence[Variant], path: Path) -> None:
    """Plot learning curves of the best variants."""
    from zhixing.reports.plots.curves import draw_curves, save_figure

    configurations = []
    for variant in [variant for variant in variants if variant.results][:MAX_CURVES]:
        runs = [read_run(folder) for folder in variant.runs]
        label = " ".join([runs[0].algorithm, variant.label]).strip()
        configurations.append(Configuration(label, runs[0].env, runs, num_duplicates=0))
    save_figure(draw_curves(configurations), path)


def _last_error_line(error: str) -> str:
    """Return the last line of an error, without the advice on how to reproduce a crash."""
    lines = [line for line in error.strip().split("\n") if not line.startswith(REPRODUCE_HINT)]
    return lines[-1] if lines else error

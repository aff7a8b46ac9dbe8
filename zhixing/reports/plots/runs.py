"""Find runs in folders, group them by configuration, and label each group by the settings that differ."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zhixing.config import flat_settings, read_yaml
from zhixing.config.display import WITHOUT_EFFECT, format_value
from zhixing.errors import UserError
from zhixing.reports.plots.metrics import Columns, read_metrics
from zhixing.training.run_folder import RunFolder, RunPath


class NoDataError(UserError):
    """A run has no data to plot yet."""


@dataclass(frozen=True)
class Run:
    path: Path
    algorithm: str
    env: str
    seed: int
    settings: dict[str, Any]  # by dotted name; only those that can change a return
    metrics: Columns

    @property
    def offline(self) -> bool:
        """Return whether the run learned from a dataset, without stepping an environment."""
        return not self.metrics["env_steps"].any() and "updates" in self.metrics

    @property
    def num_steps(self) -> float:
        """Return the environment steps so far, or the updates of an offline run."""
        return float(self.metrics["updates" if self.offline else "env_steps"][-1])


@dataclass(frozen=True)
class Configuration:
    """Runs that differ only in their seed, one per seed."""

    label: str  # the algorithm, and the settings that differ between its configurations in this environment
    env: str
    runs: list[Run]
    num_duplicates: int  # runs left out because another run with the same seed is longer

    @property
    def legend(self) -> str:
        seeds = f"{len(self.runs)} seeds" if len(self.runs) > 1 else f"seed {self.runs[0].seed}"
        if self.num_duplicates:
            seeds += f", {self.num_duplicates} duplicate{'s' if self.num_duplicates > 1 else ''} left out"
        return f"{self.label} ({seeds})"


def find_runs(paths: Iterable[RunPath]) -> list[Path]:
    """Return the given run folders, and for other folders the runs up to two levels below."""
    runs: dict[Path, Path] = {}  # by resolved path, so each run counts once
    for path in map(Path, paths):
        if not path.is_dir():
            raise UserError(f"there is no run folder {path}")
        levels = [""] if (path / "config.yaml").is_file() else ["*/", "*/*/"]
        files = sorted(file for level in levels for file in path.glob(f"{level}config.yaml"))
        if not files:
            raise UserError(f"{path} is not a run and contains none: no config.yaml in it or up to two levels below")
        runs |= {file.parent.resolve(): file.parent for file in files}
    return list(runs.values())


def read_run(path: Path) -> Run:
    folder = RunFolder.open(path)
    settings = flat_settings(read_yaml(folder.config_file))
    for name in ("algorithm", "env.name", "seed"):
        if name not in settings:
            raise UserError(f"{folder.config_file} is not the configuration of a run: it has no {name}")
    metrics = read_metrics(folder.metrics_file) if folder.metrics_file.exists() else {}
    if not metrics or not len(metrics[next(iter(metrics))]):
        raise NoDataError(f"the run {path} has no metrics yet; wait for its first row, or leave it out")
    for name in ("env_steps", "seconds", "return_mean", "eval_return_mean"):
        if name not in metrics:
            raise UserError(f"{folder.metrics_file} has no column {name}")
    relevant = {name: value for name, value in settings.items() if name not in WITHOUT_EFFECT}
    return Run(path, settings["algorithm"], settings["env.name"], settings["seed"], relevant, metrics)


def group_runs(runs: Sequence[Run]) -> list[Configuration]:
    """Group runs by configuration, in the order of their first runs."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(repr(sorted(run.settings.items())), []).append(run)
    firsts = [group[0] for group in groups.values()]
    return [_make_configuration(group, firsts) for group in groups.values()]


def _make_configuration(runs: list[Run], firsts: list[Run]) -> Configuration:
    """`firsts` holds the first run of every configuration, to find the settings that differ."""
    first = runs[0]
    compared = [run for run in firsts if (run.algorithm, run.env) == (first.algorithm, first.env)]
    differing = [
        f"{name}={format_value(value)}"
        for name, value in first.settings.items()
        if any(name not in run.settings or run.settings[name] != value for run in compared)
    ]
    by_seed: dict[int, Run] = {}
    # the same seed gives the same returns: counting it twice would make the interval too narrow
    for run in sorted(runs, key=lambda run: run.num_steps):
        by_seed[run.seed] = run
    unique = [by_seed[seed] for seed in sorted(by_seed)]
    return Configuration(" ".join([first.algorithm, *differing]), first.env, unique, len(runs) - len(unique))

"""The runs to compare: found in folders, grouped by configuration, named by what differs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zhixing.config import flat_settings, read_yaml
from zhixing.config.display import WITHOUT_EFFECT, format_value
from zhixing.errors import UserError
from zhixing.report.plots.metrics import Columns, read_metrics
from zhixing.training.run_folder import RunFolder


class NoDataError(UserError):
    """A run has nothing to draw yet."""


@dataclass(frozen=True)
class Run:
    path: Path
    algorithm: str
    task: str
    seed: int
    settings: dict[str, Any]  # by dotted name; all that may change a return
    metrics: Columns

    @property
    def offline(self) -> bool:
        """No environment was stepped: it learned from what was recorded."""
        return not self.metrics["env_steps"].any() and "updates" in self.metrics

    @property
    def length(self) -> float:
        return float(self.metrics["updates" if self.offline else "env_steps"][-1])


@dataclass(frozen=True)
class Configuration:
    """Runs that differ only in their seed, one per seed."""

    label: str  # its algorithm and the settings in which it differs from others of that algorithm on that task
    task: str
    runs: list[Run]
    repeats: int  # runs left out, since another of the same seed got further

    @property
    def legend(self) -> str:
        seeds = f"{len(self.runs)} seeds" if len(self.runs) > 1 else f"seed {self.runs[0].seed}"
        return f"{self.label} ({seeds}{f', without {self.repeats} repeated' if self.repeats else ''})"


def find_runs(paths: Iterable[str | Path]) -> list[Path]:
    """Folders of runs: those given, and those one or two levels below a given folder that is none."""
    found: dict[Path, Path] = {}  # by where they really are, so that none counts twice
    for path in map(Path, paths):
        if not path.is_dir():
            raise UserError(f"there is no run folder {path}")
        levels = [""] if (path / "config.yaml").is_file() else ["*/", "*/*/"]
        files = sorted(file for level in levels for file in path.glob(f"{level}config.yaml"))
        if not files:
            raise UserError(f"{path} is no run and holds none: there is no config.yaml in it or up to two levels below")
        found |= {file.parent.resolve(): file.parent for file in files}
    return list(found.values())


def read_run(path: Path) -> Run:
    folder = RunFolder.open(path)
    settings = flat_settings(read_yaml(folder.config_file))
    for name in ("algorithm", "env.name", "seed"):
        if name not in settings:
            raise UserError(f"{folder.config_file} is no configuration of a run: it lacks {name}")
    metrics = read_metrics(folder.metrics_file) if folder.metrics_file.exists() else {}
    if not metrics or not len(metrics[next(iter(metrics))]):
        raise NoDataError(f"the run {path} has no rows of metrics yet; wait for its first, or leave it out")
    for name in ("env_steps", "seconds", "return_mean", "eval_return_mean"):
        if name not in metrics:
            raise UserError(f"{folder.metrics_file} has no column {name}")
    relevant = {name: value for name, value in settings.items() if name not in WITHOUT_EFFECT}
    return Run(path, settings["algorithm"], settings["env.name"], settings["seed"], relevant, metrics)


def group(runs: Sequence[Run]) -> list[Configuration]:
    """In the order of their first runs."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(repr(sorted(run.settings.items())), []).append(run)
    return [_configuration(mine, [other[0] for other in groups.values()]) for mine in groups.values()]


def _configuration(mine: list[Run], all_firsts: list[Run]) -> Configuration:
    first = mine[0]
    rivals = [run for run in all_firsts if (run.algorithm, run.task) == (first.algorithm, first.task)]
    differing = [
        f"{name}={format_value(value)}"
        for name, value in first.settings.items()
        if any(name not in rival.settings or rival.settings[name] != value for rival in rivals)
    ]
    by_seed: dict[int, Run] = {}
    # repeating a seed gives the same returns again: counted twice, they would feign certainty
    for run in sorted(mine, key=lambda run: run.length):
        by_seed[run.seed] = run
    kept = [by_seed[seed] for seed in sorted(by_seed)]
    return Configuration(" ".join([first.algorithm, *differing]), first.task, kept, len(mine) - len(kept))

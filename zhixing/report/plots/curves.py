"""Learning curves: return, or what else was logged, against environment steps and against seconds of training."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure, SubFigure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, MaxNLocator

from zhixing.errors import UserError, note, unknown
from zhixing.report.plots.interval import Curve, band
from zhixing.report.plots.runs import Configuration, NoDataError, Run, find_runs, group, read_run
from zhixing.utils.files import write_atomically

FORMATS = ("png", "svg", "pdf")
ENOUGH_EVALUATIONS = 3  # points of a curve; with fewer, training returns tell more
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")  # Okabe and Ito's, safe for all
LINE_STYLES = ("-", "--", ":", "-.")  # for more configurations than colours

X_LABELS = {"env_steps": "environment steps", "updates": "updates", "seconds": "seconds of training"}
Y_LABELS = {
    "eval_return_mean": "evaluation return",
    "return_mean": "training return (last 100 episodes)",
    "x_pos": "distance in pixels (x_pos)",
    "flag_get": "share of episodes that reach the flag",
    "win_rate": "share of games won",
}
POINTS: dict[str, Any] = {"linestyle": "none", "marker": "o", "markersize": 5, "markeredgecolor": "white"}
RETURNS = ("eval_return_mean", "return_mean")
PANELS = {"both": ("steps", "seconds"), "steps": ("steps",), "seconds": ("seconds",)}
WINDOWS = 50  # columns other than returns are smoothed over a fiftieth of their rows: losses are noisy


def plot(
    runs: Iterable[str | Path],
    out: str | Path,
    y: str = "return",
    *,
    x: str = "both",
    smooth: int | None = None,
    title: str | None = None,
) -> None:
    """Draw runs, or folders of runs, to a .png, .svg or .pdf file. Runs that differ only in their seed are one color.

    A row of panels per environment. Several seeds: their mean, its 95 % interval, and each seed as a thin line. `y` is
    `return` or any column of metrics.csv, such as `entropy` or `x_pos`; where evaluations have the column, too, they
    are marked by points. `x` is `steps`, `seconds` or `both`, a panel each. Each point is the mean of `smooth` rows;
    by default returns aren't smoothed, and other columns over a fiftieth of their rows. `title` replaces the name of
    the environment. Runs without data are left out, with a note.
    """
    kind_of(Path(out))  # before the runs are read
    if x not in PANELS:
        raise unknown("x axis", x, PANELS)
    if smooth is not None and smooth < 1:
        raise UserError(f"smooth={smooth}: each point is the mean of so many rows; it must be at least 1")
    figure = draw(group(runs_with_data(find_runs(runs), y)), y, x=x, smooth=smooth, title=title)
    save(figure, Path(out))


def runs_with_data(paths: Sequence[Path], y: str) -> list[Run]:
    """Read the runs; those that have no value of `y` yet are left out with a note, unless none has one."""
    runs: list[Run] = []
    missing: list[NoDataError] = []
    for path in paths:
        try:
            run = read_run(path)
            choose_measure([run]) if y == "return" else known([run], y)
            runs.append(run)
        except NoDataError as error:
            missing.append(error)
    if not runs:
        raise missing[0]
    for nothing in missing:
        note(f"left out: {nothing}")
    return runs


def kind_of(out: Path) -> str:
    kind = out.suffix.lower().removeprefix(".")
    if kind not in FORMATS:
        raise UserError(f"the picture {out} must end in {', '.join('.' + name for name in FORMATS)}")
    return kind


def save(figure: Figure, out: Path) -> None:
    kind = kind_of(out)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(out, lambda file: figure.savefig(file, format=kind, dpi=150))
    except OSError as error:
        raise UserError(f"the picture {out} can't be written: {error.strerror or error}") from None


def draw(
    configurations: Sequence[Configuration],
    y: str = "return",
    *,
    x: str = "both",
    smooth: int | None = None,
    title: str | None = None,
) -> Figure:
    tasks = list(dict.fromkeys(configuration.task for configuration in configurations))
    labels = list(dict.fromkeys(configuration.label for configuration in configurations))
    # one look per label, so that an algorithm keeps its colour in all rows
    looks = {
        label: {"color": COLORS[i % len(COLORS)], "linestyle": LINE_STYLES[i // len(COLORS) % len(LINE_STYLES)]}
        for i, label in enumerate(labels)
    }
    rows = [[one for one in configurations if one.task == task] for task in tasks]
    heights = [4.2 + 0.22 * len(row) for row in rows]
    figure = Figure(figsize=(5.5 * len(PANELS[x]), sum(heights)), layout="constrained")
    FigureCanvasAgg(figure)
    parts = figure.subfigures(len(rows), 1, squeeze=False, height_ratios=heights)[:, 0]
    for part, row in zip(parts, rows, strict=True):
        _draw_task(part, row, looks, y, x, smooth)
        part.suptitle(_plain(row[0].task if title is None else title), fontweight="bold")
    return figure


def _draw_task(
    part: SubFigure,
    configurations: list[Configuration],
    looks: dict[str, dict[str, Any]],
    y: str,
    x_axes: str,
    smooth: int | None,
) -> None:
    runs = [run for configuration in configurations for run in configuration.runs]
    measure = choose_measure(runs) if y == "return" else known(runs, y)
    evaluated = _evaluations(runs, measure)
    steps = "updates" if any(run.offline for run in runs) else "env_steps"
    panels = part.subplots(1, len(PANELS[x_axes]), sharey=True, squeeze=False)[0]
    for axes, what in zip(panels, PANELS[x_axes], strict=True):
        x = steps if what == "steps" else "seconds"
        axes.set_title(f"{_plain(y)} against {X_LABELS[x]}", fontsize="medium")
        axes.set_xlabel(X_LABELS[x])
        axes.xaxis.set_major_formatter(EngFormatter(sep="") if x == steps else "{x:g}")
        axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
        axes.grid(color="#e0e0e0", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        for configuration in configurations:
            curves = [curve(run, x, measure) for run in configuration.runs]
            look = looks[configuration.label]
            if measure not in RETURNS or smooth is not None:
                for rough in curves if len(curves) == 1 else []:
                    axes.plot(*rough, linewidth=0.8, alpha=0.35, **look)
                curves = [smoothed(one, smooth or len(one.y) // WINDOWS) for one in curves]
            _draw_configuration(axes, curves, look)
            if evaluated:
                for run in configuration.runs:
                    axes.plot(*curve(run, x, evaluated), color=look["color"], **POINTS)
        axes.set_xlim(left=0)
        axes.tick_params(labelleft=True)
    panels[0].set_ylabel(Y_LABELS.get(measure, _plain(measure)))
    _fit_height(panels[0], runs, [measure, *([evaluated] if evaluated else [])])
    handles = [Line2D([], [], linewidth=2, **looks[configuration.label]) for configuration in configurations]
    labels = [fill(_plain(configuration.legend), 55 * len(panels)) for configuration in configurations]
    if evaluated:
        handles.append(Line2D([], [], color="#606060", **POINTS))
        labels.append("evaluations; lines: training")
    several = any(len(configuration.runs) > 1 for configuration in configurations)
    part.legend(
        handles,
        labels,
        loc="outside lower center",
        ncols=2 if max(len(configuration.legend) for configuration in configurations) < 30 * len(panels) else 1,
        frameon=False,
        title="mean of the seeds, its 95 % interval (Student's t), thin: each seed" if several else None,
        title_fontsize="small",
    )


def _draw_configuration(axes: Axes, curves: list[Curve], look: dict[str, Any]) -> None:
    if len(curves) == 1:
        axes.plot(*curves[0], linewidth=2, marker="o" if len(curves[0].x) == 1 else None, **look)
        return
    for x, y in curves:
        axes.plot(x, y, linewidth=0.8, alpha=0.4, marker="." if len(x) == 1 else None, **look)
    x, mean, low, high = band(curves)
    axes.fill_between(x, low, high, color=look["color"], alpha=0.15, linewidth=0)
    axes.plot(x, mean, linewidth=2, **look)


def _fit_height(axes: Axes, runs: list[Run], measures: list[str]) -> None:
    """To the curves: the interval of two seeds may be many times as high and would flatten them."""
    ys = np.concatenate([curve(run, "env_steps", measure).y for run in runs for measure in measures])
    low, high = ys.min(), ys.max()
    margin = 0.06 * (high - low) or 1.0
    axes.set_ylim(low - margin, high + margin)


def choose_measure(runs: Sequence[Run]) -> str:
    """One for all runs of a task, so that like is compared with like: evaluation returns where all have enough."""
    points = {name: min(len(curve(run, "env_steps", name).x) for run in runs) for name in RETURNS}
    if points["eval_return_mean"] >= ENOUGH_EVALUATIONS:
        return "eval_return_mean"
    if points["return_mean"]:
        return "return_mean"
    if points["eval_return_mean"]:  # training that plays no episodes, such as from a dataset
        return "eval_return_mean"
    empty = next(run for run in runs if not len(curve(run, "env_steps", "return_mean").x))
    raise NoDataError(f"the run {empty.path} has no return yet: none of its episodes has ended")


def known(runs: Sequence[Run], y: str) -> str:
    """A column that all runs have, with something in it."""
    for run in runs:
        if y not in run.metrics:
            raise UserError(f"the run {run.path} logs no {y!r}; it logs {', '.join(run.metrics)}")
        if not len(curve(run, "env_steps", y).x):
            raise NoDataError(f"the run {run.path} has no {y} yet")
    return y


def _evaluations(runs: Sequence[Run], measure: str) -> str | None:
    """The column of evaluations beside that of training, where any run has some."""
    name = f"eval_{measure}"
    there = measure not in RETURNS and any(len(curve(run, "env_steps", name).x) for run in runs)
    return name if there else None


def smoothed(rough: Curve, rows: int) -> Curve:
    """Return the running mean over so many rows; near the ends over as many as there are on both sides."""
    reach = rows // 2
    sums = np.concatenate([[0.0], np.cumsum(rough.y)])
    at = np.arange(len(rough.y))
    half = np.minimum(reach, np.minimum(at, at[::-1]))
    return Curve(rough.x, (sums[at + half + 1] - sums[at - half]) / (2 * half + 1))


def curve(run: Run, x: str, y: str) -> Curve:
    """The rows that have both."""
    xs, ys = run.metrics[x], run.metrics.get(y, np.full(len(run.metrics[x]), np.nan))
    there = np.isfinite(xs) & np.isfinite(ys)
    return Curve(xs[there], ys[there])


def _plain(text: str) -> str:
    return text.replace("$", r"\$")  # which would begin a formula

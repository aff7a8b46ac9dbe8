"""Learning curves: return or another logged metric against environment steps and seconds of training."""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
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
from zhixing.reports.plots.interval import Curve, confidence_interval
from zhixing.reports.plots.runs import Configuration, NoDataError, Run, find_runs, group_runs, read_run
from zhixing.training.run_folder import RunPath
from zhixing.utils.files import write_atomically

FORMATS = ("png", "svg", "pdf")
MIN_EVALUATIONS = 3  # with fewer points than this, plot training returns instead
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")  # Okabe-Ito, colorblind-safe
LINE_STYLES = ("-", "--", ":", "-.")  # for more configurations than colors

X_LABELS = {"env_steps": "environment steps", "updates": "updates", "seconds": "seconds of training"}
Y_LABELS = {
    "eval_return_mean": "evaluation return",
    "return_mean": "training return (last 100 episodes)",
    "x_pos": "distance in pixels (x_pos)",
    "flag_get": "share of episodes that reach the flag",
    "win_rate": "share of games won",
}
POINT_STYLE: dict[str, Any] = {"linestyle": "none", "marker": "o", "markersize": 5, "markeredgecolor": "white"}
RETURNS = ("eval_return_mean", "return_mean")
PANELS = {"both": ("steps", "seconds"), "steps": ("steps",), "seconds": ("seconds",)}
SMOOTHING_WINDOWS = 50  # columns other than returns, often noisy, are averaged over 1/50 of their rows


@dataclass(frozen=True)
class Chart:
    """A drawn plot. Notebooks display it."""

    figure: Figure
    path: Path | None = None  # the file, if it was written

    def save(self, out: str | os.PathLike[str]) -> None:
        """Write a .png, .svg or .pdf file."""
        save_figure(self.figure, Path(out))

    def _repr_png_(self) -> bytes:
        file = io.BytesIO()
        self.figure.savefig(file, format="png", dpi=100)
        return file.getvalue()


def plot(
    runs: RunPath | Iterable[RunPath],
    out: str | os.PathLike[str] | None = None,
    y: str = "return",
    *,
    x: str = "both",
    smooth: int | None = None,
    title: str | None = None,
) -> Chart:
    """Plot runs, or folders of runs, and write the plot to `out`, a .png, .svg or .pdf file, if it is given.

    There is a row of panels per environment. Runs that differ only in their seed share a color: several seeds are drawn
    as their mean with its 95 % interval, and each seed as a thin line. Runs without data are left out with a note.
    Notebooks display the returned plot.

    Args:
        runs: Run folders or results of runs, one or several.
        out: File to write; by default the plot is only returned.
        y: `return`, or any column of metrics.csv such as `entropy` or `x_pos`. If evaluations log the column too, they
            are drawn as points.
        x: `steps`, `seconds`, or `both` for a panel each.
        smooth: Number of rows to average over. By default returns aren't smoothed, and other columns are averaged over
            1/50 of their rows.
        title: Replaces the environment's name.
    """
    if out is not None:
        file_format(Path(out))  # fails before the runs are read
    if x not in PANELS:
        raise unknown("x axis", x, PANELS)
    if smooth is not None and smooth < 1:
        raise UserError(f"smooth={smooth} must be at least 1: it is the number of rows to average over")
    paths = [runs] if isinstance(runs, (str, os.PathLike)) else runs
    figure = draw_curves(group_runs(read_runs_with_data(find_runs(paths), y)), y, x=x, smooth=smooth, title=title)
    chart = Chart(figure, None if out is None else Path(out))
    if out is not None:
        chart.save(out)
    return chart


def read_runs_with_data(paths: Sequence[Path], y: str) -> list[Run]:
    """Read the runs that have values of `y`. Others are left out with a note, unless all would be."""
    runs: list[Run] = []
    reasons: list[NoDataError] = []
    for path in paths:
        try:
            run = read_run(path)
            choose_column([run], y)
            runs.append(run)
        except NoDataError as error:
            reasons.append(error)
    if not runs:
        raise reasons[0]
    for reason in reasons:
        note(f"left out: {reason}")
    return runs


def file_format(out: Path) -> str:
    suffix = out.suffix.lower().removeprefix(".")
    if suffix not in FORMATS:
        raise UserError(f"the plot {out} must end in {', '.join('.' + name for name in FORMATS)}")
    return suffix


def save_figure(figure: Figure, out: Path) -> None:
    suffix = file_format(out)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(out, lambda file: figure.savefig(file, format=suffix, dpi=150))
    except OSError as error:
        raise UserError(f"can't write the plot {out}: {error.strerror or error}") from None


def draw_curves(
    configurations: Sequence[Configuration],
    y: str = "return",
    *,
    x: str = "both",
    smooth: int | None = None,
    title: str | None = None,
) -> Figure:
    env_names = list(dict.fromkeys(configuration.env for configuration in configurations))
    labels = list(dict.fromkeys(configuration.label for configuration in configurations))
    # one style per label, so an algorithm has the same color in all rows
    styles = {
        label: {"color": COLORS[i % len(COLORS)], "linestyle": LINE_STYLES[i // len(COLORS) % len(LINE_STYLES)]}
        for i, label in enumerate(labels)
    }
    rows = [[configuration for configuration in configurations if configuration.env == name] for name in env_names]
    heights = [4.2 + 0.22 * len(row) for row in rows]
    figure = Figure(figsize=(5.5 * len(PANELS[x]), sum(heights)), layout="constrained")
    FigureCanvasAgg(figure)
    subfigures = figure.subfigures(len(rows), 1, squeeze=False, height_ratios=heights)[:, 0]
    for subfigure, row in zip(subfigures, rows, strict=True):
        _draw_row(subfigure, row, styles, y, x, smooth)
        subfigure.suptitle(_escape(row[0].env if title is None else title), fontweight="bold")
    return figure


def _draw_row(
    subfigure: SubFigure,
    configurations: list[Configuration],
    styles: dict[str, dict[str, Any]],
    y: str,
    x_axes: str,
    smooth: int | None,
) -> None:
    runs = [run for configuration in configurations for run in configuration.runs]
    column = choose_column(runs, y)
    eval_column = _evaluation_column(runs, column)
    steps = "updates" if any(run.offline for run in runs) else "env_steps"
    panels = subfigure.subplots(1, len(PANELS[x_axes]), sharey=True, squeeze=False)[0]
    for axes, unit in zip(panels, PANELS[x_axes], strict=True):
        x = steps if unit == "steps" else "seconds"
        axes.set_title(f"{_escape(y)} against {X_LABELS[x]}", fontsize="medium")
        axes.set_xlabel(X_LABELS[x])
        axes.xaxis.set_major_formatter(EngFormatter(sep="") if x == steps else "{x:g}")
        axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
        axes.grid(color="#e0e0e0", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        for configuration in configurations:
            curves = [extract_curve(run, x, column) for run in configuration.runs]
            style = styles[configuration.label]
            if column not in RETURNS or smooth is not None:
                if len(curves) == 1:
                    axes.plot(*curves[0], linewidth=0.8, alpha=0.35, **style)
                curves = [running_mean(curve, smooth or len(curve.y) // SMOOTHING_WINDOWS) for curve in curves]
            _draw_configuration(axes, curves, style)
            if eval_column:
                for run in configuration.runs:
                    axes.plot(*extract_curve(run, x, eval_column), color=style["color"], **POINT_STYLE)
        axes.set_xlim(left=0)
        axes.tick_params(labelleft=True)
    panels[0].set_ylabel(Y_LABELS.get(column, _escape(column)))
    _fit_y_limits(panels[0], runs, [column, *([eval_column] if eval_column else [])])
    handles = [Line2D([], [], linewidth=2, **styles[configuration.label]) for configuration in configurations]
    labels = [fill(_escape(configuration.legend), 55 * len(panels)) for configuration in configurations]
    if eval_column:
        handles.append(Line2D([], [], color="#606060", **POINT_STYLE))
        labels.append("evaluations; lines: training")
    several_seeds = any(len(configuration.runs) > 1 for configuration in configurations)
    subfigure.legend(
        handles,
        labels,
        loc="outside lower center",
        ncols=2 if max(len(configuration.legend) for configuration in configurations) < 30 * len(panels) else 1,
        frameon=False,
        title="mean over seeds, 95 % interval (Student's t); thin lines: single seeds" if several_seeds else None,
        title_fontsize="small",
    )


def _draw_configuration(axes: Axes, curves: list[Curve], style: dict[str, Any]) -> None:
    if len(curves) == 1:
        axes.plot(*curves[0], linewidth=2, marker="o" if len(curves[0].x) == 1 else None, **style)
        return
    for x, y in curves:
        axes.plot(x, y, linewidth=0.8, alpha=0.4, marker="." if len(x) == 1 else None, **style)
    x, mean, low, high = confidence_interval(curves)
    axes.fill_between(x, low, high, color=style["color"], alpha=0.15, linewidth=0)
    axes.plot(x, mean, linewidth=2, **style)


def _fit_y_limits(axes: Axes, runs: list[Run], columns: list[str]) -> None:
    """Fit the y axis to the curves. The interval of two seeds can be much larger and would flatten them."""
    ys = np.concatenate([extract_curve(run, "env_steps", column).y for run in runs for column in columns])
    low, high = ys.min(), ys.max()
    margin = 0.06 * (high - low) or 1.0
    axes.set_ylim(low - margin, high + margin)


def choose_column(runs: Sequence[Run], y: str) -> str:
    """Return the column of metrics.csv to plot as `y`. Raises `UserError` if a run doesn't have it or has no data."""
    if y == "return":
        return choose_return_column(runs)
    for run in runs:
        if y not in run.metrics:
            raise UserError(f"the run {run.path} doesn't log {y!r}; it logs {', '.join(run.metrics)}")
        if not len(extract_curve(run, "env_steps", y).x):
            raise NoDataError(f"the run {run.path} has no {y} yet")
    return y


def choose_return_column(runs: Sequence[Run]) -> str:
    """Return one column for all runs, so they are comparable: evaluation returns if every run has enough of them."""
    num_points = {name: min(len(extract_curve(run, "env_steps", name).x) for run in runs) for name in RETURNS}
    if num_points["eval_return_mean"] >= MIN_EVALUATIONS:
        return "eval_return_mean"
    if num_points["return_mean"]:
        return "return_mean"
    if num_points["eval_return_mean"]:  # training without episodes, for example on a dataset
        return "eval_return_mean"
    empty = next(run for run in runs if not len(extract_curve(run, "env_steps", "return_mean").x))
    raise NoDataError(f"the run {empty.path} has no return yet: no episode has ended")


def _evaluation_column(runs: Sequence[Run], column: str) -> str | None:
    """Return the evaluations' column for a training column, if any run has values in it."""
    name = f"eval_{column}"
    has_data = column not in RETURNS and any(len(extract_curve(run, "env_steps", name).x) for run in runs)
    return name if has_data else None


def running_mean(curve: Curve, rows: int) -> Curve:
    """Average over a centered window of `rows` rows, which shrinks symmetrically towards the ends of the curve."""
    sums = np.concatenate([[0.0], np.cumsum(curve.y)])
    i = np.arange(len(curve.y))
    half = np.minimum(rows // 2, np.minimum(i, i[::-1]))
    return Curve(curve.x, (sums[i + half + 1] - sums[i - half]) / (2 * half + 1))


def extract_curve(run: Run, x: str, y: str) -> Curve:
    """Return the rows that have finite values in both columns."""
    xs, ys = run.metrics[x], run.metrics.get(y, np.full(len(run.metrics[x]), np.nan))
    finite = np.isfinite(xs) & np.isfinite(ys)
    return Curve(xs[finite], ys[finite])


def _escape(text: str) -> str:
    return text.replace("$", r"\$")  # a $ would start a formula

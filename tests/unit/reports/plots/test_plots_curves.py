"""Tests of learning curves."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_runs import write_run
from matplotlib.image import imread

import zhixing as zx
from zhixing.errors import UserError
from zhixing.reports.plots import plot
from zhixing.reports.plots.curves import choose_return_column, draw_curves
from zhixing.reports.plots.runs import group_runs, read_run


def draw_panels(*runs: Path) -> list[tuple[Any, Any]]:
    """Return the two panels of each row."""
    figure = draw_curves(group_runs([read_run(run) for run in runs]))
    figure.savefig(io.BytesIO(), format="png")  # must not raise
    return [tuple(part.axes) for part in figure.subfigs]


def test_several_seeds_have_thin_lines_and_a_mean_with_interval(tmp_path: Path) -> None:
    runs = [
        write_run(tmp_path / "a", [1, 2, 3], seed=0, seconds_per_row=1),
        write_run(tmp_path / "b", [3, 4, 7, 9], seed=1, seconds_per_row=2),
    ]
    ((steps, seconds),) = draw_panels(*runs)
    *seeds, mean = steps.lines
    assert [list(line.get_ydata()) for line in seeds] == [[1, 2, 3], [3, 4, 7, 9]]
    assert list(mean.get_xdata()) == [100, 200, 300]  # where both runs have data
    assert list(mean.get_ydata()) == [2, 3, 5]
    assert {line.get_color() for line in steps.lines} == {mean.get_color()}
    # half width 12.7062 * |a - b| / 2
    heights = steps.collections[0].get_paths()[0].vertices
    np.testing.assert_allclose(heights[heights[:, 0] == 300][:, 1].max(), 5 + 12.7062 * 2)
    # both runs cover seconds 2 and 3: the first has 2 and 3 there, the second 3 and 3.5
    assert list(seconds.lines[-1].get_xdata()) == [2, 3]
    assert list(seconds.lines[-1].get_ydata()) == [2.5, 3.25]
    # the interval doesn't set the y limits
    assert steps.get_ylim()[1] < 10


def test_single_seed_has_only_its_line(tmp_path: Path) -> None:
    ((steps, seconds),) = draw_panels(write_run(tmp_path / "a", [1, 2, 3]))
    assert [list(line.get_ydata()) for line in (*steps.lines, *seconds.lines)] == [[1, 2, 3]] * 2
    assert not steps.collections
    assert steps.get_xlabel() == "environment steps"
    assert seconds.get_xlabel() == "seconds of training"


def test_evaluations_are_plotted_if_all_runs_have_three(tmp_path: Path) -> None:
    frequent = write_run(tmp_path / "a", [1, 2, 3, 4], evals=[7, "", 8, 9])
    rare = write_run(tmp_path / "b", [1, 2, 3, 4], evals=["", 8, 9], seed=1)
    ((steps, _),) = draw_panels(frequent)
    assert steps.get_ylabel() == "evaluation return"
    assert list(steps.lines[0].get_xdata()) == [100, 300, 400]  # blank cells have no point
    assert list(steps.lines[0].get_ydata()) == [7, 8, 9]
    ((steps, _),) = draw_panels(frequent, rare)
    assert steps.get_ylabel() == "training return (last 100 episodes)"


def test_training_without_episodes_plots_few_evaluations(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", [np.nan, np.nan], evals=[5, 6])
    assert choose_return_column([read_run(run)]) == "eval_return_mean"


def test_run_without_a_return_is_reported(tmp_path: Path) -> None:
    run = write_run(tmp_path / "young", [np.nan, np.nan])
    with pytest.raises(UserError, match=r"the run .*young has no return yet"):
        draw_panels(run, write_run(tmp_path / "old", seed=1))


def test_rows_per_env_share_colors(tmp_path: Path) -> None:
    runs = [
        write_run(tmp_path / f"{algorithm}{i}", algorithm=algorithm, env=env)
        for i, (algorithm, env) in enumerate([("ppo", "A-v1"), ("dqn", "A-v1"), ("dqn", "B-v1"), ("ppo", "B-v1")])
    ]
    first, second = draw_panels(*runs)
    colors = [line.get_color() for line in first[0].lines]
    assert len(set(colors)) == 2
    assert [line.get_color() for line in second[0].lines] == colors[::-1]


def test_twenty_configurations_have_distinct_styles(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / str(i), [1, i], lr=0.1 * i) for i in range(1, 21)]
    ((steps, _),) = draw_panels(*runs)
    assert len({(line.get_color(), line.get_linestyle()) for line in steps.lines}) == 20


def test_single_row_and_constant_returns_can_be_drawn(tmp_path: Path) -> None:
    draw_panels(write_run(tmp_path / "a", [4.0]), write_run(tmp_path / "b", [4.0], seed=1))
    draw_panels(write_run(tmp_path / "c$_1^$", [4.0, 4.0], algorithm="my_$^:Own"))


def test_png_depends_on_the_data(tmp_path: Path) -> None:
    for name, returns in (("a", [1, 2, 3]), ("b", [1, 2, 3]), ("c", [3, 1, 2])):
        plot([write_run(tmp_path / name, returns)], tmp_path / "new" / f"{name}.png")
    a, b, c = (imread(tmp_path / "new" / f"{name}.png") for name in "abc")
    assert a.shape[1] == 1650
    assert a[..., :3].std() > 0.05
    assert np.array_equal(a, b)
    assert not np.array_equal(a, c)
    assert sorted(file.name for file in (tmp_path / "new").iterdir()) == [
        "a.png",
        "b.png",
        "c.png",
    ]  # no temporary file


@pytest.mark.parametrize(("name", "start"), [("a.svg", b"<?xml"), ("a.PDF", b"%PDF"), ("a.png", b"\x89PNG")])
def test_suffix_selects_the_format(tmp_path: Path, name: str, start: bytes) -> None:
    plot([write_run(tmp_path / "run")], tmp_path / name)
    assert (tmp_path / name).read_bytes().startswith(start)


@pytest.mark.parametrize("name", ["a.gif", "a", "png"])
def test_unknown_suffix_is_rejected(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match=r"must end in \.png, \.svg, \.pdf"):
        plot([write_run(tmp_path / "run")], tmp_path / name)


def test_unwritable_path_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="can't write the plot"):
        plot([write_run(tmp_path / "run")], tmp_path / "file" / "a.png")


def test_real_runs_of_two_settings(tmp_path: Path) -> None:
    for lr in (1e-2, 1e-6):
        for seed in (0, 1):
            settings = {"env_steps": 1024, "log_every": 128, "eval_every": 256, "eval_episodes": 5}
            settings |= {"num_envs": 1, "rollout_steps": 128, "minibatch_size": 64}
            out = tmp_path / f"{lr}" / str(seed)
            zx.train("ppo", env="toy/match", lr=lr, seed=seed, out=out, quiet=True, tensorboard=False, **settings)
    plot([tmp_path], tmp_path / "plot.png")
    ((steps, _),) = draw_panels(*(tmp_path / f"{lr}" / str(seed) for lr in (1e-2, 1e-6) for seed in (0, 1)))
    means = [line for line in steps.lines if line.get_linewidth() == 2]
    assert [list(line.get_xdata()) for line in means] == [[256, 512, 768, 1024]] * 2
    assert means[0].get_ydata()[-1] > means[1].get_ydata()[-1] + 2


def add_distances(run: Path, training: list[float], evaluations: list[float | str]) -> Path:
    """Add columns for an info key of the environment."""
    lines = (run / "metrics.csv").read_text().splitlines()
    cells = [["x_pos", "eval_x_pos"], *([str(a), str(b)] for a, b in zip(training, evaluations, strict=True))]
    (run / "metrics.csv").write_text(
        "".join(f"{line},{','.join(pair)}\n" for line, pair in zip(lines, cells, strict=True))
    )
    return run


def test_other_columns_have_points_for_evaluations(tmp_path: Path) -> None:
    run = add_distances(write_run(tmp_path / "a", [1, 2, 3], evals=["", 4, 5]), [300, 400, 500], ["", 450, 900])
    figure = draw_curves(group_runs([read_run(run)]), "x_pos")
    steps, _ = figure.subfigs[0].axes
    raw, line, points = steps.lines
    assert list(raw.get_ydata()) == list(line.get_ydata()) == [300, 400, 500]  # too few rows to smooth
    assert (list(points.get_xdata()), list(points.get_ydata())) == ([200, 300], [450, 900])
    assert points.get_linestyle() == "None"
    assert steps.get_ylabel() == "distance in pixels (x_pos)"
    assert steps.get_ylim()[1] > 900
    assert [text.get_text() for text in figure.subfigs[0].legends[0].texts] == [
        "ppo (seed 0)",
        "evaluations; lines: training",
    ]


def test_long_columns_are_smoothed_but_returns_are_not(tmp_path: Path) -> None:
    rows = [float(i % 2) for i in range(100)]
    run = add_distances(write_run(tmp_path / "a", rows), rows, [""] * 100)
    steps, _ = draw_curves(group_runs([read_run(run)]), "x_pos").subfigs[0].axes
    _, smooth = steps.lines
    # 100 / 50 = 2 rows make a window of three: 0 1 0 and 1 0 1 average to 1/3 and 2/3; the ends stay
    np.testing.assert_allclose(smooth.get_ydata()[:5], [0, 1 / 3, 2 / 3, 1 / 3, 2 / 3])
    assert smooth.get_ydata()[-1] == 1.0
    ((steps, _),) = draw_panels(run)
    assert list(steps.lines[0].get_ydata()) == rows


def test_missing_column_is_reported(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a")
    with pytest.raises(UserError, match="doesn't log 'x_pos'; it logs env_steps, "):
        plot([run], tmp_path / "a.png", y="x_pos")
    with pytest.raises(UserError, match="has no loss yet"):
        plot([run], tmp_path / "a.png", y="loss")


def test_runs_without_data_are_left_out_with_a_note(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "runs/old")
    write_run(tmp_path / "runs/young", [np.nan, np.nan], seed=1)
    (write_run(tmp_path / "runs/new", seed=2) / "metrics.csv").unlink()
    plot([tmp_path / "runs"], tmp_path / "a.png")
    notes = capsys.readouterr().err
    assert notes.count("note: left out: the run") == 2
    assert "young has no return yet" in notes
    assert "new has no metrics yet" in notes
    with pytest.raises(UserError, match="has no metrics yet"):
        plot([tmp_path / "runs/new"], tmp_path / "a.png")


def test_single_panel_title_and_smoothing(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", [0.0, 3.0, 0.0, 3.0, 0.0])
    figure = draw_curves(group_runs([read_run(run)]), x="seconds", smooth=3, title="Two settings")
    (seconds,) = figure.subfigs[0].axes
    assert seconds.get_xlabel() == "seconds of training"
    assert figure.subfigs[0].get_suptitle() == "Two settings"
    raw, smooth = seconds.lines
    assert list(raw.get_ydata()) == [0, 3, 0, 3, 0]
    assert list(smooth.get_ydata()) == [0, 1, 2, 1, 0]  # means of three, except at the ends
    with pytest.raises(UserError, match=r"x axis 'stepps'.*steps"):
        plot([run], tmp_path / "a.png", x="stepps")
    with pytest.raises(UserError, match="smooth=0"):
        plot([run], tmp_path / "a.png", smooth=0)

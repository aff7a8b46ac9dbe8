"""Tests of the confidence interval of curves."""

from __future__ import annotations

import numpy as np
import pytest

from zhixing.reports.plots.interval import Curve, confidence_interval, student_t


def make_curve(x: list[float], y: list[float]) -> Curve:
    return Curve(np.array(x, float), np.array(y, float))


def test_mean_and_interval_of_three_curves() -> None:
    interval = confidence_interval(
        [make_curve([0, 10], [1, 4]), make_curve([0, 10], [2, 4]), make_curve([0, 10], [3, 4])]
    )
    np.testing.assert_array_equal(interval.mean, [2, 4])
    # at 0: s = 1, t(2) = 4.3027, 4.3027 * 1 / sqrt(3) = 2.4842; at 10 all agree
    np.testing.assert_allclose(interval.high - interval.mean, [2.4842, 0], atol=1e-4)
    np.testing.assert_allclose(interval.mean - interval.low, [2.4842, 0], atol=1e-4)


def test_curves_are_interpolated_at_every_x_of_any_curve() -> None:
    # the second curve is at 10 at x = 5; t(1) s / sqrt(2) = 12.7062 * |a - b| / 2
    interval = confidence_interval([make_curve([0, 5, 10], [0, 20, 0]), make_curve([0, 10], [0, 20])])
    np.testing.assert_array_equal(interval.x, [0, 5, 10])
    np.testing.assert_array_equal(interval.mean, [0, 15, 10])
    np.testing.assert_allclose(interval.high - interval.mean, [0, 12.7062 * 5, 12.7062 * 10])


def test_mean_ends_where_the_shortest_curve_ends() -> None:
    interval = confidence_interval([make_curve([0, 10, 20, 30], [1, 1, 1, 9]), make_curve([5, 10, 20], [3, 3, 3])])
    np.testing.assert_array_equal(interval.x, [5, 10, 20])
    np.testing.assert_array_equal(interval.mean, [2, 2, 2])


def test_curves_without_common_x_have_no_mean() -> None:
    assert len(confidence_interval([make_curve([0, 10], [1, 1]), make_curve([20, 30], [1, 1])]).x) == 0


def test_long_curves_are_subsampled_but_keep_their_ends() -> None:
    x = list(range(5000))
    interval = confidence_interval([make_curve(x, x), make_curve(x, x)])
    assert len(interval.x) == 1000
    assert (interval.x[0], interval.x[-1]) == (0, 4999)
    np.testing.assert_array_equal(interval.mean, interval.x)


@pytest.mark.parametrize(
    ("degrees_of_freedom", "expected"),
    [(1, 12.7062), (2, 4.3027), (4, 2.7764), (10, 2.2281), (11, 2.2010), (20, 2.0860), (100, 1.9840)],
)
def test_student_t_matches_published_tables(degrees_of_freedom: int, expected: float) -> None:
    assert student_t(degrees_of_freedom) == pytest.approx(expected, abs=0.0025)

from __future__ import annotations

import numpy as np
import pytest

from zhixing.report.plots.interval import Curve, band, student_t


def curve(x: list[float], y: list[float]) -> Curve:
    return Curve(np.array(x, float), np.array(y, float))


def test_mean_and_interval_of_three_curves() -> None:
    found = band([curve([0, 10], [1, 4]), curve([0, 10], [2, 4]), curve([0, 10], [3, 4])])
    np.testing.assert_array_equal(found.mean, [2, 4])
    # at 0: s = 1, t(2) = 4.3027, 4.3027 * 1 / sqrt(3) = 2.4842; at 10 all agree
    np.testing.assert_allclose(found.high - found.mean, [2.4842, 0], atol=1e-4)
    np.testing.assert_allclose(found.mean - found.low, [2.4842, 0], atol=1e-4)


def test_curves_are_interpolated_to_all_points_of_any() -> None:
    # the second at 5 is half way from 0 to 20; t(1) s / sqrt(2) = 12.7062 * |a - b| / 2
    found = band([curve([0, 5, 10], [0, 20, 0]), curve([0, 10], [0, 20])])
    np.testing.assert_array_equal(found.x, [0, 5, 10])
    np.testing.assert_array_equal(found.mean, [0, 15, 10])
    np.testing.assert_allclose(found.high - found.mean, [0, 12.7062 * 5, 12.7062 * 10])


def test_mean_ends_where_the_shortest_curve_ends() -> None:
    found = band([curve([0, 10, 20, 30], [1, 1, 1, 9]), curve([5, 10, 20], [3, 3, 3])])
    np.testing.assert_array_equal(found.x, [5, 10, 20])
    np.testing.assert_array_equal(found.mean, [2, 2, 2])


def test_curves_that_share_no_point_have_no_mean() -> None:
    assert len(band([curve([0, 10], [1, 1]), curve([20, 30], [1, 1])]).x) == 0


def test_long_curves_are_thinned_but_keep_their_ends() -> None:
    x = list(range(5000))
    found = band([curve(x, x), curve(x, x)])
    assert len(found.x) == 1000
    assert (found.x[0], found.x[-1]) == (0, 4999)
    np.testing.assert_array_equal(found.mean, found.x)


@pytest.mark.parametrize(
    ("freedom", "tabled"),
    [(1, 12.7062), (2, 4.3027), (4, 2.7764), (10, 2.2281), (11, 2.2010), (20, 2.0860), (100, 1.9840)],
)
def test_quantiles_are_those_of_the_tables(freedom: int, tabled: float) -> None:
    assert student_t(freedom) == pytest.approx(tabled, abs=0.0025)

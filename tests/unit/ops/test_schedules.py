from __future__ import annotations

import pytest

from zhixing.ops.schedules import linear_schedule


@pytest.mark.parametrize(
    ("fraction", "expected"),
    [(0.0, 1.0), (0.25, 0.8), (0.5, 0.6), (1.0, 0.2), (1.7, 0.2), (-0.3, 1.0)],  # 1 - 0.8 f, constant outside
)
def test_linear_schedule_decreases_and_stays_constant(fraction: float, expected: float) -> None:
    assert linear_schedule(1.0, 0.2, fraction) == pytest.approx(expected)


def test_linear_schedule_increases() -> None:
    assert linear_schedule(0.4, 1.0, 0.5) == pytest.approx(0.7)  # 0.4 + 0.6 / 2

"""Tests of reading metrics.csv."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from zhixing.errors import UserError
from zhixing.reports.plots.metrics import read_metrics


def write(path: Path, text: str | bytes) -> Path:
    file = path / "metrics.csv"
    file.write_bytes(text.encode() if isinstance(text, str) else text)
    return file


def test_columns_are_arrays_with_nan_for_blanks(tmp_path: Path) -> None:
    columns = read_metrics(write(tmp_path, "env_steps,return_mean\n100,\n200,1.5\n300,-2e-3\n"))
    assert list(columns) == ["env_steps", "return_mean"]
    np.testing.assert_array_equal(columns["env_steps"], [100, 200, 300])
    np.testing.assert_array_equal(columns["return_mean"], [np.nan, 1.5, -0.002])


@pytest.mark.parametrize("tail", ["300", "300,", "300,12", "300,1.5,9", "3x"])
def test_incomplete_last_line_is_ignored(tmp_path: Path, tail: str) -> None:
    columns = read_metrics(write(tmp_path, f"env_steps,return_mean\n100,1\n200,2\n{tail}"))
    np.testing.assert_array_equal(columns["return_mean"], [1, 2])


@pytest.mark.parametrize("text", ["", "env_st", "env_steps,return_mean", "env_steps,return_mean\n"])
def test_file_without_rows_has_empty_columns(tmp_path: Path, text: str) -> None:
    assert all(len(column) == 0 for column in read_metrics(write(tmp_path, text)).values())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n1,2,3\n4,5\n", "line 3: it has 3 cells, the header has 2"),
        ("a,b\n1\n4,5\n", "line 2: it has 1 cells"),
        ("a,b\n1,2\n\n4,5\n", "line 3: it has 0 cells"),
        ("a,b\n1,2\n4,five\n", "line 3: b is 'five', which is not a number"),
        (b"a,b\n1,2\n\xff\xfe,1\n", "line 3: it is not text"),
    ],
)
def test_damaged_line_is_reported(tmp_path: Path, text: str | bytes, message: str) -> None:
    file = write(tmp_path, text)
    with pytest.raises(UserError) as error:
        read_metrics(file)
    assert str(file) in str(error.value)
    assert message in str(error.value)


def test_missing_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"there is no file .*gone"):
        read_metrics(tmp_path / "gone.csv")

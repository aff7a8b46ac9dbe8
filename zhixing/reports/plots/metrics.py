"""Read metrics.csv."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from zhixing.errors import UserError

Columns = dict[str, NDArray[np.float64]]


def read_metrics(path: str | Path) -> Columns:
    """Return the columns by name, with NaN for blank cells. A last line without a newline is incomplete and ignored."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"there is no file {path}") from None
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise UserError(f"{path} is damaged at line {line}: it is not text") from None
    except OSError as error:
        raise UserError(f"can't read {path}: {error.strerror or error}") from None
    lines = text[: text.rfind("\n") + 1].splitlines()
    names = next(csv.reader(lines[:1]), [])
    rows = [_row(line, names, f"{path} is damaged at line {number}") for number, line in enumerate(lines[1:], 2)]
    table = np.array(rows, np.float64).reshape(len(rows), len(names))
    return {name: table[:, column] for column, name in enumerate(names)}


def _row(line: str, names: list[str], problem: str) -> list[float]:
    cells = next(csv.reader([line]), [])
    if len(cells) != len(names):
        raise UserError(f"{problem}: it has {len(cells)} cells, the header has {len(names)}")
    row = []
    for name, cell in zip(names, cells, strict=True):
        try:
            row.append(float(cell) if cell else np.nan)
        except ValueError:
            raise UserError(f"{problem}: {name} is {cell!r}, which is not a number") from None
    return row

"""Tables of results: the same rows in a terminal and in a CSV file."""

from __future__ import annotations

import csv
import io
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from zhixing.utils.files import write_atomically

Rows = Sequence[Mapping[str, Any]]  # all with the same names


def cell(value: Any) -> str:
    """Blank for NaN."""
    if isinstance(value, float):
        return "" if math.isnan(value) else f"{value:.6g}"
    return str(value)


def print_table(rows: Rows, title: str | None = None, wrap: Sequence[str] = ()) -> None:
    """Print rows; columns named in `wrap` may take several lines."""
    table = Table(box=box.SIMPLE_HEAD, title=title)
    for name in rows[0]:
        numbers = all(isinstance(row[name], (int, float)) for row in rows)
        table.add_column(name, no_wrap=name not in wrap, justify="right" if numbers else "left")
    for row in rows:
        table.add_row(*(Text(cell(value)) for value in row.values()))  # not marked up: [64, 64] is no style
    (Console() if sys.stdout.isatty() else Console(width=140)).print(table)


def write_table(rows: Rows, path: Path) -> None:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({name: cell(value) for name, value in row.items()})
    write_atomically(path, lambda file: file.write(text.getvalue().encode()))

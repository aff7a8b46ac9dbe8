"""Tables of results, printed in a terminal and written as CSV files."""

from __future__ import annotations

import csv
import html
import io
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from zhixing.utils.files import write_atomically

Rows = Sequence[Mapping[str, Any]]  # values by column; all rows have the same columns


def format_cell(value: Any) -> str:
    """Return a value as text, empty for NaN."""
    if isinstance(value, float):
        return "" if math.isnan(value) else f"{value:.6g}"
    return str(value)


def print_table(rows: Rows, title: str | None = None, wrap: Sequence[str] = ()) -> None:
    """Print rows. Cells of the columns in `wrap` may have several lines."""
    table = Table(box=box.SIMPLE_HEAD, title=title)
    for name in rows[0]:
        is_number = all(isinstance(row[name], (int, float)) for row in rows)
        table.add_column(name, no_wrap=name not in wrap, justify="right" if is_number else "left")
    for row in rows:
        table.add_row(*(Text(format_cell(value)) for value in row.values()))  # rich would read [64, 64] as markup
    (Console() if sys.stdout.isatty() else Console(width=140)).print(table)


def html_table(rows: Rows) -> str:
    """Return rows as an HTML table, for notebooks."""

    def html_row(cells: Iterable[str], tag: str) -> str:
        return f"<tr>{''.join(f'<{tag}>{html.escape(cell)}</{tag}>' for cell in cells)}</tr>"

    body = "".join(html_row(map(format_cell, row.values()), "td") for row in rows)
    return f"<table><thead>{html_row(rows[0], 'th')}</thead><tbody>{body}</tbody></table>" if rows else "<p>no rows</p>"


def write_table(rows: Rows, path: Path) -> None:
    """Write rows as a CSV file."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({name: format_cell(value) for name, value in row.items()})
    write_atomically(path, lambda file: file.write(text.getvalue().encode()))

"""Read the table of features in docs/algorithms.md, which tests compare with the code."""

from __future__ import annotations

import functools
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "algorithms.md"


@functools.cache
def documented_features() -> dict[str, dict[str, str]]:
    """Return the cells of each algorithm by column."""
    table = PAGE.read_text(encoding="utf-8").split("## Supported features")[1].split("\n\n| name |")[1]
    rows = [line.strip("| ").split(" | ") for line in f"name |{table}".split("\n\n")[0].splitlines()]
    header = rows[0][1:]
    return {row[0].strip("`"): dict(zip(header, row[1:], strict=True)) for row in rows[2:]}

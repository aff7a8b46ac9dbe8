"""Generate tutorial.ipynb from docs/tutorial.md: `python notebooks/make.py`. A test fails if it is out of date."""

from __future__ import annotations

import json
import re
from pathlib import Path
from textwrap import indent
from typing import Any

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "tutorial.md"
NOTEBOOK = HERE / "tutorial.ipynb"
SETUP = """\
import importlib.util
import os

if os.path.basename(os.getcwd()) == "notebooks":
    os.chdir("..")
MARIO = importlib.util.find_spec("stable_retro") is not None  # whether the Mario extra is installed
LONG = False  # set to True to train on Mario, which takes hours
"""
NOT_RUN = ("pip", "docker")  # code blocks that start with these stay text


def make_cells(text: str) -> list[dict[str, Any]]:
    """Convert the page to text and code cells.

    Code blocks become code cells by language: `python` as is, `sh` as `!command`, `py` (Python) and `bash` (commands)
    guarded by `MARIO`.
    """
    cells = [_code_cell(SETUP)]
    for part in re.split(r"^(```\w+\n.*?^```$)", text, flags=re.MULTILINE | re.DOTALL):
        block = re.fullmatch(r"```(\w+)\n(.*)```", part, re.DOTALL)
        language, content = (block[1], block[2]) if block else ("", "")
        commands = indent(content, "!")
        if language == "python":
            cells.append(_code_cell(content))
        elif language == "py":
            cells.append(_code_cell(f"if MARIO:\n{indent(content, '    ')}"))
        elif language == "bash":
            cells.append(_code_cell(f"if MARIO and LONG:\n{indent(commands, '    ')}"))
        elif language == "sh" and not content.startswith(NOT_RUN):
            cells.append(_code_cell(commands))
        elif part.strip():
            cells.append(_cell("markdown", _rebase_links(part.strip("\n"))))
    return cells


def _rebase_links(text: str) -> str:
    """Rewrite links relative to docs/ as links relative to notebooks/."""
    return re.sub(r"\]\((?!\w+://)([^)#]+)", lambda link: f"](../docs/{link[1]}".replace("docs/../", ""), text)


def _code_cell(source: str) -> dict[str, Any]:
    return _cell("code", source.rstrip("\n")) | {"execution_count": None, "outputs": []}


def _cell(kind: str, source: str) -> dict[str, Any]:
    return {"cell_type": kind, "metadata": {}, "source": source.splitlines(keepends=True)}


def make_notebook() -> str:
    """Return the content of the notebook file."""
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    cells = make_cells(PAGE.read_text(encoding="utf-8"))
    notebook = {
        "cells": [{**cell, "id": f"cell-{i}"} for i, cell in enumerate(cells)],
        "metadata": {"kernelspec": kernel, "language_info": {"name": "python"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    NOTEBOOK.write_text(make_notebook(), encoding="utf-8")

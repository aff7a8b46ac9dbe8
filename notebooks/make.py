"""Makes tutorial.ipynb of docs/tutorial.md: `python notebooks/make.py`. A test finds out when it was forgotten."""

from __future__ import annotations

import json
import re
from pathlib import Path
from textwrap import indent
from typing import Any

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "tutorial.md"
NOTEBOOK = HERE / "tutorial.ipynb"
BEGIN = """\
import importlib.util
import os

if os.path.basename(os.getcwd()) == "notebooks":
    os.chdir("..")
MARIO = importlib.util.find_spec("stable_retro") is not None  # whether the extra is installed
LONG = False  # True: train on Mario, too, which takes hours
"""
SHOWN = ("pip", "docker")  # commands to read, not to run here


def cells(text: str) -> list[dict[str, Any]]:
    """Text and code in their order. Commands become `!command`; what needs Mario is guarded."""
    found = [_code(BEGIN)]
    for part in re.split(r"^(```\w+\n.*?^```$)", text, flags=re.MULTILINE | re.DOTALL):
        block = re.fullmatch(r"```(\w+)\n(.*)```", part, re.DOTALL)
        language, inside = (block[1], block[2]) if block else ("", "")
        commands = indent(inside, "!")
        if language == "python":
            found.append(_code(inside))
        elif language == "py":
            found.append(_code(f"if MARIO:\n{indent(inside, '    ')}"))
        elif language == "bash":
            found.append(_code(f"if MARIO and LONG:\n{indent(commands, '    ')}"))
        elif language == "sh" and not inside.startswith(SHOWN):
            found.append(_code(commands))
        elif part.strip():
            found.append(_cell("markdown", _links(part.strip("\n"))))
    return found


def _links(text: str) -> str:
    """Of the page's folder as seen from this one."""
    return re.sub(r"\]\((?!\w+://)([^)#]+)", lambda link: f"](../docs/{link[1]}".replace("docs/../", ""), text)


def _code(source: str) -> dict[str, Any]:
    return _cell("code", source.rstrip("\n")) | {"execution_count": None, "outputs": []}


def _cell(kind: str, source: str) -> dict[str, Any]:
    return {"cell_type": kind, "metadata": {}, "source": source.splitlines(keepends=True)}


def notebook() -> str:
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    whole = {
        "cells": [{**cell, "id": f"cell-{i}"} for i, cell in enumerate(cells(PAGE.read_text(encoding="utf-8")))],
        "metadata": {"kernelspec": kernel, "language_info": {"name": "python"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    NOTEBOOK.write_text(notebook(), encoding="utf-8")

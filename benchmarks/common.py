"""What the studies share: results that are kept, tables in pages, and peers in environments of their own."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
# libraries that bring threads of their own must not use them
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def read_results(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text()) if file.exists() else {}


def write_results(file: Path, results: Any, indent: int | None = 1) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(results, indent=indent) + "\n")


def write_page(page: Path, name: str, text: str) -> None:
    """Put text between the marks of this name in a page that has them."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, rest = page.read_text(encoding="utf-8").split(begin)
    page.write_text(f"{before}{begin}\n{text}\n{end}{rest.split(end)[1]}", encoding="utf-8")


def peer_python(name: str, requirements: list[str], constrained: bool = True) -> Path:
    """The interpreter of a peer's virtual environment, made first where it is missing or half made.

    `constrained` takes the versions that this project is tested with, so that both sides compute with the same.
    """
    folder = HERE / ".venvs" / name
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    installed = folder / "installed.txt"
    if not installed.exists() or installed.read_text().split() != requirements:
        print(f"installing {' '.join(requirements)} into {folder.relative_to(ROOT)}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        constraints = {"PIP_CONSTRAINT": str(ROOT / "constraints.txt")} if constrained else {}
        subprocess.run([python, "-m", "pip", "install", *requirements], check=True, env={**os.environ, **constraints})
        installed.write_text("\n".join(requirements) + "\n")
    return python


def run_alone(python: Path, *words: str | Path) -> dict[str, Any]:
    """What a script prints as its last line, JSON, run in a process of its own on one thread."""
    command = [python, *words]
    done = subprocess.run(command, env={**os.environ, **ONE_THREAD}, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(f"{words[0]} failed, see above")
    return json.loads(done.stdout.splitlines()[-1])


def cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]} ({len(names)} CPUs)" if names else platform.machine()

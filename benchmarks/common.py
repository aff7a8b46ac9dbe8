"""Helpers of all benchmarks: results, tables in pages, peers in virtual environments, missing seeds of trainings."""

from __future__ import annotations

import datetime
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol, TypeVar

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
VENVS = Path(os.environ.get("BENCHMARK_VENVS", HERE / ".venvs"))  # several checkouts may share them
# keeps libraries with their own thread pools on one thread
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


# --- results and pages -----------------------------------------------------------------------------------------------


def read_results(file: Path) -> dict[str, Any]:
    """Read results from JSON. Return an empty dict if the file doesn't exist."""
    return json.loads(file.read_text()) if file.exists() else {}


def write_results(file: Path, results: Any, indent: int | None = 1) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(results, indent=indent) + "\n")


def write_page(page: Path, name: str, text: str) -> None:
    """Replace the text between `<!-- NAME: begin -->` and `<!-- NAME: end -->` in a page."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, rest = page.read_text(encoding="utf-8").split(begin)
    page.write_text(f"{before}{begin}\n{text}\n{end}{rest.split(end)[1]}", encoding="utf-8")


def table(head: Sequence[str], rows: Iterable[Sequence[str]], numbers_from: int) -> str:
    """Format a Markdown table. Columns from index `numbers_from` are right-aligned."""
    rule = ["---"] * numbers_from + ["---:"] * (len(head) - numbers_from)
    lines = ["| " + " | ".join(row) + " |" for row in (head, *rows)]
    return "\n".join([lines[0], f"|{'|'.join(rule)}|", *lines[1:]])


def cpu() -> str:
    """Return the processor's model and the number of CPUs."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]} ({len(names)} CPUs)" if names else platform.machine()


def machine_info() -> dict[str, str]:
    """Return when and where results are measured."""
    load = f"load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    return {
        "cpu": cpu(),
        "load": load,
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
    }


def versions(*packages: str) -> dict[str, str]:
    return {name: version(name) for name in packages}


# --- other interpreters ----------------------------------------------------------------------------------------------


def find_python(wanted: str) -> Path | None:
    """Find an interpreter of another version, such as "3.9": on the path, or the newest that pyenv has installed."""
    on_path = shutil.which(f"python{wanted}")
    # pyenv's shims are on the path for all of its versions but fail for those that aren't activated
    if on_path and subprocess.run([on_path, "--version"], capture_output=True, check=False).returncode == 0:
        return Path(on_path)
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    installed = [folder / "bin" / "python" for folder in pyenv.glob(f"{wanted}.*")]
    return max(
        (python for python in installed if python.exists()),
        key=lambda python: [int(part) for part in python.parts[-3].split(".") if part.isdigit()],
        default=None,
    )


def peer_python(
    name: str, requirements: list[str], constrained: bool = True, base: str | Path = sys.executable
) -> Path:
    """Return the interpreter of a peer's virtual environment. Create it from `base` if it is missing or incomplete.

    With `constrained`, packages have the versions in constraints.txt, so both libraries use the same ones.
    """
    folder = VENVS / name
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    installed = folder / "installed.txt"
    if not installed.exists() or installed.read_text().split() != requirements:
        print(f"installing {' '.join(requirements)} into {folder}", flush=True)
        subprocess.run([base, "-m", "venv", "--clear", str(folder)], check=True)
        constraints = {"PIP_CONSTRAINT": str(ROOT / "constraints.txt")} if constrained else {}
        install = [python, "-m", "pip", "install", *requirements]
        subprocess.run(install, cwd=ROOT, check=True, env={**os.environ, **constraints})
        installed.write_text("\n".join(requirements) + "\n")
    return python


def run_alone(python: str | Path, *arguments: str | Path) -> dict[str, Any]:
    """Run a script in a new process on one thread. Return the JSON object that it prints as its last line."""
    command = [python, *arguments]
    done = subprocess.run(command, env={**os.environ, **ONE_THREAD}, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(f"{arguments[0]} failed, see above")
    return json.loads(done.stdout.splitlines()[-1])


# --- trainings over several seeds ------------------------------------------------------------------------------------


class HasKey(Protocol):
    @property
    def key(self) -> str: ...


Row = TypeVar("Row", bound=HasKey)


def select_rows(rows: Sequence[Row], words: Sequence[str], match: Callable[[Iterable[bool]], bool] = any) -> list[Row]:
    """Return the rows whose key contains any (or `match=all`) of the words; without words, all rows."""
    return [row for row in rows if not words or match(word in row.key for word in words)]


def run_study(
    rows: Sequence[Row],
    seeds: Callable[[Row], Iterable[int]],
    train: Callable[[Row, int, Path], Mapping[str, Any]],
    results: dict[str, Any],
    save: Callable[[], None],
    again: bool = False,
) -> None:
    """Train each seed of each row that has no result yet with `train(row, seed, folder)`. Save after each seed.

    With `again`, discard the earlier results of the rows.
    """
    if again:
        for row in rows:
            results.pop(row.key, None)
    for row in rows:
        done = results.setdefault(row.key, {})
        for seed in seeds(row):
            if str(seed) in done:
                continue
            with tempfile.TemporaryDirectory() as folder:
                done[str(seed)] = dict(train(row, seed, Path(folder)))
            shown = {name: value for name, value in done[str(seed)].items() if name != "curve"}
            print(f"{row.key} seed {seed}: {shown}", flush=True)
            save()

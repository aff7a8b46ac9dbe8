"""What the studies share: results that are kept, tables in pages, and peers in environments of their own."""

from __future__ import annotations

import argparse
import ctypes
import datetime
import gc
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
PAGE = ROOT / "docs" / "benchmarks.md"
VENVS = Path(os.environ.get("BENCHMARK_VENVS", HERE / ".venvs"))  # several checkouts may share them
# libraries that bring threads of their own must not use them
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def read_results(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text()) if file.exists() else {}


def write_results(file: Path, results: Any, indent: int | None = 1) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(results, indent=indent) + "\n")


def write_page(page: Path, name: str, text: str) -> None:
    """Put text between the marks of this name in a page that has them."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, rest = page.read_text(encoding="utf-8").split(begin)
    page.write_text(f"{before}{begin}\n{text}\n{end}{rest.split(end)[1]}", encoding="utf-8")


def find_python(wanted: str) -> Path | None:
    """An interpreter of another version than ours, say "3.9": on the path, or the newest of pyenv's."""
    found = shutil.which(f"python{wanted}")
    # pyenv has a name on the path for each of its versions, which fails where that one isn't switched on
    if found and subprocess.run([found, "--version"], capture_output=True, check=False).returncode == 0:
        return Path(found)
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    there = [folder / "bin" / "python" for folder in pyenv.glob(f"{wanted}.*")]
    return max(
        (python for python in there if python.exists()),
        key=lambda python: [int(part) for part in python.parts[-3].split(".") if part.isdigit()],
        default=None,
    )


def peer_python(
    name: str, requirements: list[str], constrained: bool = True, base: str | Path = sys.executable
) -> Path:
    """Return the interpreter of a virtual environment, which is made from `base` if it is missing or incomplete.

    `constrained` takes the versions that this project is tested with, so that both sides compute with the same.
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


def run_alone(python: Path, *words: str | Path) -> dict[str, Any]:
    """What a script prints as its last line, JSON, run in a process of its own on one thread."""
    command = [python, *words]
    done = subprocess.run(command, env={**os.environ, **ONE_THREAD}, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(f"{words[0]} failed, see above")
    return json.loads(done.stdout.splitlines()[-1])


# --- parties that take turns -------------------------------------------------------------------------------------


class Party:
    """One side of a comparison: a process of its own, on one thread, that measures once whenever it is asked.

    It runs `script --as WHO ROW`, the row as JSON, which ends in `answer`. Making ready isn't measured, and whoever
    isn't asked waits.
    """

    def __init__(self, python: Path, script: str | Path, who: str, row: Mapping[str, Any]) -> None:
        self.who = who
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))  # for tasks made by us
        self.process = subprocess.Popen(
            [python, script, "--as", who, json.dumps(row)],
            env={**os.environ, **ONE_THREAD, "PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.told = self._line()

    def measure(self) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self._line()

    def _line(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"{self.who} failed, see above")
        return json.loads(line)

    def __enter__(self) -> Party:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()  # the end of the file tells it to go
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()


def answer(ready: Callable[[], tuple[Callable[[], Mapping[str, float]], Mapping[str, Any]]]) -> None:
    """The other end of a `Party`: make ready, tell of it, then measure at each line."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not come between
    measure, told = ready()
    print(json.dumps(told), file=answers, flush=True)
    for _ in sys.stdin:
        print(json.dumps(measure()), file=answers, flush=True)


def asked_as() -> tuple[str, dict[str, Any]] | None:
    """Who answers and the row, where a script was started as a `Party`."""
    return (sys.argv[2], json.loads(sys.argv[3])) if sys.argv[1:2] == ["--as"] else None


def versions(*packages: str) -> dict[str, str]:
    return {name: version(name) for name in packages}


def take_turns(parties: Mapping[str, Party], repeats: int) -> dict[str, list[dict[str, Any]]]:
    """What each measured; who begins changes from round to round, so a machine that slows down meets all alike."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in parties}
    for party in parties.values():
        party.measure()  # the first touch of memory, caches and clocks
    for repeat in range(repeats):
        for name in sorted(parties, reverse=repeat % 2 == 1):
            found[name].append(parties[name].measure())
    return found


def compared(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, Any]:
    """The ratio of the medians, and the least and the most of neighbours. What is more is better."""
    ratios = [mine / its for mine, its in zip(ours, theirs, strict=True)]
    return {
        "ratio": round(statistics.median(ours) / statistics.median(theirs), 3),
        "ratio_min": round(min(ratios), 3),
        "ratio_max": round(max(ratios), 3),
    }


def median_of(values: Sequence[float], digits: int | None = 1) -> float:
    return round(statistics.median(values), digits)


def spread(found: Mapping[str, Any]) -> list[str]:
    """Two cells of a table for what `compared` gave."""
    return [f"**{found['ratio']:.2f}**", f"{found['ratio_min']:.2f} .. {found['ratio_max']:.2f}"]


def table(head: Sequence[str], rows: Sequence[Sequence[str]], numbers_from: int) -> str:
    """Markdown; columns from this one on hold numbers."""
    rule = ["---"] * numbers_from + ["---:"] * (len(head) - numbers_from)
    lines = ["| " + " | ".join(row) + " |" for row in (head, *rows)]
    return "\n".join([lines[0], f"|{'|'.join(rule)}|", *lines[1:]])


def asked(
    doc: str | None,
    rows: Sequence[str],
    repeats: int,
    quick_rows: Sequence[str] = (),
    **further: Sequence[str],
) -> argparse.Namespace:
    """What every comparison takes on the command line: `--rows`, `--repeats`, `--quick`, and other choices of names.

    Quickly, there is one round, of `quick_rows` where these are given.
    """
    parser = argparse.ArgumentParser(description=(doc or "").split("\n")[0])
    parser.add_argument("--repeats", type=int, help=f"rounds of runs per row ({repeats})")
    parser.add_argument("--quick", action="store_true", help="a small part of the work; the page stays as it is")
    choices = {"rows": rows, **further}
    for name, known in choices.items():
        parser.add_argument(f"--{name}", help=f"which of {','.join(known)} (all)")
    options = parser.parse_args()
    for name, known in choices.items():
        given = getattr(options, name)
        default = quick_rows if name == "rows" and options.quick and quick_rows else known
        names = list(default) if given is None else given.split(",")
        if wrong := [word for word in names if word not in known]:
            parser.error(f"unknown: {', '.join(wrong)}; there are {', '.join(known)}")
        setattr(options, name, names)
    if options.repeats is None:
        options.repeats = 1 if options.quick else repeats
    if options.repeats < 1:
        parser.error("--repeats must be at least 1")
    return options


def made() -> dict[str, str]:
    """Where and when something was measured."""
    load = f"load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    return {
        "cpu": cpu(),
        "load": load,
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
    }


def made_line(repeats: int, found: Mapping[str, str]) -> str:
    where = ", ".join(filter(None, (found["cpu"], found["load"], f"Python {found['python']}", found["date"])))
    return f"Rounds: {repeats}. {where}."


def file_of(name: str, quick: bool) -> Path:
    return HERE / "results" / ("quick" if quick else "") / f"{name}.json"


def publish(name: str, results: Mapping[str, Any], text: str, quick: bool) -> None:
    """Keep results and show them on the page; what was measured quickly goes into a folder that nobody keeps."""
    print(f"\n{text}")
    file = file_of(name, quick)
    write_results(file, results)
    page = file.with_suffix(".md") if quick else PAGE
    if quick:
        page.write_text(text + "\n", encoding="utf-8")
    else:
        write_page(PAGE, name.replace("_", " "), text)
    print(f"\nwritten: {file.relative_to(ROOT)}, {page.relative_to(ROOT)}")


def resident_bytes() -> int:
    """Memory that this process holds now, without what it has freed; its most so far where the system doesn't tell."""
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, AttributeError):
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def cpu_seconds() -> float:
    """That this process and all processes under it have used; of this one alone where the system doesn't tell."""
    parents, spent = {}, {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has just ended
            fields = file.read_text().rpartition(")")[2].split()
            parents[int(file.parent.name)] = int(fields[1])
            spent[int(file.parent.name)] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    total, under = time.process_time(), {os.getpid()}
    while under := {child for child, parent in parents.items() if parent in under}:
        total += sum(spent[child] for child in under)
    return total


def cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]} ({len(names)} CPUs)" if names else platform.machine()

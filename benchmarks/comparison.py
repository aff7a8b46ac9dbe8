"""Helpers of comparisons: measure several sides in alternation, summarize their ratios, publish the results."""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from common import HERE, ONE_THREAD, ROOT, machine_info, table, write_page, write_results

PAGE = ROOT / "docs" / "benchmarks.md"


# --- processes that measure ------------------------------------------------------------------------------------------


class Measurement(NamedTuple):
    """One side of a comparison, ready to be measured."""

    measure: Callable[[], Mapping[str, float]]
    info: Mapping[str, Any]  # such as versions; stored with the results


class Side(NamedTuple):
    """How to start one side of a comparison: the script calls `setup(name, row)` in a new process."""

    python: Path
    name: str
    row: Mapping[str, Any]


class MeasurementProcess:
    """One side of a comparison in its own process on one thread. It measures once per call and sleeps otherwise.

    It runs `SCRIPT --as NAME ROW`, with the row as JSON, which ends in `run_script`. Setting up isn't measured.
    """

    def __init__(self, script: str | Path, side: Side) -> None:
        self.name = side.name
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))  # for our environments
        self.process = subprocess.Popen(
            [side.python, script, "--as", side.name, json.dumps(side.row)],
            env={**os.environ, **ONE_THREAD, "PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.info = self._read()

    def measure(self) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"{self.name} failed, see above")
        return json.loads(line)

    def __enter__(self) -> MeasurementProcess:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()  # at the end of its input the process exits
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()


def run_script(main: Callable[[], None], setup: Callable[[str, dict[str, Any]], Measurement]) -> None:
    """Run `main`, or in a `MeasurementProcess` set up a side and measure it once per line of input."""
    if sys.argv[1:2] != ["--as"]:
        main()
        return
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries that print don't disturb the answers
    measure, info = setup(sys.argv[2], json.loads(sys.argv[3]))
    print(json.dumps(info), file=answers, flush=True)
    for _ in sys.stdin:
        print(json.dumps(measure()), file=answers, flush=True)


def order_of_round(sides: Iterable[str], round_number: int) -> list[str]:
    """Return the order in which to measure. It flips with every round, so slowdowns of the machine affect all alike."""
    return sorted(sides, reverse=round_number % 2 == 1)


def measure_rounds(
    script: str | Path, sides: Mapping[str, Side], rounds: int
) -> tuple[dict[str, Any], dict[str, list[dict[str, Any]]]]:
    """Measure all sides once per round, in alternation. Return their info and their measurements."""
    with ExitStack() as stack:
        processes = {name: stack.enter_context(MeasurementProcess(script, side)) for name, side in sides.items()}
        for process in processes.values():
            process.measure()  # warms up memory, caches and clocks
        runs: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
        for number in range(rounds):
            for name in order_of_round(sides, number):
                runs[name].append(processes[name].measure())
        return {name: process.info for name, process in processes.items()}, runs


# --- numbers ---------------------------------------------------------------------------------------------------------


def compute_ratios(ours: Sequence[float], peer: Sequence[float]) -> dict[str, Any]:
    """Return the ratio of the medians, and the range of the ratios of single rounds."""
    ratios = [a / b for a, b in zip(ours, peer, strict=True)]
    return {
        "ratio": round(statistics.median(ours) / statistics.median(peer), 3),
        "ratio_min": round(min(ratios), 3),
        "ratio_max": round(max(ratios), 3),
    }


def ratio_cells(ratios: Mapping[str, Any]) -> list[str]:
    """Format the result of `compute_ratios` as two cells of a table."""
    return [f"**{ratios['ratio']:.2f}**", f"{ratios['ratio_min']:.2f} .. {ratios['ratio_max']:.2f}"]


def describe_pair(runs: Mapping[str, Mapping[str, Any]], peer: str, unit: str) -> str:
    """Describe a run of ours and one of a peer that did `run[unit]` units of work."""
    rates = {name: run[unit] / run["seconds"] for name, run in runs.items()}
    cpu_ratio = runs[peer]["cpu_seconds"] / runs[peer][unit] / (runs["ours"]["cpu_seconds"] / runs["ours"][unit])
    text = ", ".join(f"{name} {rates[name]:,.0f} {unit}/s" for name in ("ours", peer))
    return f"{text}, ratio {rates['ours'] / rates[peer]:.2f} (by CPU time {cpu_ratio:.2f})"


def rounded_median(values: Sequence[float], digits: int | None = 1) -> float:
    return round(statistics.median(values), digits)


def resident_bytes() -> int:
    """Return this process's resident memory, without freed memory. Where that is unknown, return its maximum so far."""
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, AttributeError):
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def cpu_seconds() -> float:
    """Return the CPU time of this process and its living descendants; without /proc, of this process only."""
    parents, spent = {}, {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # the process has just ended
            fields = file.read_text().rpartition(")")[2].split()
            parents[int(file.parent.name)] = int(fields[1])
            spent[int(file.parent.name)] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    total, generation = time.process_time(), {os.getpid()}
    while generation := {child for child, parent in parents.items() if parent in generation}:
        total += sum(spent[child] for child in generation)
    return total


# --- command line and results ----------------------------------------------------------------------------------------


def parse_args(
    doc: str | None, rows: Sequence[str], repeats: int, quick_rows: Sequence[str] = (), **choices: Sequence[str]
) -> argparse.Namespace:
    """Parse `--rows`, `--repeats`, `--quick` and options with other `choices` of names.

    `--quick` makes one round, of `quick_rows` if these are given.
    """
    parser = argparse.ArgumentParser(description=(doc or "").split("\n")[0])
    parser.add_argument("--repeats", type=int, help=f"rounds per row (default {repeats})")
    parser.add_argument("--quick", action="store_true", help="do little work and write to benchmarks/results/quick")
    choices = {"rows": rows, **choices}
    for name, known in choices.items():
        parser.add_argument(f"--{name}", help=f"comma-separated, of {','.join(known)} (default all)")
    options = parser.parse_args()
    for name, known in choices.items():
        given = getattr(options, name)
        default = quick_rows if name == "rows" and options.quick and quick_rows else known
        names = list(default) if given is None else given.split(",")
        if unknown := [word for word in names if word not in known]:
            parser.error(f"--{name}: unknown {', '.join(unknown)}; choose from {', '.join(known)}")
        setattr(options, name, names)
    if options.repeats is None:
        options.repeats = 1 if options.quick else repeats
    if options.repeats < 1:
        parser.error("--repeats must be at least 1")
    return options


def results_file(name: str, quick: bool) -> Path:
    return HERE / "results" / ("quick" if quick else "") / f"{name}.json"


def results_table(
    results: Mapping[str, Any],
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    numbers_from: int,
    notes: Sequence[str] = (),
) -> str:
    """Format a table, notes and a line about the machine."""
    made = results["made"]
    machine = ", ".join(filter(None, (made["cpu"], made["load"], f"Python {made['python']}", made["date"])))
    return "\n".join([table(head, rows, numbers_from), "", *notes, f"Rounds: {results['repeats']}. {machine}."])


def publish(name: str, results: Mapping[str, Any], text: str, quick: bool, page: Path = PAGE) -> None:
    """Write results as JSON and their table into a page. With `quick`, write both to benchmarks/results/quick."""
    print(f"\n{text}")
    file = results_file(name, quick)
    write_results(file, results)
    if quick:
        page = file.with_suffix(".md")
        page.write_text(text + "\n", encoding="utf-8")
    else:
        write_page(page, name.replace("_", " "), text)
    print(f"\nwritten: {file.relative_to(ROOT)}, {page.relative_to(ROOT)}")


def compare_rows(
    name: str,
    options: argparse.Namespace,
    compare: Callable[[str], Mapping[str, Any]],
    make_table: Callable[[dict[str, Any]], str],
    **extra: Any,
) -> None:
    """Measure the chosen rows with `compare(row)` and publish the results, with `extra` entries."""
    rows = {}
    for row in options.rows:
        rows[row] = compare(row)
        print(f"{row}: {rows[row]}", flush=True)
    results = {"rows": rows, "repeats": options.repeats, "made": machine_info(), **extra}
    publish(name, results, make_table(results), options.quick)

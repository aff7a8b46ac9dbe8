"""The tests of tests/reliability at full length: `make soak`. Kills, faults, bad input and long runs are counted.

    python benchmarks/soak.py                  the parts that have no result yet, one after the other: hours
    python benchmarks/soak.py kills            those whose names contain one of these words
    python benchmarks/soak.py kills --kills 5  with fewer kills of each combination
    python benchmarks/soak.py --again          once more
    python benchmarks/soak.py --quick          as long as in the tests; writes no results

Writes benchmarks/results/soak.json, after each part that passed, and the figures of docs/reliability.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common import HERE, ONE_THREAD, ROOT, cpu, read_results, write_page, write_results

sys.path.insert(0, str(ROOT / "tests" / "reliability"))
from killing import COMBINATIONS

RESULTS = HERE / "results" / "soak.json"
PAGE = ROOT / "docs" / "reliability.md"
FULL = {"ZHIXING_KILLS": "40", "ZHIXING_EXAMPLES": "100000", "ZHIXING_LONG_STEPS": "2000000"}
TESTS = Path("tests/reliability")
KILLED = f"{TESTS}/test_kills.py::test_kills_at_random_moments_change_nothing"
FUZZED = f"{TESTS}/test_bad_input.py::test_only_our_own_error_comes_out"
GROWN = f"{TESTS}/test_leaks.py::test_memory_and_resources_dont_leak"
# by name, what pytest is told; those that take long come last
PARTS: dict[str, list[str]] = {
    **{name: [f"{TESTS}/test_{name}.py"] for name in ("disk", "formats", "nonfinite")},
    "environment failures": ["tests/unit/envs/test_failure_policy.py"],
    "other bad input": [f"{TESTS}/test_bad_input.py", f"--deselect={FUZZED}"],
    **{
        f"bad {reader}": [f"{FUZZED}[{reader}]"]
        for reader in ("crash report", "dataset", "HDF5 file", "checkpoint", "configuration", "run folder")
    },
    **{f"kills of {combination}": [f"{KILLED}[{combination}]"] for combination in COMBINATIONS},
    **{f"long {run}": [f"{GROWN}[{run}]"] for run in ("ppo-end", "dqn-end", "dqn-raise interrupt")},
}


def soak(part: str, quick: bool, kills: int | None = None) -> tuple[bool, dict[str, Any]]:
    """Whether all tests of a part passed, what they counted, and how many hours they took."""
    with tempfile.TemporaryDirectory() as folder:
        figures = Path(folder) / "figures.jsonl"
        environment = {**os.environ, **ONE_THREAD, **({} if quick else FULL), "ZHIXING_FIGURES": str(figures)}
        if kills is not None:
            environment["ZHIXING_KILLS"] = str(kills)
        command = [sys.executable, "-m", "pytest", *PARTS[part], "--timeout=36000"]
        began = time.monotonic()
        passed = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode == 0
        hours = (time.monotonic() - began) / 3600
        told = [json.loads(line) for line in figures.read_text().splitlines()] if figures.exists() else []
    return passed, {"hours": round(hours, 2), "told": told}


def summary(parts: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    told = [one for part in parts.values() for one in part["told"]]
    kills, inputs, runs = ([one for one in told if one["kind"] == kind] for kind in ("kills", "inputs", "long runs"))
    return {
        "kills_survived": sum(one["kills"] for one in kills),
        "combinations_killed": f"{len({one['combination'] for one in kills})} of {len(COMBINATIONS)}",
        "kills_while_writing": sum(one["while_writing"] for one in kills),
        "unreadable_checkpoints": sum(one["unreadable"] for one in kills),
        "bytes_lost": sum(one["bytes_lost"] for one in kills),
        "faults_injected": sum(one["injected"] for one in told if one["kind"] == "faults"),
        "inputs_tried": {one["reader"]: one["tried"] for one in inputs},
        "slowest_input_seconds": max((one["slowest_seconds"] for one in inputs), default=None),
        "memory_growth_percent": {
            f"{one['algorithm']}, {one['steps']:,} steps, {one['how']}": one["growth_percent"] for one in runs
        },
        "resources_left_open": sum(sum(one["left"].values()) for one in runs),
        "hours": {name: part["hours"] for name, part in parts.items() if not name.startswith("kills of")}
        | {"kills": round(sum(part["hours"] for name, part in parts.items() if name.startswith("kills of")), 2)},
    }


def table(found: dict[str, Any]) -> str:
    """The figures as people read them."""

    def shown(value: Any) -> str:
        if isinstance(value, dict):
            return "; ".join(f"{name}: {shown(part)}" for name, part in value.items())
        return f"{value:,}" if isinstance(value, int) else str(value)

    rows = [f"| {name.replace('_', ' ')} | {shown(value)} |" for name, value in found.items()]
    return "\n".join(["| quantity | value |", "|---|---|", *rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="only parts whose names contain one of these")
    parser.add_argument("--again", action="store_true", help="also those that have a result")
    parser.add_argument("--kills", type=int, help="of each combination; a multiple of 2")
    parser.add_argument("--quick", action="store_true", help="as long as in the tests; writes no results")
    given = parser.parse_args()
    chosen = [part for part in PARTS if any(word in part for word in given.words or [part])]
    if not chosen:
        parser.error(f"no part has one of these words in its name; there are {', '.join(PARTS)}")
    kept = {} if given.quick else read_results(RESULTS).get("parts", {})
    kept = {part: found for part, found in kept.items() if part in PARTS}
    failed = []
    for part in [part for part in chosen if given.again or part not in kept]:
        print(part, flush=True)
        passed, found = soak(part, given.quick, given.kills)
        if not passed:
            failed.append(part)
            continue
        kept[part] = found
        if not given.quick:
            figures = {"cpu": cpu(), **summary(kept)}
            write_results(RESULTS, {**figures, "parts": kept})
            write_page(PAGE, "soak", table(figures))
    print(table(summary(kept)))
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()

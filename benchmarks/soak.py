"""Soak test: the tests in tests/reliability at full length, for hours, with counts of kills, faults and inputs.

    python benchmarks/soak.py                  parts without results
    python benchmarks/soak.py kills            parts whose names contain one of these words
    python benchmarks/soak.py kills --kills 5  fewer kills per combination
    python benchmarks/soak.py --again          repeat parts that have results
    python benchmarks/soak.py --quick          as short as in other test runs; write no results

After each part that passes, results are written to benchmarks/results/soak.json and to docs/reliability.md.
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

from common import HERE, ONE_THREAD, ROOT, cpu, read_results, table, write_page, write_results

sys.path.insert(0, str(ROOT / "tests" / "reliability"))
from kill_and_resume import COMBINATIONS

RESULTS = HERE / "results" / "soak.json"
PAGE = ROOT / "docs" / "reliability.md"
FULL = {"ZHIXING_KILLS": "40", "ZHIXING_EXAMPLES": "100000", "ZHIXING_LONG_STEPS": "2000000"}
TESTS = Path("tests/reliability")
KILL_TEST = f"{TESTS}/test_kills.py::test_kills_at_random_moments_change_nothing"
FUZZ_TEST = f"{TESTS}/test_bad_input.py::test_readers_raise_only_user_error"
LEAK_TEST = f"{TESTS}/test_leaks.py::test_memory_and_resources_dont_leak"
# arguments of pytest by name; the longest parts come last
PARTS: dict[str, list[str]] = {
    **{name: [f"{TESTS}/test_{name}.py"] for name in ("disk", "formats", "nonfinite")},
    "environment failures": ["tests/unit/envs/test_failure_policy.py"],
    "other bad input": [f"{TESTS}/test_bad_input.py", f"--deselect={FUZZ_TEST}"],
    **{
        f"bad {reader}": [f"{FUZZ_TEST}[{reader}]"]
        for reader in ("crash report", "dataset", "HDF5 file", "checkpoint", "configuration", "run folder")
    },
    **{f"kills of {combination}": [f"{KILL_TEST}[{combination}]"] for combination in COMBINATIONS},
    **{f"long {run}": [f"{LEAK_TEST}[{run}]"] for run in ("ppo-end", "dqn-end", "dqn-raise interrupt")},
}


def run_part(part: str, quick: bool, kills: int | None = None) -> tuple[bool, dict[str, Any]]:
    """Run the tests of a part. Return whether all passed, and their counts and hours."""
    with tempfile.TemporaryDirectory() as folder:
        counts = Path(folder) / "counts.jsonl"
        environment = {**os.environ, **ONE_THREAD, **({} if quick else FULL), "ZHIXING_COUNTS": str(counts)}
        if kills is not None:
            environment["ZHIXING_KILLS"] = str(kills)
        command = [sys.executable, "-m", "pytest", *PARTS[part], "--timeout=36000"]
        start = time.monotonic()
        passed = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode == 0
        hours = (time.monotonic() - start) / 3600
        lines = counts.read_text().splitlines() if counts.exists() else []
    return passed, {"hours": round(hours, 2), "told": [json.loads(line) for line in lines]}


def summarize(parts: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    counts = [count for part in parts.values() for count in part["told"]]
    kills, faults, inputs, runs = (
        [count for count in counts if count["kind"] == kind] for kind in ("kills", "faults", "inputs", "long runs")
    )
    kill_hours = sum(part["hours"] for name, part in parts.items() if name.startswith("kills of"))
    other_hours = {name: part["hours"] for name, part in parts.items() if not name.startswith("kills of")}
    return {
        "kills_survived": sum(count["kills"] for count in kills),
        "combinations_killed": f"{len({count['combination'] for count in kills})} of {len(COMBINATIONS)}",
        "kills_while_writing": sum(count["while_writing"] for count in kills),
        "unreadable_checkpoints": sum(count["unreadable"] for count in kills),
        "bytes_lost": sum(count["bytes_lost"] for count in kills),
        "faults_injected": sum(count["injected"] for count in faults),
        "inputs_tried": {count["reader"]: count["tried"] for count in inputs},
        "slowest_input_seconds": max((count["slowest_seconds"] for count in inputs), default=None),
        "memory_growth_percent": {
            f"{count['algorithm']}, {count['steps']:,} steps, {count['how']}": count["growth_percent"] for count in runs
        },
        "resources_left_open": sum(sum(count["left"].values()) for count in runs),
        "hours": other_hours | {"kills": round(kill_hours, 2)},
    }


def make_table(summary: Mapping[str, Any]) -> str:
    def format_value(value: Any) -> str:
        if isinstance(value, dict):
            return "; ".join(f"{name}: {format_value(part)}" for name, part in value.items())
        return f"{value:,}" if isinstance(value, int) else str(value)

    rows = [[name.replace("_", " "), format_value(value)] for name, value in summary.items()]
    return table(["quantity", "value"], rows, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="only parts whose names contain one of these")
    parser.add_argument("--again", action="store_true", help="repeat parts that have results")
    parser.add_argument("--kills", type=int, help="kills per combination; a multiple of 2")
    parser.add_argument("--quick", action="store_true", help="as short as in other test runs; write no results")
    args = parser.parse_args()
    selected = [part for part in PARTS if any(word in part for word in args.words or [part])]
    if not selected:
        parser.error(f"no part contains {' or '.join(args.words)} in its name; choose from {', '.join(PARTS)}")
    results = {} if args.quick else read_results(RESULTS).get("parts", {})
    results = {part: result for part, result in results.items() if part in PARTS}
    failed = []
    for part in [part for part in selected if args.again or part not in results]:
        print(part, flush=True)
        passed, result = run_part(part, args.quick, args.kills)
        if not passed:
            failed.append(part)
            continue
        results[part] = result
        if not args.quick:
            summary = {"cpu": cpu(), **summarize(results)}
            write_results(RESULTS, {**summary, "parts": results})
            write_page(PAGE, "soak", make_table(summary))
    print(make_table(summarize(results)))
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()

"""The tests of tests/reliability at full length: `make soak`. Kills, faults, bad input and long runs are counted.

Writes benchmarks/results/soak.json and the figures of docs/reliability.md. `--quick` tries everything briefly and
writes nothing but what it counted, to the screen.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import HERE, ONE_THREAD, ROOT, cpu, write_page, write_results

RESULTS = HERE / "results" / "soak.json"
PAGE = ROOT / "docs" / "reliability.md"
# more kills than are promised, for a run may end before the last of them
FULL = {"ZHIXING_KILLS": "120", "ZHIXING_EXAMPLES": "100000", "ZHIXING_LONG_STEPS": "2000000"}
# also what is injected elsewhere: environments that fail
TESTS = ["tests/reliability", "tests/unit/envs/test_faults.py"]


def soak(quick: bool) -> tuple[bool, list[dict[str, Any]], float]:
    """Whether all tests passed, what they counted, and how many hours they took."""
    with tempfile.TemporaryDirectory() as folder:
        figures = Path(folder) / "figures.jsonl"
        environment = {**os.environ, **ONE_THREAD, **({} if quick else FULL), "ZHIXING_FIGURES": str(figures)}
        command = [sys.executable, "-m", "pytest", *TESTS, "--timeout=36000"]
        began = time.monotonic()
        passed = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode == 0
        hours = (time.monotonic() - began) / 3600
        told = [json.loads(line) for line in figures.read_text().splitlines()] if figures.exists() else []
    return passed, told, hours


def summary(told: list[dict[str, Any]]) -> dict[str, Any]:
    kills, inputs, runs = ([one for one in told if one["kind"] == kind] for kind in ("kills", "inputs", "long runs"))
    return {
        "kills_survived": {one["algorithm"]: one["kills"] for one in kills},
        "kills_while_writing": sum(one["while_writing"] for one in kills),
        "unreadable_checkpoints": sum(one["unreadable"] for one in kills),
        "bytes_lost": sum(one["bytes_lost"] for one in kills),
        "faults_injected": sum(one["injected"] for one in told if one["kind"] == "faults"),
        "inputs_tried": {one["reader"]: one["tried"] for one in inputs},
        "slowest_input_seconds": max((one["slowest_seconds"] for one in inputs), default=None),
        "memory_growth_percent": {
            f"{one['algorithm']}, {one['steps']:,} steps, {one['how']}": one["growth_percent"] for one in runs
        },
        "left_open": sum(sum(one["left"].values()) for one in runs),
    }


def table(found: dict[str, Any]) -> str:
    """The figures as people read them."""

    def shown(value: Any) -> str:
        if isinstance(value, dict):
            return "; ".join(f"{name}: {shown(part)}" for name, part in value.items())
        return f"{value:,}" if isinstance(value, int) else str(value)

    rows = [f"| {name.replace('_', ' ')} | {shown(value)} |" for name, value in found.items()]
    return "\n".join(["| counted | |", "|---|---|", *rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="as long as in the tests; writes no results")
    quick = parser.parse_args().quick
    passed, told, hours = soak(quick)
    found = summary(told)
    print(table(found))
    if passed and not quick:
        write_results(RESULTS, {"cpu": cpu(), "hours": round(hours, 2), **found, "told": told})
        write_page(PAGE, "soak", table({**found, "hours": round(hours, 2)}))
    sys.exit(not passed)


if __name__ == "__main__":
    main()

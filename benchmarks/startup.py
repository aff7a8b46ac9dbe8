"""Startup times: importing the library, `--help`, and from the command to the first environment step.

    python benchmarks/startup.py [--repeats 7] [--rows import,help] [--quick]

Runs alternate between zhixing and Stable-Baselines3, each in a new process, with files cached by the operating system.
Both wall time and CPU time are reported; on a busy machine only CPU time is reliable.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common import ROOT, peer_python
from comparison import (
    compare_rows,
    compute_ratios,
    order_of_round,
    parse_args,
    ratio_cells,
    results_table,
    rounded_median,
)
from peers import sb3

TIMES = ("seconds", "cpu_seconds")
# exits the process at the first step of an environment
EXIT_AT_FIRST_STEP = "import os; {env}.step = lambda *arguments: os._exit(0); "
# Stable-Baselines3 has no command line, so it has no row `help`
ROWS: dict[str, dict[str, Any]] = {
    "import": {
        "title": "import the library",
        "ours": ["-c", "import zhixing"],
        "sb3": ["-c", "import stable_baselines3"],
    },
    "help": {"title": "`zhixing --help`", "ours": ["-m", "zhixing", "--help"]},
    "first-step": {
        "title": "from the command to the first environment step, PPO on CartPole-v1",
        "ours": [
            "-c",
            "import sys; from zhixing.envs.vector.native import NativeCartPole as Env; "
            + EXIT_AT_FIRST_STEP.format(env="Env")
            + "from zhixing.cli import main; main()",
            "train", "ppo", "--env", "CartPole-v1", "--out", "{folder}",
        ],
        "sb3": [
            "-c",
            "from gymnasium.envs.classic_control import CartPoleEnv as Env; "
            + EXIT_AT_FIRST_STEP.format(env="Env")
            + "from stable_baselines3 import PPO; PPO('MlpPolicy', 'CartPole-v1').learn(1000)",
        ],
    },
}  # fmt: skip


def run(python: Path, arguments: list[str]) -> dict[str, float]:
    """Run a command. Return its wall time and its CPU time, including child processes."""
    with tempfile.TemporaryDirectory() as folder:
        command = [python, *(f"{folder}/run" if argument == "{folder}" else argument for argument in arguments)]
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        before, start = os.times(), time.perf_counter()
        done = subprocess.run(
            command, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.DEVNULL, check=False, cwd=folder
        )
        seconds, after = time.perf_counter() - start, os.times()
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))} failed, see above")
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return {"seconds": seconds, "cpu_seconds": cpu}


def compare(row: Mapping[str, Any], pythons: Mapping[str, Path], repeats: int) -> dict[str, Any]:
    sides = {name: python for name, python in pythons.items() if name in row}
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    for name, python in sides.items():
        run(python, row[name])  # caches the files
    for number in range(repeats):
        for name in order_of_round(sides, number):
            runs[name].append(run(sides[name], row[name]))
    times = {name: {kind: [run[kind] for run in measured] for kind in TIMES} for name, measured in runs.items()}
    results: dict[str, Any] = {
        name: {kind: rounded_median(values, 3) for kind, values in kinds.items()} for name, kinds in times.items()
    }
    if "sb3" in times:
        for kind in TIMES:  # above 1: zhixing takes less time
            results[f"{kind}_ratio"] = compute_ratios(times["sb3"][kind], times["ours"][kind])
    return results


def make_table(results: Mapping[str, Any]) -> str:
    rows = []
    for name, row in results["rows"].items():
        cells = [ROWS[name]["title"]]
        for kind in TIMES:
            cells += [f"{row[side][kind]:.2f}" if side in row else "not supported" for side in ("ours", "sb3")]
            cells += ratio_cells(row[f"{kind}_ratio"]) if "sb3" in row else ["", ""]
        rows.append(cells)
    head = ["action", "zhixing, s", "SB3, s", "SB3 / zhixing", "range over pairs"]
    head += ["zhixing, CPU s", "SB3, CPU s", "SB3 / zhixing", "range over pairs"]
    return results_table(results, head, rows, 1)


def main() -> None:
    options = parse_args(__doc__, list(ROWS), repeats=7)
    pythons = {"ours": Path(sys.executable), "sb3": peer_python("sb3", sb3.REQUIREMENTS)}
    compare_rows("startup", options, lambda name: compare(ROWS[name], pythons, options.repeats), make_table)


if __name__ == "__main__":
    main()

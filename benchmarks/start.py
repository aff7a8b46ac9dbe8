"""How long it takes to begin: importing the library, its help, and from a command to the first environment step.

    python benchmarks/start.py [--repeats 7] [--rows import,help] [--quick]

Each run is a process of its own, ours and Stable-Baselines3's in turns, with files that were read before. Wall time
and time of the CPU are both told: on a busy machine only the second says much.
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

from common import ROOT, asked, compared, made, made_line, median_of, peer_python, publish, spread, table
from peers import sb3

WAYS = ("seconds", "cpu_seconds")
# what an environment does at its first step here: the run is over
STOP = "import os; {task}.step = lambda *words: os._exit(0); "
# sides without an entry can't: Stable-Baselines3 has no command line
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
            "import sys; from zhixing.envs.vector.native import NativeCartPole as Task; "
            + STOP.format(task="Task")
            + "from zhixing.cli import main; main()",
            "train", "ppo", "--env", "CartPole-v1", "--out", "{folder}",
        ],
        "sb3": [
            "-c",
            "from gymnasium.envs.classic_control import CartPoleEnv as Task; "
            + STOP.format(task="Task")
            + "from stable_baselines3 import PPO; PPO('MlpPolicy', 'CartPole-v1').learn(1000)",
        ],
    },
}  # fmt: skip


def run(python: Path, words: list[str]) -> dict[str, float]:
    """Seconds of the wall and of the CPU, with what it starts."""
    with tempfile.TemporaryDirectory() as folder:
        command = [python, *(word.format(folder=f"{folder}/run") if word == "{folder}" else word for word in words)]
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
    sides = {who: python for who, python in pythons.items() if who in row}
    runs: dict[str, list[dict[str, float]]] = {who: [] for who in sides}
    for who, python in sides.items():
        run(python, row[who])  # reads the files
    for repeat in range(repeats):
        for who in sorted(sides, reverse=repeat % 2 == 1):
            runs[who].append(run(sides[who], row[who]))
    found: dict[str, Any] = {"title": row["title"]}
    for who, its in runs.items():
        found[who] = {way: median_of([one[way] for one in its], 3) for way in its[0]}
    if "sb3" in runs:
        for way in WAYS:
            # how often ours fits into theirs
            theirs, ours = ([one[way] for one in runs[who]] for who in ("sb3", "ours"))
            found[f"{way}_ratio"] = compared(theirs, ours)
    return found


def tell(results: Mapping[str, Any]) -> str:
    lines = []
    for row in results["rows"].values():
        line = [row["title"]]
        for way in WAYS:
            line += [f"{row[who][way]:.2f}" if who in row else "not supported" for who in ("ours", "sb3")]
            line += spread(row[f"{way}_ratio"]) if "sb3" in row else ["", ""]
        lines.append(line)
    head = ["action", "zhixing, s", "SB3, s", "SB3 / zhixing", "range over pairs"]
    head += ["zhixing, CPU s", "SB3, CPU s", "SB3 / zhixing", "range over pairs"]
    return "\n".join([table(head, lines, 1), "", made_line(results["repeats"], results["made"])])


def main() -> None:
    options = asked(__doc__, list(ROWS), repeats=7)
    pythons = {"ours": Path(sys.executable), "sb3": peer_python("sb3", sb3.REQUIREMENTS)}
    found = {}
    for name in options.rows:
        found[name] = compare(ROWS[name], pythons, options.repeats)
        print(f"{name}: {found[name]}", flush=True)
    results = {"rows": found, "repeats": options.repeats, "made": made()}
    publish("start", results, tell(results), options.quick)


if __name__ == "__main__":
    main()

"""Train several times and measure leaks: `python measure_leaks.py FOLDER ALGORITHM STEPS HOW...`.

HOW is how each training ends: end, raise or interrupt. Prints JSON: the memory of the last training after a quarter of
its steps and at its end, and the numbers of files, threads, processes and shared memory segments left open.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import torch

import zhixing as zx

SETTINGS: dict[str, dict[str, Any]] = {
    "ppo": {"num_envs": 8, "vector__backend": "native"},
    "dqn": {"num_envs": 8, "vector__backend": "serial", "replay__capacity": 2000, "updates_per_step": 0.1},
}
PROCESSES = {"num_envs": 2, "vector__backend": "process", "vector__workers": 2}  # these may be left running


def memory_mb() -> float:
    """Return the resident memory of this process in megabytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def count_resources() -> dict[str, int]:
    """Count what must not outlive a run."""
    return {
        "files": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "processes": len(multiprocessing.active_children())
        + len(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()),
        "shared_memory": len(os.listdir("/dev/shm")),
    }


class MemoryCallback(zx.Callback):
    def __init__(self, steps: int, how: str) -> None:
        self.steps, self.how = steps, how
        self.memory: list[float] = []

    def iteration_end(self, loop: zx.TrainingLoop, metrics: object) -> None:
        if loop.steps // (self.steps // 20) > loop.counts_before.steps // (self.steps // 20):
            self.memory.append(memory_mb())
        if self.how != "end" and loop.steps >= self.steps // 2:
            if self.how == "raise":
                raise RuntimeError("on purpose")
            os.kill(os.getpid(), signal.SIGINT)


def train(folder: Path, name: str, steps: int, how: str) -> list[float]:
    callback = MemoryCallback(steps, how)
    settings = {"env_steps": steps, "eval_every": steps // 4, "eval_episodes": 1, **SETTINGS[name]}
    settings |= {"checkpoint_every": steps // 20, "log_every": max(1000, steps // 200)}
    try:
        settings |= PROCESSES if how != "end" else {}
        zx.train(name, "CartPole-v1", out=folder, callbacks=[callback], quiet=True, **settings)
    except (RuntimeError, KeyboardInterrupt):
        assert how != "end"
    return callback.memory


def main(folder: Path, name: str, steps: int, hows: list[str]) -> dict[str, Any]:
    torch.set_num_threads(1)
    train(folder / "first", name, 2500, hows[0])  # what is allocated once per process is no leak
    before = count_resources()
    for how in hows:
        memory = train(folder / how, name, steps, how)
    after = count_resources()
    warm = memory[len(memory) // 4]
    growth = 100.0 * (memory[-1] - warm) / warm
    left = {key: after[key] - before[key] for key in before}
    return {"warm_mb": round(warm, 1), "end_mb": round(memory[-1], 1), "growth_percent": round(growth, 2), "left": left}


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4:])))

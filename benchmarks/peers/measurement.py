"""Helpers of peers that train a row: take snapshots of the clocks and counters, and print the measurement.

Some peers need Python 3.9, so this file does too.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any, NamedTuple


class Snapshot(NamedTuple):
    """Clocks and counters at one moment."""

    seconds: float
    cpu_seconds: float
    env_steps: int
    optimizer_steps: int


def take_snapshot(env_steps: int, optimizer_steps: int, workers: int = 0) -> Snapshot:
    """Read the clocks. With `workers`, CPU time includes the processes started by this one."""
    if workers:
        from comparison import cpu_seconds

        spent = cpu_seconds()
    else:
        spent = time.process_time()
    return Snapshot(time.perf_counter(), spent, env_steps, optimizer_steps)


def use_one_core() -> None:
    """Confine all threads of this process to one core, on systems that support it."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


def print_measurement(
    snapshots: Sequence[Snapshot],
    parameters: int,
    versions: Mapping[str, str],
    packages: Sequence[str] = ("gymnasium",),
    threads: int | None = None,
    **extra: Any,
) -> None:
    """Print one line of JSON: the differences between two snapshots, and versions of libraries and `packages`.

    `extra` entries are added or replace others. Without `threads`, the number of threads is torch's.
    """
    begin, end = snapshots
    torch_version = {}
    if threads is None:
        import torch

        threads, torch_version = torch.get_num_threads(), {"torch": torch.__version__}
    result = {
        **{name: getattr(end, name) - getattr(begin, name) for name in Snapshot._fields},
        **extra,
        "parameters": parameters,
        "threads": threads,
        "versions": {
            **versions,
            **{name: version(name) for name in packages},
            **torch_version,
            "python": platform.python_version(),
        },
    }
    print(json.dumps(result))

"""How a run of fixed work ends, in whatever library: one line of JSON."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

NAMES = ("seconds", "cpu_seconds", "env_steps", "optimizer_steps")


Mark = tuple[float, float, int, int]


def mark(env_steps: int, optimizer_steps: int, workers: int = 0) -> Mark:
    """With `workers`, CPU time is that of all processes under this one."""
    if workers:
        from common import cpu_seconds

        spent = cpu_seconds()
    else:
        spent = time.process_time()
    return time.perf_counter(), spent, env_steps, optimizer_steps


def one_core() -> None:
    """Threads that a library has beside the one that computes get no core of their own; not on every system."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


def tell(
    marks: Sequence[Mark],
    parameters: int,
    versions: Mapping[str, str],
    packages: Sequence[str] = ("gymnasium",),
    threads: int | None = None,
    **found: Any,
) -> None:
    """What passed between the two `marks`, and with what it was done; what is `found` otherwise goes over it.

    Who tells of `threads` computes without torch.
    """
    begin, end = marks
    with_torch = {}
    if threads is None:
        import torch

        threads, with_torch = torch.get_num_threads(), {"torch": torch.__version__}
    result = {
        **{name: end[at] - begin[at] for at, name in enumerate(NAMES)},
        **found,
        "parameters": parameters,
        "threads": threads,
        "versions": {
            **versions,
            **{name: version(name) for name in packages},
            **with_torch,
            "python": platform.python_version(),
        },
    }
    print(json.dumps(result))

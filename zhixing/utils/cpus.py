"""The number of CPUs that this process may use."""

from __future__ import annotations

import os

CPU_COUNT = "PYTHON_CPU_COUNT"  # the environment variable that Python 3.13 reads, too


def cpu_count() -> int:
    """Return the value of `PYTHON_CPU_COUNT`, or else the number of CPUs that this process may run on."""
    limit = os.environ.get(CPU_COUNT, "")
    if limit.isdigit() and int(limit) > 0:
        return int(limit)
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1

"""How many CPUs this process may use."""

from __future__ import annotations

import os

CPU_COUNT = "PYTHON_CPU_COUNT"


def cpu_count() -> int:
    """Those that this process may use, or as many as it is told to, in the way of Python 3.13."""
    told = os.environ.get(CPU_COUNT, "")
    if told.isdigit() and int(told) > 0:
        return int(told)
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1

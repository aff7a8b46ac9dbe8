"""How a run of fixed work ends, in whatever library: one line of JSON."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

NAMES = ("seconds", "cpu_seconds", "env_steps", "optimizer_steps")


Mark = tuple[float, float, int, int]


def mark(env_steps: int, optimizer_steps: int) -> Mark:
    return time.perf_counter(), time.process_time(), env_steps, optimizer_steps


def tell(
    marks: Sequence[Mark],
    parameters: int,
    versions: Mapping[str, str],
    packages: Sequence[str] = ("gymnasium",),
    **found: Any,
) -> None:
    """What passed between the two `marks`, and with what it was done; what is `found` otherwise goes over it."""
    import torch

    passed = {name: end - begin for name, begin, end in zip(NAMES, *marks, strict=True)}
    result = {
        **passed,
        **found,
        "parameters": parameters,
        "threads": torch.get_num_threads(),
        "versions": {
            **versions,
            **{name: version(name) for name in packages},
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }
    print(json.dumps(result))

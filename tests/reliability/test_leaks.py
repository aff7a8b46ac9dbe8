"""Memory doesn't grow in long runs, and runs leave nothing open, however they end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from soak_config import LONG_STEPS, record

SCRIPT = Path(__file__).parent / "measure_leaks.py"


@pytest.mark.timeout(36_000)
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
@pytest.mark.parametrize(("name", "how"), [("ppo", "end"), ("dqn", "end"), ("dqn", "raise interrupt")])
def test_memory_and_resources_dont_leak(name: str, how: str, tmp_path: Path) -> None:
    steps = LONG_STEPS if how == "end" else 2500
    start = time.monotonic()
    command = [sys.executable, str(SCRIPT), str(tmp_path), name, str(steps), *how.split()]
    completed = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert completed.returncode == 0, completed.stderr
    measured = json.loads(completed.stdout.splitlines()[-1])
    record("long runs", algorithm=name, how=how, steps=steps, seconds=round(time.monotonic() - start), **measured)
    assert measured["left"] == {"files": 0, "threads": 0, "processes": 0, "shared_memory": 0}
    assert measured["growth_percent"] < 2.0, measured

"""Long runs hold as much memory at their end as early on, and leave nothing open, however they end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from soaking import LONG_STEPS, count

WATCHED = Path(__file__).parent / "leaking.py"


@pytest.mark.timeout(36_000)
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is told by /proc")
@pytest.mark.parametrize(("name", "how"), [("ppo", "end"), ("dqn", "end"), ("dqn", "raise interrupt")])
def test_nothing_grows_and_nothing_stays(name: str, how: str, tmp_path: Path) -> None:
    steps = LONG_STEPS if how == "end" else 2500
    began = time.monotonic()
    command = [sys.executable, str(WATCHED), str(tmp_path), name, str(steps), *how.split()]
    told = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert told.returncode == 0, told.stderr
    found = json.loads(told.stdout.splitlines()[-1])
    count("long runs", algorithm=name, how=how, steps=steps, seconds=round(time.monotonic() - began), **found)
    assert found["left"] == {"files": 0, "threads": 0, "processes": 0, "shared_memory": 0}
    assert found["growth_percent"] < 2.0, found

"""A run that is killed and resumed many times ends bit-for-bit identical to an uninterrupted one."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import checkpoint_tensors, differing_tensors, metrics_rows
from kill_and_resume import COMBINATIONS
from soak_config import KILLS, SOAK, record

SCRIPT = Path(__file__).parent / "kill_and_resume.py"


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("combination", COMBINATIONS if SOAK else COMBINATIONS[:2])
def test_kills_at_random_moments_change_nothing(combination: str, tmp_path: Path) -> None:
    seed = random.randrange(10**6)
    command = [sys.executable, str(SCRIPT), str(tmp_path), str(KILLS), str(seed), combination]
    completed = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert completed.returncode == 0, (seed, completed.stderr)
    counts = json.loads(completed.stdout.splitlines()[-1])
    assert counts["exit_code"] == 0, (seed, completed.stderr)
    assert_identical(tmp_path / "whole", tmp_path / "killed", seed, combination, counts)


def assert_identical(whole: Path, killed: Path, seed: int, combination: str, counts: dict[str, int]) -> None:
    assert counts["unreadable"] == 0, seed
    assert counts["kills"] >= KILLS // 2, (seed, counts)
    changed = differing_tensors(whole, killed)
    expected, actual = metrics_rows(whole), metrics_rows(killed)
    lost_rows = [row for row in expected if row not in actual] + [row for row in actual if row not in expected]
    lost = sum(checkpoint_tensors(whole)[part].nbytes for part in changed) + len(str(lost_rows)) * bool(lost_rows)
    record("kills", combination=combination, **counts, bytes_lost=lost)
    assert changed == [], seed
    assert actual == expected, seed
    assert list(killed.rglob("*.tmp")) == []  # no temporary file is left

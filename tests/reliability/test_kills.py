"""A run that is killed again and again, and resumed each time, ends as one that was left alone."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import checkpoint_tensors, differing_tensors, metrics_rows
from killing import COMBINATIONS
from soaking import KILLS, SOAKING, count

KILLER = Path(__file__).parent / "killing.py"


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("combination", COMBINATIONS if SOAKING else COMBINATIONS[:2])
def test_kills_at_random_moments_change_nothing(combination: str, tmp_path: Path) -> None:
    seed = random.randrange(10**6)
    command = [sys.executable, str(KILLER), str(tmp_path), str(KILLS), str(seed), combination]
    told = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert told.returncode == 0, (seed, told.stderr)
    found = json.loads(told.stdout.splitlines()[-1])
    assert found["exit_code"] == 0, (seed, told.stderr)
    compare(tmp_path / "whole", tmp_path / "killed", seed, combination, found)


def compare(whole: Path, killed: Path, seed: int, combination: str, found: dict[str, int]) -> None:
    assert found["unreadable"] == 0, seed
    assert found["kills"] >= KILLS // 2, (seed, found)
    changed = differing_tensors(whole, killed)
    rows, others = metrics_rows(whole), metrics_rows(killed)
    lost_rows = [row for row in rows if row not in others] + [row for row in others if row not in rows]
    lost = sum(checkpoint_tensors(whole)[part].nbytes for part in changed) + len(str(lost_rows)) * bool(lost_rows)
    count("kills", combination=combination, **found, bytes_lost=lost)
    assert changed == [], seed
    assert rows == others, seed
    left = [path.name for path in killed.rglob("*") if path.name.endswith(".tmp")]
    assert left == []  # what a kill left half-written was written again

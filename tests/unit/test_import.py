"""Importing zhixing configures the threads of torch, unless the user has."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PRINT_POLICY = "import os, zhixing; print(os.environ['OMP_WAIT_POLICY'])"


@pytest.mark.parametrize(("before", "after"), [(None, "passive"), ("active", "active")])
def test_torch_threads_wait_passively_unless_the_user_has_chosen(before: str | None, after: str) -> None:
    env = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    if before is not None:
        env["OMP_WAIT_POLICY"] = before
    result = subprocess.run([sys.executable, "-c", PRINT_POLICY], env=env, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == after

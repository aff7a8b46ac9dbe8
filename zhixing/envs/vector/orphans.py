"""Processes that an environment started and left behind: found by a mark in their environment variables, and ended.

A mark is inherited by every descendant, also by one that left the process group of its worker or whose parent died.
Only Linux shows the variables of other processes; elsewhere the process group alone is ended.
"""

from __future__ import annotations

import os
import secrets
import signal
import sys
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

VARIABLE = "ZHIXING_WORKER"
MAX_ROUNDS = 20  # a process may start another while we look


def new_mark() -> str:
    return secrets.token_hex(8)


def marked(variables: dict[str, str], mark: str) -> dict[str, str]:
    """Return the variables with this mark. A worker inside a worker carries the marks of both."""
    return {**variables, VARIABLE: f"{variables.get(VARIABLE, '')}:{mark}"}


def kill_group(leader: int) -> None:
    """End what is left of the process group that a worker led."""
    with suppress(ProcessLookupError, PermissionError):  # nothing is left; macOS has no permission for a zombie
        os.killpg(leader, signal.SIGKILL)


def kill_marked(marks: Collection[str]) -> None:
    """End all processes that carry one of these marks."""
    if sys.platform != "linux" or not marks:
        return
    wanted = [mark.encode() for mark in marks]
    for _ in range(MAX_ROUNDS):
        pids = [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _carries(pid, wanted)]
        for pid in pids:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if not pids:
            return


def _carries(pid: int, marks: list[bytes]) -> bool:
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes()  # empty for a zombie
    except OSError:  # gone, or of another user
        return False
    start = variables.find(f"{VARIABLE}=".encode())
    return start >= 0 and any(mark in variables[start:].split(b"\0", 1)[0] for mark in marks)

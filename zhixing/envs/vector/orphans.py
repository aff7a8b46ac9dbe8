"""Find and kill processes that an environment started and left running.

They are found by a mark in their environment variables. Every descendant inherits it, even one that left the process
group of its worker or whose parent died. Only Linux exposes the variables of other processes; on other systems only the
process group is killed.
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
MAX_ROUNDS = 20  # a process may start another one during the search


def new_mark() -> str:
    return secrets.token_hex(8)


def add_mark(variables: dict[str, str], mark: str) -> dict[str, str]:
    """Return the environment variables with this mark added. A worker inside a worker carries both marks."""
    return {**variables, VARIABLE: f"{variables.get(VARIABLE, '')}:{mark}"}


def kill_group(leader: int) -> None:
    """Kill the remaining processes of the process group that a worker led."""
    with suppress(ProcessLookupError, PermissionError):  # none is left; macOS denies permission for a zombie
        os.killpg(leader, signal.SIGKILL)


def kill_marked(marks: Collection[str]) -> None:
    """Kill all processes that carry one of these marks."""
    if sys.platform != "linux" or not marks:
        return
    encoded = [mark.encode() for mark in marks]
    for _ in range(MAX_ROUNDS):
        pids = [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _has_mark(pid, encoded)]
        for pid in pids:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if not pids:
            return


def _has_mark(pid: int, marks: list[bytes]) -> bool:
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes()  # empty for a zombie
    except OSError:  # the process has ended, or belongs to another user
        return False
    start = variables.find(f"{VARIABLE}=".encode())
    return start >= 0 and any(mark in variables[start:].split(b"\0", 1)[0] for mark in marks)

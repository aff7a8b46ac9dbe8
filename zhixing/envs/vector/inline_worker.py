"""A worker of the back end `mixed` that runs in the parent process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from zhixing.envs.vector.sub_env_group import SubEnvGroup
from zhixing.envs.vector.worker_process import format_range


class InlineWorker:
    """Has the interface of `WorkerProcess`. It works in `receive`, when the worker processes are already running."""

    fds = ()  # no pipe to wait for
    seconds_to_wait = 0.0
    ready_without_data = True
    lost = False
    consecutive_failures = 0

    def __init__(self, group: SubEnvGroup) -> None:
        self.group, self.first, self.last = group, group.first, group.first + len(group.sub_envs)
        self.busy = False
        self._work: Callable[[], Any] = self._step

    def start_step(self) -> None:
        self.busy, self._work = True, self._step

    def start_call(self, method: str, arguments: Any, num_steps: int = 0) -> None:
        self.busy, self._work = True, lambda: getattr(self.group, method)(*arguments)

    def receive(self) -> Any:
        self.busy = False
        return self._work()

    def _step(self) -> Any:
        ended = self.group.step()
        return (ended, []) if any(ended.values()) else None

    def drain(self) -> None:
        if self.busy:
            self.receive()

    @property
    def index_range(self) -> str:
        return format_range(self.first, self.last)

    def close_pipes(self) -> None:
        """Close the environments: there are no pipes."""
        self.group.close()

    def kill(self) -> None:
        """Do nothing: there is no process to kill."""

    def join(self, timeout: float) -> int:
        return 0

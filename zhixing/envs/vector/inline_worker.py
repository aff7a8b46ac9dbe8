"""The environments of a ProcessVectorEnv that its own process steps: to the vector, one more worker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from zhixing.envs.vector.sub_env_group import SubEnvGroup
from zhixing.envs.vector.worker_process import range_of


class InlineWorker:
    """What it is asked for is done when the answer is waited for: by then those in other processes are at it."""

    fds = ()  # there is no pipe to wait for
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

    def start_call(self, method: str, arguments: Any, steps: int = 0) -> None:
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
    def range(self) -> str:
        return range_of(self.first, self.last)

    def close_pipes(self) -> None:
        self.group.close()

    def kill(self) -> None:
        """A process of its own could be killed."""

    def end(self, seconds: float) -> int:
        return 0

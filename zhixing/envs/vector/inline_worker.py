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
    must_answer = True
    lost = False
    consecutive_failures = 0

    def __init__(self, slots: SubEnvGroup) -> None:
        self.slots, self.first, self.last = slots, slots.first, slots.first + len(slots.slots)
        self.busy = False
        self._work: Callable[[], Any] = self._step

    def start_step(self) -> None:
        self.busy, self._work = True, self._step

    def start_call(self, method: str, arguments: Any, steps: int = 0) -> None:
        self.busy, self._work = True, lambda: getattr(self.slots, method)(*arguments)

    def answer(self) -> Any:
        self.busy = False
        return self._work()

    def _step(self) -> Any:
        ended = self.slots.step()
        return (ended, []) if any(ended.values()) else None

    def drain(self) -> None:
        if self.busy:
            self.answer()

    @property
    def range(self) -> str:
        return range_of(self.first, self.last)

    def close_pipes(self) -> None:
        self.slots.close()

    def kill(self) -> None:
        """A process of its own could be killed."""

    def end(self, seconds: float) -> int:
        return 0

"""Signals that interrupt training."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from zhixing.errors import write_stderr
from zhixing.training.loop import INTERRUPTED, TrainingLoop


@contextmanager
def interruptible(loop: TrainingLoop) -> Iterator[None]:
    """Let Ctrl-C, SIGTERM and SIGHUP end training after the current iteration, and a second signal at once.

    A second SIGHUP is ignored: a terminal that closes sends it twice, from its shell and from the kernel. If SIGHUP is
    ignored already (`nohup`), it stays ignored. Does nothing outside the main thread, where Python can't set handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        if loop.interrupt_requested:
            if number == signal.SIGHUP:
                return
            raise KeyboardInterrupt
        loop.stop(INTERRUPTED)
        write_stderr("\nstopping after this iteration or evaluation step; interrupt again to stop immediately")

    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

"""What the environments of worker processes are doing, in shared memory: still there when the worker is not."""

from __future__ import annotations

import mmap
import pickle
from typing import Any

import numpy as np

from zhixing.core.spaces import Spaces

ORIGIN_BYTES = 8192  # of how an episode began
ACTION_BYTES = 2**20  # of its actions, here and in checkpoints; memory that is never written takes no room


class ActionLog:
    """One tape per environment: how its episode began, and its actions. A worker writes, the parent reads.

    Counters are views of plain memory, to which single numbers are written in half of NumPy's time.
    """

    def __init__(self, spaces: Spaces, num: int, memory: mmap.mmap, offset: int) -> None:
        shape, dtype = _action(spaces)
        self.memory, self.room = memory, max_recorded_actions(spaces)
        counters = memoryview(memory)[offset : offset + 3 * 8 * num].cast("q")
        # at the place of a worker's first environment: which one it steps, counted from 1; 0 for none
        self.under_way = counters[:num]
        self.sizes, self.counts = counters[num : 2 * num], counters[2 * num :]
        self._origins = offset + 3 * 8 * num
        count = num * self.room * int(np.prod(shape))
        actions = np.frombuffer(memory, dtype, count, self._origins + num * ORIGIN_BYTES)
        self.actions = list(actions.reshape(num, self.room, *shape))

    def begin(self, index: int, origin: dict[str, Any]) -> None:
        text, start = pickle.dumps(origin), self._origins + index * ORIGIN_BYTES
        self.sizes[index] = self.counts[index] = 0  # its end may come in between
        if len(text) <= ORIGIN_BYTES:
            self.memory[start : start + len(text)] = text
            self.sizes[index] = len(text)

    def add(self, index: int, count: int, action: Any) -> None:
        """`count` is how many there are with this one."""
        if count <= self.room:
            self.actions[index][count - 1] = action
        self.counts[index] = count

    def read(self, index: int) -> dict[str, Any] | None:
        """None before the first reset, and if it can't be read; `actions` are None where they were too many."""
        size, count, start = self.sizes[index], self.counts[index], self._origins + index * ORIGIN_BYTES
        if not size:
            return None
        try:
            told = pickle.loads(self.memory[start : start + size])  # as all that comes from our own workers
        except Exception:  # a worker that died may have written anywhere
            return None
        return {**told, "actions": self.actions[index][:count].tolist() if count <= self.room else None}


def action_log_bytes(spaces: Spaces, num: int) -> int:
    shape, dtype = _action(spaces)
    return num * (3 * 8 + ORIGIN_BYTES + max_recorded_actions(spaces) * int(np.prod(shape)) * dtype.itemsize)


def to_json(tree: Any) -> Any:
    """As JSON takes it; what it can't say becomes words."""
    if isinstance(tree, dict):
        return {str(key): to_json(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [to_json(value) for value in tree]
    if isinstance(tree, (np.ndarray, np.generic)):
        return tree.tolist()
    return tree if tree is None or isinstance(tree, (bool, int, float, str)) else repr(tree)


def _action(spaces: Spaces) -> tuple[tuple[int, ...], np.dtype[Any]]:
    return spaces.fields()["action"].shape, np.dtype(spaces.action.dtype)


def max_recorded_actions(spaces: Spaces) -> int:
    """Return how many actions of an episode are recorded: 131,072 discrete ones, fewer of wide actions.

    It is a multiple of 8, so whatever follows in memory is aligned.
    """
    shape, dtype = _action(spaces)
    return max(8, ACTION_BYTES // max(1, int(np.prod(shape)) * dtype.itemsize) // 8 * 8)

"""Log the episodes of worker processes in shared memory, where they survive the death of the worker."""

from __future__ import annotations

import mmap
import pickle
from typing import Any

import numpy as np

from zhixing.core.spaces import Spaces

ORIGIN_BYTES = 8192  # per environment, for the start of its episode
ACTION_BYTES = 2**20  # per environment, for the actions of an episode; pages that are never written take no memory
COUNTERS = 3  # per environment, 8 bytes each


class ActionLog:
    """The start and the actions of the current episode of each environment. Workers write, the parent reads.

    Counters are memoryviews: writing one number takes half as long as to a NumPy array.
    """

    def __init__(self, spaces: Spaces, num_envs: int, memory: mmap.mmap, offset: int) -> None:
        shape, dtype = spaces.env_action_field
        self.memory, self.max_actions = memory, max_recorded_actions(spaces)
        counters = memoryview(memory)[offset : offset + COUNTERS * 8 * num_envs].cast("q")
        # at the index of a worker's first environment: 1 + the index of the environment that it runs now, 0 for none
        self.active_env = counters[:num_envs]
        self.origin_sizes, self.counts = counters[num_envs : 2 * num_envs], counters[2 * num_envs :]
        self._origins = offset + COUNTERS * 8 * num_envs
        count = num_envs * self.max_actions * int(np.prod(shape))
        actions = np.frombuffer(memory, dtype, count, self._origins + num_envs * ORIGIN_BYTES)
        self.actions = list(actions.reshape(num_envs, self.max_actions, *shape))

    def start_episode(self, index: int, origin: dict[str, Any]) -> None:
        data, start = pickle.dumps(origin), self._origins + index * ORIGIN_BYTES
        self.origin_sizes[index] = self.counts[index] = 0  # invalid while being written: the worker may die in between
        if len(data) <= ORIGIN_BYTES:
            self.memory[start : start + len(data)] = data
            self.origin_sizes[index] = len(data)

    def append(self, index: int, count: int, action: Any) -> None:
        """Log the action number `count` of the episode, counted from 1."""
        if count <= self.max_actions:
            self.actions[index][count - 1] = action
        self.counts[index] = count

    def read(self, index: int) -> dict[str, Any] | None:
        """Return the current episode, or None before the first reset and if the log is damaged.

        The entry `actions` is None if there were too many to log.
        """
        size, count, start = self.origin_sizes[index], self.counts[index], self._origins + index * ORIGIN_BYTES
        if not size:
            return None
        try:
            origin = pickle.loads(self.memory[start : start + size])  # written by our own worker
        except Exception:  # a crashing worker may have overwritten any memory
            return None
        return {**origin, "actions": self.actions[index][:count].tolist() if count <= self.max_actions else None}


def action_log_bytes(spaces: Spaces, num_envs: int) -> int:
    shape, dtype = spaces.env_action_field
    action_bytes = max_recorded_actions(spaces) * int(np.prod(shape)) * dtype.itemsize
    return num_envs * (COUNTERS * 8 + ORIGIN_BYTES + action_bytes)


def max_recorded_actions(spaces: Spaces) -> int:
    """Return how many actions of an episode are recorded: 131,072 discrete ones, fewer if an action has more bytes.

    It is a multiple of 8, so the memory after the actions stays aligned.
    """
    shape, dtype = spaces.env_action_field
    return max(8, ACTION_BYTES // max(1, int(np.prod(shape)) * dtype.itemsize) // 8 * 8)

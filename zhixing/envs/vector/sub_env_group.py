"""Copies of a task and their rows of arrays: autoreset, and another copy for one that fails. Serial and worker
processes share it, so that both give the same numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import gymnasium as gym

from zhixing.core.goals import one_per_row
from zhixing.core.tree import Tree
from zhixing.envs.crash.failure_policy import IN_A_ROW, INTERRUPTED, crash_of, totals_of
from zhixing.envs.env_spec import EnvSpec
from zhixing.envs.vector.action_log import ActionLog
from zhixing.envs.vector.step_buffers import Array, Snapshot, StepBuffers
from zhixing.envs.vector.sub_env import Numbers, State, SubEnv, numbers_of, task_seed
from zhixing.envs.wrappers.goals import functions_of
from zhixing.errors import EnvCrashError, UserError

__all__ = ["Numbers", "State", "SubEnv", "SubEnvGroup", "numbers_of", "task_seed"]


class SubEnvGroup:
    """Neighbouring environments, stepped one after the other; `first` is the index of the first.

    With `replace`, one that fails is made anew: its episode is over as if cut by a clock, with the last observation
    that was right, and `crashes` tells of it. With `tapes`, they keep what is going on where others can read it.
    """

    def __init__(
        self,
        makers: Sequence[Callable[[], gym.Env[Any, Any]]],
        layout: EnvSpec,
        arrays: StepBuffers,
        first: int,
        name: str,
        *,
        replace: bool = False,
        tapes: ActionLog | None = None,
    ) -> None:
        self.first, self.makers, self.arrays, self.tapes = first, list(makers), arrays, tapes
        self.twin = Snapshot(arrays) if replace else None
        self.crashes: list[EnvCrashError] = []
        self.slots: list[SubEnv] = []
        for row, make in enumerate(makers):
            self.slots.append(SubEnv(make(), layout, arrays, row, first + row, name, tapes))
        rewards = arrays.reward if layout.spaces.agents else ()  # a single one is checked at its step
        self._totals = totals_of(arrays.obs, arrays.beside, rewards)
        self._mask = arrays.beside.get("mask")

    def step(self, rows: Sequence[int] | None = None) -> dict[int, Numbers]:
        """Step all, or these; gives the last numbers of the episodes that ended, by index."""
        ended: dict[int, Numbers] = {}
        if self.twin is not None:
            self.twin.take()
        slots = self.slots if rows is None else [self.slots[row] for row in rows]
        for slot in slots:
            if self.tapes is not None:
                self.tapes.under_way[self.first] = slot.index + 1
            try:
                numbers = slot.step()
            except EnvCrashError as crash:
                numbers = self._interrupt(slot, crash)
            else:
                if numbers is not None:
                    slot.consecutive_failures = 0
                    self._begin(slot)
            if numbers is not None:
                ended[slot.index] = numbers
        if not self._sound():
            for slot in slots:
                try:
                    slot.check()
                except EnvCrashError as crash:
                    if slot.index in ended:  # it is the next episode that begins wrong
                        self._renew(slot, crash)
                    else:
                        ended[slot.index] = self._interrupt(slot, crash)
        if self.tapes is not None:
            self.tapes.under_way[self.first] = 0
        return ended

    def _under_way(self, slot: SubEnv | None) -> None:
        """Keep which environment is at work, for the case that the process doesn't survive it."""
        if self.tapes is not None:
            self.tapes.under_way[self.first] = 0 if slot is None else slot.index + 1

    def _sound(self) -> bool:
        """Whether what is shown can be right: asked of all at once, since asking each would cost a part of its step."""
        for total in self._totals:
            if not math.isfinite(total()):
                return False
        return self._mask is None or bool(self._mask.any(-1).all())

    def _begin(self, slot: SubEnv) -> None:
        """The next episode of one that has just ended."""
        try:
            slot.reset(None, None)
        except EnvCrashError as crash:
            self._renew(slot, crash)

    def _interrupt(self, slot: SubEnv, crash: EnvCrashError) -> Numbers:
        """End an episode that can't go on: nobody knows what the last action led to, so nothing is paid for it."""
        self.arrays.reward[slot.row] = 0.0
        self._renew(slot, crash)
        assert self.twin is not None
        self.twin.end(slot.row)
        return {INTERRUPTED: True}

    def _renew(self, slot: SubEnv, crash: EnvCrashError) -> None:
        """Another copy, whose first reset may fail as well."""
        if self.twin is None:
            raise crash
        while True:
            slot.consecutive_failures += 1
            if slot.consecutive_failures > IN_A_ROW:
                crash.args = (
                    f"{crash}\nit failed {slot.consecutive_failures} times without an episode that ended by itself",
                )
                raise crash
            with suppress(Exception):  # it may be broken altogether
                slot.env.close()
            self.crashes.append(crash)
            try:
                slot.replace_env(self.makers[slot.row]())
                return
            except EnvCrashError as another:
                crash = another

    def restart(self, known: Sequence[tuple[int | None, int]]) -> None:
        for slot, (seed, replaced) in zip(self.slots, known, strict=True):
            self._under_way(slot)
            slot.restart(seed, replaced)
        self._under_way(None)

    def start_recorded_episode(self, seed: int | None, origin: State) -> None:
        self._under_way(self.slots[0])
        self.slots[0].start_recorded_episode(seed, origin)
        self._under_way(None)

    def reset(self, seeds: Sequence[int | None], options: State | None) -> None:
        for slot, seed in zip(self.slots, seeds, strict=True):
            self._under_way(slot)
            slot.reset(seed, options)
        self._under_way(None)
        for slot in self.slots:
            slot.check()

    def state(self) -> list[State]:
        return [slot.state() for slot in self.slots]

    def load(self, states: Sequence[State]) -> list[int]:
        """The indices of those that could not be restored exactly."""
        return [slot.index for slot, state in zip(self.slots, states, strict=True) if not slot.load(state)]

    def render(self, index: int) -> Tree:
        return self.slots[index - self.first].render()

    def goal_functions(self) -> list[str]:
        return list(functions_of(self.slots[0].env))

    def compute(self, name: str, achieved: Array, desired: Array) -> Array:
        """Call a function of the first environment for many pairs of goals."""
        slot = self.slots[0]
        try:
            return one_per_row(functions_of(slot.env)[name], achieved, desired)
        except UserError:
            raise
        except Exception as error:
            raise crash_of(slot.name, slot.index, f"{name}()", error, None) from error

    def close(self) -> None:
        for slot in self.slots:
            slot.env.close()

"""Copies of a task and their rows of arrays: autoreset, and another copy for one that fails. Serial and worker
processes share it, so that both give the same numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import gymnasium as gym

from zhixing.core.goals import compute_per_row
from zhixing.core.tree import Tree
from zhixing.envs.crash.failure_policy import INTERRUPTED, MAX_CONSECUTIVE_FAILURES, make_crash_error
from zhixing.envs.crash.validation import finiteness_sums
from zhixing.envs.env_spec import EnvSpec
from zhixing.envs.vector.action_log import ActionLog
from zhixing.envs.vector.step_buffers import Array, Snapshot, StepBuffers
from zhixing.envs.vector.sub_env import ScalarInfo, State, SubEnv
from zhixing.envs.wrappers.goals import find_goal_functions
from zhixing.errors import EnvCrashError, UserError


class SubEnvGroup:
    """Neighbouring environments, stepped one after the other; `first` is the index of the first.

    With `replace`, one that fails is made anew: its episode is over as if cut by a clock, with the last observation
    that was right, and `crashes` tells of it. With `tapes`, they keep what is going on where others can read it.
    """

    def __init__(
        self,
        makers: Sequence[Callable[[], gym.Env[Any, Any]]],
        env_spec: EnvSpec,
        buffers: StepBuffers,
        first: int,
        name: str,
        *,
        replace: bool = False,
        action_log: ActionLog | None = None,
    ) -> None:
        self.first, self.makers, self.buffers, self.action_log = first, list(makers), buffers, action_log
        self.snapshot = Snapshot(buffers) if replace else None
        self.crashes: list[EnvCrashError] = []
        self.sub_envs: list[SubEnv] = []
        for row, make in enumerate(makers):
            self.sub_envs.append(SubEnv(make(), env_spec, buffers, row, first + row, name, action_log))
        rewards = buffers.reward if env_spec.spaces.agents else ()  # a single one is checked at its step
        self._totals = finiteness_sums(buffers.obs, buffers.extras, rewards)
        self._mask = buffers.extras.get("mask")

    def step(self, rows: Sequence[int] | None = None) -> dict[int, ScalarInfo]:
        """Step all, or these; gives the last numbers of the episodes that ended, by index."""
        ended: dict[int, ScalarInfo] = {}
        if self.snapshot is not None:
            self.snapshot.take()
        sub_envs = self.sub_envs if rows is None else [self.sub_envs[row] for row in rows]
        for sub_env in sub_envs:
            if self.action_log is not None:
                self.action_log.under_way[self.first] = sub_env.index + 1
            try:
                numbers = sub_env.step()
            except EnvCrashError as crash:
                numbers = self._interrupt(sub_env, crash)
            else:
                if numbers is not None:
                    sub_env.consecutive_failures = 0
                    self._begin(sub_env)
            if numbers is not None:
                ended[sub_env.index] = numbers
        if not self._sound():
            for sub_env in sub_envs:
                try:
                    sub_env.check()
                except EnvCrashError as crash:
                    if sub_env.index in ended:  # it is the next episode that begins wrong
                        self._renew(sub_env, crash)
                    else:
                        ended[sub_env.index] = self._interrupt(sub_env, crash)
        if self.action_log is not None:
            self.action_log.under_way[self.first] = 0
        return ended

    def _under_way(self, sub_env: SubEnv | None) -> None:
        """Keep which environment is at work, for the case that the process doesn't survive it."""
        if self.action_log is not None:
            self.action_log.under_way[self.first] = 0 if sub_env is None else sub_env.index + 1

    def _sound(self) -> bool:
        """Whether what is shown can be right: asked of all at once, since asking each would cost a part of its step."""
        for total in self._totals:
            if not math.isfinite(total()):
                return False
        return self._mask is None or bool(self._mask.any(-1).all())

    def _begin(self, sub_env: SubEnv) -> None:
        """The next episode of one that has just ended."""
        try:
            sub_env.reset(None, None)
        except EnvCrashError as crash:
            self._renew(sub_env, crash)

    def _interrupt(self, sub_env: SubEnv, crash: EnvCrashError) -> ScalarInfo:
        """End an episode that can't go on: nobody knows what the last action led to, so nothing is paid for it."""
        self.buffers.reward[sub_env.row] = 0.0
        self._renew(sub_env, crash)
        assert self.snapshot is not None
        self.snapshot.end(sub_env.row)
        return {INTERRUPTED: True}

    def _renew(self, sub_env: SubEnv, crash: EnvCrashError) -> None:
        """Another copy, whose first reset may fail as well."""
        if self.snapshot is None:
            raise crash
        while True:
            sub_env.consecutive_failures += 1
            if sub_env.consecutive_failures > MAX_CONSECUTIVE_FAILURES:
                crash.args = (
                    f"{crash}\nit failed {sub_env.consecutive_failures} times without an episode that ended by itself",
                )
                raise crash
            with suppress(Exception):  # it may be broken altogether
                sub_env.env.close()
            self.crashes.append(crash)
            try:
                sub_env.replace_env(self.makers[sub_env.row]())
                return
            except EnvCrashError as another:
                crash = another

    def restart(self, known: Sequence[tuple[int | None, int]]) -> None:
        for sub_env, (seed, num_restarts) in zip(self.sub_envs, known, strict=True):
            self._under_way(sub_env)
            sub_env.restart(seed, num_restarts)
        self._under_way(None)

    def start_recorded_episode(self, seed: int | None, origin: State) -> None:
        self._under_way(self.sub_envs[0])
        self.sub_envs[0].start_recorded_episode(seed, origin)
        self._under_way(None)

    def reset(self, seeds: Sequence[int | None], options: State | None) -> None:
        for sub_env, seed in zip(self.sub_envs, seeds, strict=True):
            self._under_way(sub_env)
            sub_env.reset(seed, options)
        self._under_way(None)
        for sub_env in self.sub_envs:
            sub_env.check()

    def state(self) -> list[State]:
        return [sub_env.state() for sub_env in self.sub_envs]

    def load(self, states: Sequence[State]) -> list[int]:
        """The indices of those that could not be restored exactly."""
        return [sub_env.index for sub_env, state in zip(self.sub_envs, states, strict=True) if not sub_env.load(state)]

    def render(self, index: int) -> Tree:
        return self.sub_envs[index - self.first].render()

    def goal_functions(self) -> list[str]:
        return list(find_goal_functions(self.sub_envs[0].env))

    def compute(self, name: str, achieved: Array, desired: Array) -> Array:
        """Call a function of the first environment for many pairs of goals."""
        sub_env = self.sub_envs[0]
        try:
            return compute_per_row(find_goal_functions(sub_env.env)[name], achieved, desired)
        except UserError:
            raise
        except Exception as error:
            raise make_crash_error(sub_env.name, sub_env.index, f"{name}()", error, None) from error

    def close(self) -> None:
        for sub_env in self.sub_envs:
            sub_env.env.close()

"""Step a group of environments with autoreset and replace those that fail.

The serial back end and worker processes share this code, so both produce the same results.
"""

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
    """Consecutive environments of a vector, stepped one after the other; `first` is the index of the first.

    With `replace`, a new environment replaces one that fails. Its episode is truncated at the last valid observation,
    and the error is added to `crashes`. With an `action_log`, the parent process can read the current episodes.
    """

    def __init__(
        self,
        env_fns: Sequence[Callable[[], gym.Env[Any, Any]]],
        env_spec: EnvSpec,
        buffers: StepBuffers,
        first: int,
        name: str,
        *,
        replace: bool = False,
        action_log: ActionLog | None = None,
    ) -> None:
        self.first, self.env_fns, self.buffers, self.action_log = first, list(env_fns), buffers, action_log
        self.snapshot = Snapshot(buffers) if replace else None
        self.crashes: list[EnvCrashError] = []
        self.sub_envs = [
            SubEnv(env_fn(), env_spec, buffers, row, first + row, name, action_log)
            for row, env_fn in enumerate(env_fns)
        ]
        rewards = buffers.reward if env_spec.spaces.agents else ()  # `SubEnv.step` checks a single reward
        self._sums = finiteness_sums(buffers.obs, buffers.extras, rewards)
        self._mask = buffers.extras.get("mask")

    def step(self, rows: Sequence[int] | None = None) -> dict[int, ScalarInfo]:
        """Step all environments, or those of `rows`. Return the last info of each episode that ended, by index."""
        ended: dict[int, ScalarInfo] = {}
        if self.snapshot is not None:
            self.snapshot.take()
        sub_envs = self.sub_envs if rows is None else [self.sub_envs[row] for row in rows]
        for sub_env in sub_envs:
            if self.action_log is not None:
                self.action_log.active_env[self.first] = sub_env.index + 1
            try:
                final_info = sub_env.step()
            except EnvCrashError as crash:
                ended[sub_env.index] = self._interrupt(sub_env, crash)
                continue
            if final_info is not None:
                ended[sub_env.index] = final_info
                self._start_next_episode(sub_env)
        if not self._all_valid():
            self._replace_invalid(sub_envs, ended)
        if self.action_log is not None:
            self.action_log.active_env[self.first] = 0
        return ended

    def _start_next_episode(self, sub_env: SubEnv) -> None:
        sub_env.consecutive_failures = 0
        try:
            sub_env.reset(None, None)
        except EnvCrashError as crash:
            self._replace(sub_env, crash)

    def _all_valid(self) -> bool:
        """Check the results of all environments at once, which is faster than checking each of them."""
        for compute_sum in self._sums:
            if not math.isfinite(compute_sum()):
                return False
        return self._mask is None or bool(self._mask.any(-1).all())

    def _replace_invalid(self, sub_envs: Sequence[SubEnv], ended: dict[int, ScalarInfo]) -> None:
        """Replace environments with invalid results, and add the episodes that this interrupts to `ended`."""
        for sub_env in sub_envs:
            try:
                sub_env.check()
            except EnvCrashError as crash:
                if sub_env.index in ended:  # the row already belongs to the next episode
                    self._replace(sub_env, crash)
                else:
                    ended[sub_env.index] = self._interrupt(sub_env, crash)

    def _interrupt(self, sub_env: SubEnv, crash: EnvCrashError) -> ScalarInfo:
        """Truncate the episode before the failed step, whose result is unknown, and replace the environment."""
        self.buffers.reward[sub_env.row] = 0.0  # it may be NaN, for which the check of the new environment would fail
        self._replace(sub_env, crash)
        assert self.snapshot is not None
        self.snapshot.truncate(sub_env.row)
        return {INTERRUPTED: True}

    def _replace(self, sub_env: SubEnv, crash: EnvCrashError) -> None:
        """Replace a failed environment, repeatedly if the first reset of the new one fails too."""
        if self.snapshot is None:
            raise crash
        while True:
            sub_env.consecutive_failures += 1
            if sub_env.consecutive_failures > MAX_CONSECUTIVE_FAILURES:
                crash.args = (f"{crash}\nit failed {sub_env.consecutive_failures} times without completing an episode",)
                raise crash
            with suppress(Exception):  # a broken environment may fail here, too
                sub_env.env.close()
            self.crashes.append(crash)
            try:
                sub_env.replace_env(self.env_fns[sub_env.row]())
                return
            except EnvCrashError as next_crash:
                crash = next_crash

    def _set_active(self, sub_env: SubEnv | None) -> None:
        """Log which environment runs now, in case the process doesn't survive it."""
        if self.action_log is not None:
            self.action_log.active_env[self.first] = 0 if sub_env is None else sub_env.index + 1

    def restart(self, seeds_and_restarts: Sequence[tuple[int | None, int]]) -> None:
        """Start the first episodes of environments that replace those of a lost worker."""
        for sub_env, (seed, num_restarts) in zip(self.sub_envs, seeds_and_restarts, strict=True):
            self._set_active(sub_env)
            sub_env.restart(seed, num_restarts)
        self._set_active(None)

    def start_recorded_episode(self, seed: int | None, origin: State) -> None:
        self._set_active(self.sub_envs[0])
        self.sub_envs[0].start_recorded_episode(seed, origin)
        self._set_active(None)

    def reset(self, seeds: Sequence[int | None], options: State | None) -> None:
        for sub_env, seed in zip(self.sub_envs, seeds, strict=True):
            self._set_active(sub_env)
            sub_env.reset(seed, options)
        self._set_active(None)
        for sub_env in self.sub_envs:
            sub_env.check()

    def state(self) -> list[State]:
        return [sub_env.state() for sub_env in self.sub_envs]

    def load(self, states: Sequence[State]) -> list[int]:
        """Restore saved states. Return the indices of the environments that couldn't be restored exactly."""
        return [sub_env.index for sub_env, state in zip(self.sub_envs, states, strict=True) if not sub_env.load(state)]

    def render(self, index: int) -> Tree:
        return self.sub_envs[index - self.first].render()

    def goal_functions(self) -> list[str]:
        return list(find_goal_functions(self.sub_envs[0].env))

    def compute(self, name: str, achieved: Array, desired: Array, info: State) -> Array:
        """Call a goal function of the first environment for each pair of goals."""
        sub_env = self.sub_envs[0]
        try:
            return compute_per_row(find_goal_functions(sub_env.env)[name], achieved, desired, info)
        except UserError:
            raise
        except Exception as error:
            raise make_crash_error(sub_env.name, sub_env.index, f"{name}()", error, None) from error

    def close(self) -> None:
        for sub_env in self.sub_envs:
            sub_env.env.close()

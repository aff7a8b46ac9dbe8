"""The serial back end: all environments in this process, one after the other. Easy to debug, and the reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np

from zhixing.core.tree import Tree
from zhixing.envs.crash.failure_policy import FailurePolicy
from zhixing.envs.env_spec import EnvSpec, inspect_env
from zhixing.envs.vector.base import Info, Result, VectorEnv, recv_result, reset_result, sorted_ids, step_result
from zhixing.envs.vector.step_buffers import Array, allocate
from zhixing.envs.vector.sub_env import ScalarInfo, State
from zhixing.envs.vector.sub_env_group import SubEnvGroup
from zhixing.errors import EnvCrashError, UserError

TIMEOUTS_NEED_PROCESSES = (
    "timeouts (vector.step_timeout, vector.call_timeout) need worker processes; use vector.backend=process"
)
EnvFn = Callable[[], gym.Env[Any, Any]]


class SerialVectorEnv(VectorEnv):
    def __init__(
        self,
        env_fn: EnvFn,
        num_envs: int,
        env_spec: EnvSpec | None = None,
        failure_policy: FailurePolicy | None = None,
    ) -> None:
        self.env_fn, self.failure_policy = env_fn, failure_policy or FailurePolicy()
        if self.failure_policy.has_timeout:
            raise UserError(TIMEOUTS_NEED_PROCESSES)
        name = env_name_of(env_fn)
        env_spec = env_spec or infer_env_spec(env_fn)
        self.logged_info_keys, self.max_episode_steps = env_spec.logged_info_keys, env_spec.max_episode_steps
        super().__init__(name, env_spec.spaces, num_envs, "serial", 1)
        self.buffers = allocate(env_spec.spaces, num_envs)
        replace = self.failure_policy.replace
        self.group = SubEnvGroup([env_fn] * num_envs, env_spec, self.buffers, 0, name, replace=replace)
        self.metadata["render_fps"] = env_spec.render_fps
        self.closed = False
        self._sent: list[int] = []
        self._ended: dict[int, ScalarInfo] = {}

    def reset(self, *, seed: int | None = None, options: State | None = None) -> tuple[Tree, Info]:
        try:
            self.group.reset(self._seeds(seed), options)
        except EnvCrashError as crash:
            self._save_crash_report(crash)
            raise
        self._sent, self._ended = [], {}
        return reset_result(self.buffers)

    def step(self, actions: Array) -> Result:
        self.buffers.action[...] = self.spaces.flatten_action(actions)
        return step_result(self.buffers, self._step())

    def _step(self, rows: list[int] | None = None) -> dict[int, ScalarInfo]:
        try:
            ended = self.group.step(rows)
        except EnvCrashError as crash:
            self._save_crash_report(crash)
            raise
        for handled in self.group.crashes:
            self._save_crash_report(handled)
            self.num_env_restarts += 1
        self.group.crashes.clear()
        return ended

    def send(self, actions: Array, ids: Array) -> None:
        self.buffers.action[ids] = self.spaces.flatten_action(actions)
        rows = sorted_ids(ids).tolist()
        self._ended.update(self._step(rows))
        self._sent += rows

    def recv(self, min_ready: int = 1) -> tuple[Array, Tree, Array, Array, Array, Info]:
        if len(self._sent) < min_ready:
            raise ValueError(f"recv needs {min_ready} environments, but actions were sent to {len(self._sent)}")
        ids, ended = sorted_ids(self._sent), self._ended
        self._sent, self._ended = [], {}
        return recv_result(self.buffers, ended, ids)

    def state_dict(self) -> State:
        return {"kind": "sub_envs", "name": self.name, "num_envs": self.num_envs, "envs": self.group.state()}

    def load_state_dict(self, state: State) -> tuple[Tree, Info]:
        self._check_state(state, "sub_envs")
        self.inexact = self.group.load(state["envs"])
        self.num_env_restarts = sum(sub_env.num_restarts for sub_env in self.group.sub_envs)
        return reset_result(self.buffers)

    def render(self, index: int = 0) -> np.ndarray[Any, Any]:  # type: ignore[override]
        return self.group.render(index)

    def goal_functions(self) -> list[str]:
        return self.group.goal_functions()

    def compute(self, name: str, achieved: Array, desired: Array, info: State) -> Array:
        """Call a goal function of the first environment; `info` has arrays [B,...]."""
        return self.group.compute(name, achieved, desired, info)

    def close_extras(self) -> None:
        self.group.close()


def env_name_of(env_fn: EnvFn) -> str:
    return str(getattr(env_fn, "name", None) or getattr(env_fn, "__qualname__", env_fn))


def infer_env_spec(env_fn: EnvFn) -> EnvSpec:
    """Return the spec of a temporary environment, so the environments in use start untouched in every back end."""
    env = env_fn()
    try:
        return inspect_env(env, env_name_of(env_fn))
    finally:
        env.close()

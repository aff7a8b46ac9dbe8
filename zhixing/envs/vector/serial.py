"""All environments in this process, one after the other: the debugger's mode and the reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np

from zhixing.core.tree import Tree
from zhixing.envs.crash.failure_policy import FailurePolicy
from zhixing.envs.env_spec import EnvSpec, describe
from zhixing.envs.vector.base import Info, Result, VectorEnv, as_ids, partial_result, result, shown
from zhixing.envs.vector.step_buffers import Array, allocate
from zhixing.envs.vector.sub_env_group import Numbers, State, SubEnvGroup
from zhixing.errors import EnvCrashError, UserError

LIMITS_NEED_PROCESSES = (
    "a time limit (vector.step_timeout, vector.call_timeout) takes worker processes; use backend process"
)
Factory = Callable[[], gym.Env[Any, Any]]


class SerialVectorEnv(VectorEnv):
    def __init__(
        self, factory: Factory, num: int, layout: EnvSpec | None = None, faults: FailurePolicy | None = None
    ) -> None:
        self.factory, self.faults = factory, faults or FailurePolicy()
        if self.faults.limited:
            raise UserError(LIMITS_NEED_PROCESSES)
        name = name_of(factory)
        layout = layout or layout_of(factory)
        self.logged_info_keys, self.max_episode_steps = layout.logged_info_keys, layout.max_episode_steps
        super().__init__(name, layout.spaces, num, "serial", 1)
        self.arrays = allocate(layout.spaces, num)
        self.slots = SubEnvGroup([factory] * num, layout, self.arrays, 0, name, replace=self.faults.replace)
        self.metadata["render_fps"] = layout.render_fps
        self.closed = False
        self._sent: list[int] = []
        self._ended: dict[int, Numbers] = {}

    def reset(self, *, seed: int | None = None, options: State | None = None) -> tuple[Tree, Info]:
        try:
            self.slots.reset(self._seeds(seed), options)
        except EnvCrashError as crash:
            self._keep(crash, self.factory)
            raise
        self._sent, self._ended = [], {}
        return shown(self.arrays)

    def step(self, actions: Array) -> Result:
        self.arrays.action[...] = actions
        return result(self.arrays, self._step())

    def _step(self, rows: list[int] | None = None) -> dict[int, Numbers]:
        try:
            ended = self.slots.step(rows)
        except EnvCrashError as crash:
            self._keep(crash, self.factory)
            raise
        for survived in self.slots.crashes:
            self._keep(survived, self.factory)
            self.num_env_restarts += 1
        self.slots.crashes.clear()
        return ended

    def send(self, actions: Array, ids: Array) -> None:
        self.arrays.action[ids] = actions
        rows = as_ids(ids).tolist()
        self._ended.update(self._step(rows))
        self._sent += rows

    def recv(self, min_ready: int = 1) -> tuple[Array, Tree, Array, Array, Array, Info]:
        if len(self._sent) < min_ready:
            raise ValueError(f"recv waits for {min_ready} environments, but only {len(self._sent)} were sent actions")
        ids, ended = as_ids(self._sent), self._ended
        self._sent, self._ended = [], {}
        return partial_result(self.arrays, ended, ids)

    def state_dict(self) -> State:
        return {"kind": "slots", "name": self.name, "num": self.num_envs, "envs": self.slots.state()}

    def load_state_dict(self, state: State) -> tuple[Tree, Info]:
        self._check_state(state, "slots")
        self.inexact = self.slots.load(state["envs"])
        self.num_env_restarts = sum(slot.replaced for slot in self.slots.slots)
        return shown(self.arrays)

    def render(self, index: int = 0) -> np.ndarray[Any, Any]:  # type: ignore[override]
        return self.slots.render(index)

    def goal_functions(self) -> list[str]:
        return self.slots.goal_functions()

    def compute(self, name: str, achieved: Array, desired: Array, info: State) -> Array:
        """Call a goal function of the first environment; `info` must be empty."""
        return self.slots.compute(name, achieved, desired)

    def close_extras(self) -> None:
        self.slots.close()


def name_of(factory: Factory) -> str:
    return str(getattr(factory, "name", None) or getattr(factory, "__qualname__", factory))


def layout_of(factory: Factory) -> EnvSpec:
    """Found on a copy that is thrown away, so that the environments in use begin untouched in every back end."""
    env = factory()
    try:
        return describe(env, name_of(factory))
    finally:
        env.close()

"""The back end `envpool`: tasks that EnvPool has written in C++ under Gymnasium's names, all copies in one call."""

from __future__ import annotations

import traceback
from functools import partial
from typing import Any

import numpy as np
from gymnasium.spaces import Box, Discrete

from zhixing.core.spaces import Spaces
from zhixing.core.tree import Field, Tree
from zhixing.envs.vector.base import Info, LockstepVectorEnv, Result
from zhixing.envs.vector.resumable_pool import ResumablePool
from zhixing.envs.vector.step_buffers import Array
from zhixing.envs.vector.sub_env import State
from zhixing.errors import EnvCrashError, UserError
from zhixing.utils.extras import require_extra


class EnvPoolVectorEnv(LockstepVectorEnv):
    """Its tasks are programs of their own: near to Gymnasium's in what they do, not the same to the last digit."""

    def __init__(self, name: str, num: int, spaces: Spaces, options: State) -> None:
        with require_extra(f"vector.backend=envpool ({name})", "envpool"):
            import envpool
        field = spaces.fields()["obs"]
        if name not in envpool.list_all_envs() or not isinstance(field, Field):
            raise UserError(f"EnvPool has no task {name} under Gymnasium's name; use another vector.backend")
        try:
            spec = envpool.make_spec(name, **options)
        except TypeError:
            raise UserError(
                f"{name} in EnvPool has other options than {', '.join(sorted(options))}; use another vector.backend"
            ) from None
        _check_same(name, spaces, spec.gymnasium_observation_space, spec.gymnasium_action_space)
        self._dtype = spec.gymnasium_action_space.dtype
        make = partial(envpool.make_gymnasium, name, **options)
        self.pool = ResumablePool(make, num, np.zeros((num, *field.shape), field.dtype))
        super().__init__(name, spaces, num, "envpool", 1)
        self.closed = False

    def reset(self, *, seed: int | None = None, options: State | None = None) -> tuple[Tree, Info]:
        if options:
            raise UserError(f"{self.name} in EnvPool takes no options at a reset; use backend serial or process")
        return self.pool.reset(self._seeds(seed)[0]), {}

    def step(self, actions: Array) -> Result:
        try:
            return self.pool.step(np.asarray(actions, self._dtype))
        except Exception as error:
            raise EnvCrashError(f"environments {self.name} of EnvPool crashed:\n{traceback.format_exc()}") from error

    def state_dict(self) -> State:
        return {"kind": "envpool", "name": self.name, "num_envs": self.num_envs, "env_state": self.pool.state_dict()}

    def load_state_dict(self, state: State) -> tuple[Tree, Info]:
        self._check_state(state, "envpool")
        self.inexact = self.pool.load_state_dict(state["env_state"])
        return self.pool.obs, {}

    def render(self, index: int = 0) -> Array:  # type: ignore[override]
        raise UserError(f"{self.name} in EnvPool gives no picture; use backend serial or process")

    def close_extras(self, **kwargs: Any) -> None:
        self.pool.close()


def _check_same(name: str, spaces: Spaces, obs: Any, action: Any) -> None:
    """Another task under the same name would be learned without a word."""

    def look(space: Any) -> tuple[Any, ...]:
        if isinstance(space, Box):
            bounds = [np.nan_to_num(bound.astype(np.float32)).tolist() for bound in (space.low, space.high)]
            return "Box", space.shape, bounds
        return ("Discrete", int(space.n)) if isinstance(space, Discrete) else (type(space).__name__,)

    for what, here, there in (("observations", spaces.obs, obs), ("actions", spaces.action, action)):
        if look(here)[:2] != look(there)[:2] or (what == "actions" and look(here) != look(there)):
            raise UserError(
                f"EnvPool's {name} has other {what}, {there}, than Gymnasium's, {here}; use another backend"
            )

"""The back end `envpool`: EnvPool's C++ versions of Gymnasium environments, all stepped in one call."""

from __future__ import annotations

import traceback
from functools import partial
from typing import Any

import gymnasium as gym
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
    """EnvPool reimplements the environments: they behave like Gymnasium's, but not identically to the last digit."""

    def __init__(self, name: str, num_envs: int, spaces: Spaces, options: State) -> None:
        with require_extra(f"vector.backend=envpool ({name})", "envpool"):
            import envpool
        field, options = spaces.fields()["obs"], dict(options)
        repeat = options.pop("action_repeat", 1)
        if options.get("max_episode_steps") not in (None, -1):
            options["max_episode_steps"] *= repeat  # EnvPool counts steps, the option counts actions
        if name not in envpool.list_all_envs() or not isinstance(field, Field):
            raise UserError(f"EnvPool has no environment {name}; use another vector.backend")
        try:
            spec = envpool.make_spec(name, **options)
        except TypeError:
            raise UserError(
                f"EnvPool's {name} doesn't accept the options {', '.join(sorted(options))}; use another vector.backend"
            ) from None
        _check_spaces(name, spaces, spec.gymnasium_observation_space, spec.gymnasium_action_space)
        self._dtype = spec.gymnasium_action_space.dtype
        make = partial(envpool.make_gymnasium, name, **options)
        self.pool = ResumablePool(make, num_envs, np.zeros((num_envs, *field.shape), field.dtype), repeat)
        super().__init__(name, spaces, num_envs, "envpool", 1)
        self.closed = False

    def reset(self, *, seed: int | None = None, options: State | None = None) -> tuple[Tree, Info]:
        if options:
            raise UserError(f"EnvPool's {self.name} takes no reset options; use vector.backend=serial or process")
        return self.pool.reset(self._seeds(seed)[0]), {}

    def step(self, actions: Array) -> Result:
        try:
            return self.pool.step(np.asarray(actions, self._dtype))
        except Exception as error:
            raise EnvCrashError(f"EnvPool environments {self.name} crashed:\n{traceback.format_exc()}") from error

    def state_dict(self) -> State:
        state = self.pool.state_dict()
        return {"kind": "envpool", "name": self.name, "num_envs": self.num_envs, "env_state": state}

    def load_state_dict(self, state: State) -> tuple[Tree, Info]:
        self._check_state(state, "envpool")
        self.inexact = self.pool.load_state_dict(state["env_state"])
        return self.pool.obs, {}

    def render(self, index: int = 0) -> Array:  # type: ignore[override]
        raise UserError(f"EnvPool's {self.name} can't render; use vector.backend=serial or process")

    def close_extras(self, **kwargs: Any) -> None:
        self.pool.close()


def _check_spaces(name: str, spaces: Spaces, obs: gym.Space[Any], action: gym.Space[Any]) -> None:
    """Raise `UserError` if EnvPool's environment has other spaces than Gymnasium's of the same name.

    Bounds are compared for actions only.
    """
    for what, expected, actual, num_facts in (
        ("observation", spaces.obs, obs, 2),
        ("action", spaces.action, action, 3),
    ):
        if _space_facts(expected)[:num_facts] != _space_facts(actual)[:num_facts]:
            raise UserError(
                f"EnvPool's {name} has the {what} space {actual}, Gymnasium's has {expected}; "
                f"use another vector.backend"
            )


def _space_facts(space: gym.Space[Any]) -> tuple[Any, ...]:
    """Return type, shape and bounds of a space."""
    if isinstance(space, Box):
        bounds = [np.nan_to_num(bound.astype(np.float32)).tolist() for bound in (space.low, space.high)]
        return "Box", space.shape, bounds
    return ("Discrete", int(space.n)) if isinstance(space, Discrete) else (type(space).__name__,)

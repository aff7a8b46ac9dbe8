"""Stack the last observations: the option `stack`, which every environment accepts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import gymnasium as gym
from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker, TimeLimit

from zhixing.core.stack import ObsStack
from zhixing.core.tree import Tree
from zhixing.envs.api import MisbehaviorError
from zhixing.envs.wrappers.stateful import Info, StatefulWrapper, copy_arrays
from zhixing.envs.wrappers.time_limit import StatefulTimeLimit
from zhixing.errors import UserError

OPTION = "stack"
TRANSPARENT = (StatefulTimeLimit, TimeLimit, OrderEnforcing, PassiveEnvChecker)  # wrappers that change no observation


class FrameStack(StatefulWrapper):
    """Returns the last `num_frames` observations as one; see `zhixing.core.stack` for the form.

    An episode starts with its first observation repeated. Parts of Dict observations named in `unstacked` stay single.
    """

    saved_attributes = ("frames",)

    def __init__(self, env: gym.Env[Any, Any], num_frames: int, unstacked: Collection[str] = ()) -> None:
        super().__init__(env)
        num_agents = int(getattr(env.unwrapped, "num_agents", 1))
        self.obs_stack = ObsStack(env.observation_space, num_frames, (num_agents,) * (num_agents > 1), unstacked)
        self.observation_space = self.obs_stack.space
        self.frames: Tree = ()

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[Any, Info]:
        obs, info = self.env.reset(seed=seed, options=options)
        self.frames = self._checked(self.obs_stack.start, obs)
        return copy_arrays(self.frames), info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, Info]:
        obs, reward, terminated, truncated, info = self.env.step(action)
        self.frames = self._checked(self.obs_stack.push, self.frames, obs)
        return copy_arrays(self.frames), reward, terminated, truncated, info

    def _checked(self, make_stack: Callable[..., Tree], *arguments: Tree) -> Tree:
        try:
            return make_stack(*arguments)
        except ValueError as error:
            raise MisbehaviorError(str(error)) from None


def check_stack(name: str, options: Mapping[str, Any]) -> None:
    """Raise `UserError` if the option is given and isn't a number of frames."""
    stack = options.get(OPTION, 1)
    if not isinstance(stack, int) or isinstance(stack, bool) or stack < 1:
        raise UserError(f"{name}: env.{OPTION}={stack!r}: must be an integer of at least 1; 1 disables stacking")


def stack_frames(env: gym.Env[Any, Any], stack: int, unstacked: Collection[str] = ()) -> gym.Env[Any, Any]:
    return FrameStack(env, stack, unstacked) if stack > 1 else env


def stack_of(env: gym.Env[Any, Any]) -> int:
    """Return the number of frames in each observation, or 1 if another wrapper might change the stacks."""
    while isinstance(env, TRANSPARENT):
        env = env.env
    return env.obs_stack.num if isinstance(env, FrameStack) else 1

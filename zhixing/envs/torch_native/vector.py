"""The back end `torch`: all copies of a task in a few tensors, on the device where the learner is."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from gymnasium.spaces import Box
from torch import Tensor

from zhixing.core.spaces import Spaces
from zhixing.core.tree import Tree
from zhixing.envs.env_spec import INFO_KEYS
from zhixing.envs.torch_native.acrobot import Acrobot
from zhixing.envs.torch_native.cartpole import CartPole
from zhixing.envs.torch_native.env import TorchEnv
from zhixing.envs.torch_native.mountain_car import MountainCar, MountainCarContinuous
from zhixing.envs.torch_native.pendulum import Pendulum
from zhixing.envs.torch_native.skirmish import SKIRMISHES
from zhixing.envs.vector.base import Info, LockstepVectorEnv, Result
from zhixing.envs.vector.step_buffers import Array
from zhixing.envs.vector.sub_env import State
from zhixing.errors import EnvCrashError, UserError

TORCH: dict[str, type[TorchEnv]] = {
    "Acrobot-v1": Acrobot,
    "CartPole-v1": CartPole,
    "MountainCar-v0": MountainCar,
    "MountainCarContinuous-v0": MountainCarContinuous,
    "Pendulum-v1": Pendulum,
    **SKIRMISHES,
}
Shown = dict[str, Tensor]  # by fields of a step: obs, and mask, state, alive where the task has them


class Step(NamedTuple):
    """What a step of all copies gives, as tensors that no later step changes."""

    shown: Shown  # where an episode ended, what the next one shows first
    last: Shown  # the same before any copy began anew: what the actions really led to
    reward: Tensor
    terminated: Tensor
    truncated: Tensor
    ended: Tensor  # either
    numbers: dict[str, Tensor]  # what the task tells of those that ended; of the others they mean nothing


class TorchVectorEnv(LockstepVectorEnv):
    """`begin` and `advance` keep everything on the device and never wait for it; `reset` and `step` are the same for
    those who speak NumPy. Each step draws a new start for every copy, whether its episode ended or not."""

    def __init__(self, name: str, num: int, spaces: Spaces, options: State, device: torch.device | str = "cpu") -> None:
        if name not in TORCH:
            raise UserError(f"{name} has no version in torch ({', '.join(TORCH)} have); use another vector.backend")
        given = dict(options)
        limit = given.pop("max_episode_steps", None)
        refused = sorted(set(given) - TORCH[name].options)
        if refused:
            raise UserError(f"{name} in torch has no option {', '.join(refused)}; use another vector.backend")
        make: Callable[..., TorchEnv] = TORCH[name]
        self.device = torch.device(device)
        self.task = make(**given).to(self.device)
        self.logged_info_keys = self.task.logged_info_keys
        limit = self.task.limit if limit is None else int(limit)
        self.limit = limit if limit >= 0 else torch.iinfo(torch.int32).max  # gymnasium.make's way to say without
        self.max_episode_steps = limit if limit >= 0 else None
        super().__init__(name, spaces, num, "torch", 1)
        self.rng = torch.Generator(self.device)
        self.rng.seed()
        self._state = torch.empty(0)
        self._elapsed = torch.zeros(num, dtype=torch.int32, device=self.device)
        action = spaces.action
        if isinstance(action, Box):
            self._low, high = (torch.as_tensor(bound, device=self.device) for bound in (action.low, action.high))
            self._half = 0.5 * (high - self._low)

    # --- on the device ---

    def begin(self, seed: int | None = None) -> Shown:
        """New episodes everywhere; what they show."""
        first = self._seeds(seed)[0]
        if first is not None:
            self.rng.manual_seed(first)
        self._state = self.task.first(self.num_envs, self.rng)
        self._elapsed = torch.zeros_like(self._elapsed)
        return self.shown()

    def advance(self, action: Tensor) -> Step:
        """One step of every copy; actions as the task takes them."""
        state, reward, terminated = self.task.move(self._state, action)
        elapsed = self._elapsed + 1
        truncated = elapsed >= self.limit
        if self.task.ends_once:
            truncated = truncated & ~terminated
        ended = terminated | truncated
        self._elapsed = elapsed.masked_fill(ended, 0)
        self._state = torch.where(ended, self.task.first(self.num_envs, self.rng), state)
        last, numbers = self.task.observe(state), self.task.numbers(state)
        return Step(self.shown(), last, reward, terminated, truncated, ended, numbers)

    def to_task(self, action: Tensor) -> Tensor:
        """`Spaces.to_env` on the device: bounded actions are in [-1, 1] in policies."""
        if self.spaces.discrete:
            return action
        return self._low + (action.clamp(-1.0, 1.0) + 1.0) * self._half

    # --- in NumPy ---

    def reset(self, *, seed: int | None = None, options: State | None = None) -> tuple[Tree, Info]:
        if options:
            raise UserError(f"{self.name} in torch takes no options at a reset; use backend serial or process")
        return _in_numpy(self.begin(seed))

    def step(self, actions: Array) -> Result:
        try:
            step = self.advance(torch.as_tensor(np.asarray(actions), device=self.device))
        except Exception as error:
            raise EnvCrashError(f"environments {self.name} in torch crashed:\n{traceback.format_exc()}") from error
        obs, info = _in_numpy(step.shown)
        ended = _array(step.ended)
        if ended.any():
            numbers = {name: values.tolist() for name, values in step.numbers.items()}
            info |= {f"final_{name}": _array(tensor) for name, tensor in step.last.items()}
            info["final_info"] = {
                i: {name: values[i] for name, values in numbers.items()} for i in ended.nonzero()[0].tolist()
            }
        return obs, _array(step.reward), _array(step.terminated), _array(step.truncated), info

    def state_dict(self) -> State:
        task = {"state": _array(self._state), "elapsed": _array(self._elapsed), "rng": self.rng.get_state().numpy()}
        return {"kind": "torch", "name": self.name, "num_envs": self.num_envs, "env_state": task}

    def load_state_dict(self, state: State) -> tuple[Tree, Info]:
        self._check_state(state, "torch")
        task = state["env_state"]
        self._state, self._elapsed = (torch.tensor(task[name], device=self.device) for name in ("state", "elapsed"))
        self.rng.set_state(torch.tensor(task["rng"]))
        return _in_numpy(self.shown())

    def shown(self) -> Shown:
        """What the copies show now."""
        return self.task.observe(self._state)

    def render(self, index: int = 0) -> Array:  # type: ignore[override]
        raise UserError(f"{self.name} in torch gives no picture; use backend serial or process")


def _in_numpy(shown: Shown) -> tuple[Tree, Info]:
    """Observations, and where `info` has the rest."""
    info = {INFO_KEYS[name]: _array(tensor) for name, tensor in shown.items() if name in INFO_KEYS}
    return _array(shown["obs"]), info


def _array(tensor: Tensor) -> Array:
    return tensor.contiguous().cpu().numpy()

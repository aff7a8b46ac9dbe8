"""The back end `torch`: all environments as a few tensors on the learner's device."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from gymnasium.spaces import Box
from torch import Tensor

from zhixing.core.spaces import Spaces
from zhixing.core.stack import frame_of, stack_spaces
from zhixing.core.tree import Field, Tree
from zhixing.envs.env_spec import INFO_KEYS
from zhixing.envs.options import construct_env
from zhixing.envs.torch_native.acrobot import Acrobot
from zhixing.envs.torch_native.cartpole import CartPole
from zhixing.envs.torch_native.env import TorchEnv
from zhixing.envs.torch_native.mountain_car import MountainCar, MountainCarContinuous
from zhixing.envs.torch_native.pendulum import Pendulum
from zhixing.envs.torch_native.skirmish import SKIRMISH_ENVS
from zhixing.envs.torch_native.task_checker import infer_spaces
from zhixing.envs.vector.base import Info, LockstepVectorEnv, Result
from zhixing.envs.vector.step_buffers import Array
from zhixing.envs.vector.sub_env import State
from zhixing.envs.wrappers import action_repeat, frame_stack
from zhixing.errors import EnvCrashError, UserError

TORCH_ENVS: dict[str, type[TorchEnv]] = {
    "Acrobot-v1": Acrobot,
    "CartPole-v1": CartPole,
    "MountainCar-v0": MountainCar,
    "MountainCarContinuous-v0": MountainCarContinuous,
    "Pendulum-v1": Pendulum,
    **SKIRMISH_ENVS,
}
ObsFields = dict[str, Tensor]  # obs and, where the environment has them, mask, state and alive


class TorchStep(NamedTuple):
    """Result of one step of all environments. Later steps don't change its tensors."""

    obs_fields: ObsFields  # after same-step autoreset: where an episode ended, the first of the next one
    final_obs_fields: ObsFields  # before autoreset: the true successors of the actions
    reward: Tensor
    terminated: Tensor
    truncated: Tensor
    ended: Tensor  # terminated or truncated
    info: dict[str, Tensor]  # meaningful only where an episode ended


class TorchVectorEnv(LockstepVectorEnv):
    """N environments as tensors on one device.

    `reset_tensors` and `step_tensors` never synchronize with the device. `reset` and `step` wrap them for NumPy. Every
    step samples an initial state for each environment, whether its episode ended or not.
    """

    def __init__(
        self,
        name: str,
        num: int,
        spaces: Spaces | None,
        options: State,
        device: torch.device | str = "cpu",
        task: type[TorchEnv] | None = None,
    ) -> None:
        """`spaces` are those of Gymnasium's environment of this name. A user's `task` has its own."""
        env_options = dict(options)
        limit = env_options.pop("max_episode_steps", None)
        frame_stack.check_stack(name, env_options)
        stack = env_options.pop("stack", 1)
        action_repeat.check_action_repeat(name, env_options)
        self._action_repeat = env_options.pop("action_repeat", 1)
        self.device = torch.device(device)
        if task is None:
            self.env = _make_built_in(name, env_options).to(self.device)
        else:
            env_options.pop("render_mode", None)
            self.env = construct_env(name, task, env_options).to(self.device)
            spaces = stack_spaces(infer_spaces(self.env, name, self.device), stack)
        assert spaces is not None
        self.logged_info_keys = self.env.logged_info_keys
        # the option counts actions, the environment's own limit steps; -1 means no limit, as in gymnasium.make
        limit = self.env.max_episode_steps if limit is None else int(limit) * self._action_repeat
        self.max_episode_steps = -(-limit // self._action_repeat) if limit >= 0 else None
        self._step_limit = limit if limit >= 0 else torch.iinfo(torch.int32).max
        super().__init__(name, spaces, num, "torch", 1)
        self.metadata["render_fps"] = 30.0
        self.rng = torch.Generator(self.device)
        self.rng.seed()
        self._state = torch.empty(0)
        self._frames = torch.empty(0)  # current stacks, if observations are stacked
        if spaces.stack > 1:
            field: Field = spaces.fields()["obs"]
            frame, axis = frame_of(field, spaces.stack, len(spaces.agents))
            self._stack_dim, self._frame_size = 1 + axis, frame.shape[axis]
        self._elapsed = torch.zeros(num, dtype=torch.int32, device=self.device)
        action = spaces.action
        if isinstance(action, Box):
            self._low, high = (torch.as_tensor(bound, device=self.device) for bound in (action.low, action.high))
            self._half_range = 0.5 * (high - self._low)

    # --- tensors on the device ---

    def reset_tensors(self, seed: int | None = None) -> ObsFields:
        """Start a new episode in every environment."""
        first = self._seeds(seed)[0]
        if first is not None:
            self.rng.manual_seed(first)
        self._state = self.env.initial_state(self.num_envs, self.rng)
        self._elapsed = torch.zeros_like(self._elapsed)
        obs_fields = self.env.observe(self._state)
        if self.spaces.stack > 1:
            self._frames = self._repeat_frame(obs_fields["obs"])
        return self._with_frames(obs_fields, self._frames)

    def step_tensors(self, action: Tensor) -> TorchStep:
        """Step every environment. Actions are in the environment's scale."""
        state, elapsed = self._state, self._elapsed
        state, elapsed, reward, terminated, truncated = self._transition(state, elapsed, action)
        for _ in range(self._action_repeat - 1):
            running = ~(terminated | truncated)
            next_state, next_elapsed, next_reward, *ends = self._transition(state, elapsed, action)
            state, elapsed = torch.where(running, next_state, state), torch.where(running, next_elapsed, elapsed)
            reward = reward + next_reward * running.view(-1, *[1] * (reward.ndim - 1))
            terminated, truncated = terminated | ends[0] & running, truncated | ends[1] & running
        ended = terminated | truncated
        self._elapsed = elapsed.masked_fill(ended, 0)
        self._state = torch.where(ended, self.env.initial_state(self.num_envs, self.rng), state)
        final_obs_fields, info = self.env.observe(state), self.env.info(state)
        obs_fields = self.env.observe(self._state)
        if self.spaces.stack > 1:
            kept = self._frames.narrow(self._stack_dim, self._frame_size, (self.spaces.stack - 1) * self._frame_size)
            final_frames = torch.cat([kept, final_obs_fields["obs"]], self._stack_dim)
            first_frames = self._repeat_frame(obs_fields["obs"])
            self._frames = torch.where(ended.view(-1, *[1] * (kept.ndim - 1)), first_frames, final_frames)
            final_obs_fields = self._with_frames(final_obs_fields, final_frames)
        obs_fields = self._with_frames(obs_fields, self._frames)
        return TorchStep(obs_fields, final_obs_fields, reward, terminated, truncated, ended, info)

    def _transition(self, state: Tensor, elapsed: Tensor, action: Tensor) -> tuple[Tensor, ...]:
        """Return the state, elapsed steps, reward, `terminated` and `truncated` after one step."""
        state, reward, terminated = self.env.transition(state, action)
        truncated = elapsed + 1 >= self._step_limit
        if self.env.terminated_excludes_truncated:
            truncated = truncated & ~terminated
        return state, elapsed + 1, reward, terminated, truncated

    def obs_fields(self) -> ObsFields:
        """Return the current observations."""
        return self._with_frames(self.env.observe(self._state), self._frames)

    def _repeat_frame(self, frame: Tensor) -> Tensor:
        """Return the stacks at the start of episodes."""
        return torch.cat([frame] * self.spaces.stack, self._stack_dim)

    def _with_frames(self, obs_fields: ObsFields, frames: Tensor) -> ObsFields:
        return {**obs_fields, "obs": frames} if self.spaces.stack > 1 else obs_fields

    def to_env_action(self, action: Tensor) -> Tensor:
        """Rescale actions like `Spaces.to_env`, on the device: policies bound continuous actions to [-1, 1]."""
        if self.spaces.discrete:
            return action
        return self._low + (action.clamp(-1.0, 1.0) + 1.0) * self._half_range

    # --- NumPy arrays ---

    def reset(self, *, seed: int | None = None, options: State | None = None) -> tuple[Tree, Info]:
        if options:
            raise UserError(f"{self.name} in torch accepts no reset options; use backend serial or process")
        return _to_numpy(self.reset_tensors(seed))

    def step(self, actions: Array) -> Result:
        try:
            step = self.step_tensors(torch.as_tensor(np.asarray(actions), device=self.device))
        except Exception as error:
            raise EnvCrashError(f"environments {self.name} in torch crashed:\n{traceback.format_exc()}") from error
        obs, info = _to_numpy(step.obs_fields)
        ended = _array(step.ended)
        if ended.any():
            final_info = {name: values.tolist() for name, values in step.info.items()}
            info |= {f"final_{name}": _array(tensor) for name, tensor in step.final_obs_fields.items()}
            info["final_info"] = {
                i: {name: values[i] for name, values in final_info.items()} for i in ended.nonzero()[0].tolist()
            }
        return obs, _array(step.reward), _array(step.terminated), _array(step.truncated), info

    def state_dict(self) -> State:
        env = {"state": _array(self._state), "elapsed": _array(self._elapsed), "rng": self.rng.get_state().numpy()}
        if self.spaces.stack > 1:
            env["frames"] = _array(self._frames)
        return {"kind": "torch", "name": self.name, "num_envs": self.num_envs, "env_state": env}

    def load_state_dict(self, state: State) -> tuple[Tree, Info]:
        self._check_state(state, "torch")
        env = state["env_state"]
        self._state, self._elapsed = (torch.tensor(env[name], device=self.device) for name in ("state", "elapsed"))
        if self.spaces.stack > 1:
            self._frames = torch.tensor(env["frames"], device=self.device)
        self.rng.set_state(torch.tensor(env["rng"]))
        return _to_numpy(self.obs_fields())

    def render(self, index: int = 0) -> Array:  # type: ignore[override]
        image = self.env.render(self._state[:, index]) if self._state.ndim == 2 else None  # None before the first reset
        if image is None:
            advice = "use backend serial or process" if self.name in TORCH_ENVS else "implement render(state)"
            raise UserError(f"{self.name} in torch can't render; {advice}")
        return np.asarray(image)


def _make_built_in(name: str, options: State) -> TorchEnv:
    if name not in TORCH_ENVS:
        raise UserError(f"{name} has no torch version (available: {', '.join(TORCH_ENVS)}); use another vector.backend")
    unknown = sorted(set(options) - TORCH_ENVS[name].options)
    if unknown:
        raise UserError(f"{name} in torch has no option {', '.join(unknown)}; use another vector.backend")
    make: Callable[..., TorchEnv] = TORCH_ENVS[name]
    return make(**options)


def _to_numpy(obs_fields: ObsFields) -> tuple[Tree, Info]:
    """Return observations, and the other fields under their keys in `info`."""
    info = {INFO_KEYS[name]: _array(tensor) for name, tensor in obs_fields.items() if name in INFO_KEYS}
    return _array(obs_fields["obs"]), info


def _array(tensor: Tensor) -> Array:
    return tensor.contiguous().cpu().numpy()

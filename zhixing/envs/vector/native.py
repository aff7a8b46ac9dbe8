"""Tasks with a vector version of their own: one call steps all environments. Their trajectories are their own, too."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any, ClassVar, Protocol

import numpy as np
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv

from zhixing.core.spaces import Spaces
from zhixing.core.tree import Tree
from zhixing.envs.adapters import atari, procgen_envs, smax
from zhixing.envs.adapters.mpe_spread import NativeSpread
from zhixing.envs.adapters.skirmish.native import NATIVE as SKIRMISHES
from zhixing.envs.vector.base import Info, LockstepVectorEnv, Result
from zhixing.envs.vector.step_buffers import Array
from zhixing.envs.vector.sub_env import ScalarInfo, State
from zhixing.errors import EnvCrashError, UserError


class NativeEnv(Protocol):
    """What a native task gives: `step` as `VectorEnv.step` describes it, with same-step autoreset.

    It is made with the number of environments and its options; `options` names those that it takes. It may have
    `logged_info_keys`, the names of numbers in `final_info` that are worth a log, `inexact`, the environments that
    `load_state_dict` could not put back into the middle of their episodes, and `exact = False` where it never can.
    """

    options: ClassVar[frozenset[str]]
    spaces: Spaces

    def reset(self, seed: int | None) -> tuple[Tree, Info]: ...
    def step(self, actions: Array) -> Result: ...
    def state_dict(self) -> State: ...
    def load_state_dict(self, state: State) -> tuple[Tree, Info]: ...
    def render(self, index: int) -> Array | None: ...
    def close(self) -> None: ...


class NativeCartPole:
    """Gymnasium's vector CartPole resets ended environments at the next step; here they are reset in the same one."""

    options: ClassVar[frozenset[str]] = frozenset({"max_episode_steps", "sutton_barto_reward", "render_mode"})

    def __init__(self, num: int, max_episode_steps: int = 500, **options: Any) -> None:
        if max_episode_steps < 0:  # gymnasium.make's way to say without limit
            max_episode_steps = np.iinfo(np.int32).max
        self.env = CartPoleVectorEnv(num, max_episode_steps, **options)
        self.spaces = Spaces(self.env.single_observation_space, self.env.single_action_space)
        self.bounds = np.array([[self.env.x_threshold], [self.env.theta_threshold_radians]])

    def reset(self, seed: int | None) -> tuple[Tree, Info]:
        return self.env.reset(seed=seed)

    def step(self, actions: Array) -> Result:
        env: Any = self.env
        # Gymnasium's own arithmetic, to the bit, without its checks and its reset at the next step: in half the time
        _, x_dot, theta, theta_dot = env.state
        force = np.where(actions == 1, env.force_mag, -env.force_mag)
        cos, sin = np.cos(theta), np.sin(theta)
        push = (force + env.polemass_length * np.square(theta_dot) * sin) / env.total_mass
        theta_acc = (env.gravity * sin - cos * push) / (
            env.length * (4.0 / 3.0 - env.masspole * np.square(cos) / env.total_mass)
        )
        x_acc = push - env.polemass_length * theta_acc * cos / env.total_mass
        env.state = env.state + env.tau * np.stack((x_dot, x_acc, theta_dot, theta_acc))
        out = np.abs(env.state[::2]) > self.bounds
        terminated = out[0] | out[1]
        env.steps += 1
        truncated = env.steps >= env.max_episode_steps
        reward = -terminated.astype(np.float32) if env._sutton_barto_reward else np.ones(len(terminated), np.float32)
        obs = env.state.T.astype(np.float32)
        ended = terminated | truncated
        info: Info = {}
        if ended.any():
            numbers: dict[int, ScalarInfo] = {index: {} for index in ended.nonzero()[0].tolist()}
            info = {"final_obs": obs.copy(), "final_info": numbers}
            first = env.np_random.uniform(env.low, env.high, (4, len(numbers)))
            env.state[:, ended] = first
            obs[ended] = first.T
            env.steps[ended] = 0
        return obs, reward, terminated, truncated, info

    def state_dict(self) -> State:
        env = self.env
        if env.state is None:
            raise RuntimeError("reset the environments before asking for their state")
        return {
            "state": env.state.copy(),
            "steps": env.steps.copy(),
            "rng": dict(env.np_random.bit_generator.state),
            "bounds": [float(env.low), float(env.high)],
        }

    def load_state_dict(self, state: State) -> tuple[Tree, Info]:
        env: Any = self.env
        env.state, env.steps = state["state"].copy(), state["steps"].copy()
        env.low, env.high = state["bounds"]
        env.np_random.bit_generator.state = state["rng"]
        return env.state.T.astype(np.float32), {}

    def render(self, index: int) -> Array | None:
        env: Any = self.env
        return None if env.render_mode is None else env.render()[index]

    def close(self) -> None:
        self.env.close()


NATIVE: dict[str, type[NativeEnv]] = {
    "CartPole-v1": NativeCartPole,
    "mpe/simple_spread": NativeSpread,
    **SKIRMISHES,
    **atari.NATIVE,
    **procgen_envs.NATIVE,
    **smax.NATIVE,
}


def has_native(name: str, options: State) -> bool:
    return name in NATIVE and NATIVE[name].options.issuperset(options)


def auto_uses_native(name: str, options: State) -> bool:
    """Only those whose episodes can be resumed in the middle are taken without being asked for."""
    return has_native(name, options) and getattr(NATIVE[name], "exact", True)


class NativeVectorEnv(LockstepVectorEnv):
    def __init__(self, name: str, num: int, options: State) -> None:
        if name not in NATIVE:
            families = sorted({f"{known.split('/')[0]}/..." if "/" in known else known for known in NATIVE})
            raise UserError(f"{name} has no native version ({', '.join(families)} have); use backend serial or process")
        if not has_native(name, options):
            refused = sorted(set(options) - NATIVE[name].options)
            raise UserError(f"native {name} has no option {', '.join(refused)}; use backend serial or process")
        make: Callable[..., NativeEnv] = NATIVE[name]
        self.task = make(num, **options)
        self.logged_info_keys = getattr(self.task, "logged_info_keys", ())
        super().__init__(name, self.task.spaces, num, "native", 1)
        self.closed = False

    def reset(self, *, seed: int | None = None, options: State | None = None) -> tuple[Tree, Info]:
        if options:
            raise UserError(f"native {self.name} takes no options at a reset; use backend serial or process")
        return self.task.reset(self._seeds(seed)[0])

    def step(self, actions: Array) -> Result:
        try:
            return self.task.step(np.asarray(actions))
        except Exception as error:
            raise EnvCrashError(f"native environments {self.name} crashed:\n{traceback.format_exc()}") from error

    def state_dict(self) -> State:
        return {"kind": "native", "name": self.name, "num_envs": self.num_envs, "env_state": self.task.state_dict()}

    def load_state_dict(self, state: State) -> tuple[Tree, Info]:
        self._check_state(state, "native")
        shown = self.task.load_state_dict(state["env_state"])
        self.inexact = list(getattr(self.task, "inexact", ()))
        return shown

    def render(self, index: int = 0) -> Array:  # type: ignore[override]
        frame = self.task.render(index)
        if frame is None:
            raise UserError(f"{self.name} gives no picture; make it with render_mode='rgb_array'")
        return frame

    def close_extras(self) -> None:
        self.task.close()

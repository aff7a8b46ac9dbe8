"""The back end `native`: vectorized versions of some environments, where one call steps all of them.

Their random streams, and so their trajectories, differ from those of the other back ends.
"""

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
    """A vectorized environment with same-step autoreset; `step` returns results as `VectorEnv.step` does.

    The constructor takes the number of environments and the options named in `options`. Optional attributes:
    `logged_info_keys` names the numbers in `final_info` to log, `inexact` lists the environments that `load_state_dict`
    couldn't restore in mid-episode, and `exact = False` means that it never can.
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
    """Gymnasium's vector CartPole with same-step autoreset instead of a reset in the next step."""

    options: ClassVar[frozenset[str]] = frozenset({"max_episode_steps", "sutton_barto_reward", "render_mode"})

    def __init__(self, num_envs: int, max_episode_steps: int = 500, **options: Any) -> None:
        if max_episode_steps < 0:  # means no limit, as in gymnasium.make
            max_episode_steps = np.iinfo(np.int32).max
        self.env = CartPoleVectorEnv(num_envs, max_episode_steps, **options)
        self.spaces = Spaces(self.env.single_observation_space, self.env.single_action_space)
        self.bounds = np.array([[self.env.x_threshold], [self.env.theta_threshold_radians]])

    def reset(self, seed: int | None) -> tuple[Tree, Info]:
        return self.env.reset(seed=seed)

    def step(self, actions: Array) -> Result:
        env: Any = self.env
        # bit for bit Gymnasium's arithmetic, but without its checks: takes half the time
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
            final_info: dict[int, ScalarInfo] = {index: {} for index in ended.nonzero()[0].tolist()}
            info = {"final_obs": obs.copy(), "final_info": final_info}
            start = env.np_random.uniform(env.low, env.high, (4, len(final_info)))
            env.state[:, ended] = start
            obs[ended] = start.T
            env.steps[ended] = 0
        return obs, reward, terminated, truncated, info

    def state_dict(self) -> State:
        env = self.env
        if env.state is None:
            raise RuntimeError("reset the environments before you save their state")
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
    """Return whether the back end `auto` uses the native version: only if it can be restored in mid-episode."""
    return has_native(name, options) and getattr(NATIVE[name], "exact", True)


class NativeVectorEnv(LockstepVectorEnv):
    def __init__(self, name: str, num_envs: int, options: State) -> None:
        if name not in NATIVE:
            families = sorted({f"{known.split('/')[0]}/..." if "/" in known else known for known in NATIVE})
            raise UserError(
                f"{name} has no native version ({', '.join(families)} have); use vector.backend=serial or process"
            )
        if not has_native(name, options):
            unsupported = sorted(set(options) - NATIVE[name].options)
            raise UserError(
                f"native {name} has no option {', '.join(unsupported)}; use vector.backend=serial or process"
            )
        make: Callable[..., NativeEnv] = NATIVE[name]
        self.native_env = make(num_envs, **options)
        self.logged_info_keys = getattr(self.native_env, "logged_info_keys", ())
        super().__init__(name, self.native_env.spaces, num_envs, "native", 1)
        self.closed = False

    def reset(self, *, seed: int | None = None, options: State | None = None) -> tuple[Tree, Info]:
        if options:
            raise UserError(f"native {self.name} takes no reset options; use vector.backend=serial or process")
        return self.native_env.reset(self._seeds(seed)[0])

    def step(self, actions: Array) -> Result:
        try:
            return self.native_env.step(np.asarray(actions))
        except Exception as error:
            raise EnvCrashError(f"native environments {self.name} crashed:\n{traceback.format_exc()}") from error

    def state_dict(self) -> State:
        state = self.native_env.state_dict()
        return {"kind": "native", "name": self.name, "num_envs": self.num_envs, "env_state": state}

    def load_state_dict(self, state: State) -> tuple[Tree, Info]:
        self._check_state(state, "native")
        result = self.native_env.load_state_dict(state["env_state"])
        self.inexact = list(getattr(self.native_env, "inexact", ()))
        return result

    def render(self, index: int = 0) -> Array:  # type: ignore[override]
        frame = self.native_env.render(index)
        if frame is None:
            raise UserError(f"{self.name} renders no image; make it with render_mode='rgb_array'")
        return frame

    def close_extras(self) -> None:
        self.native_env.close()

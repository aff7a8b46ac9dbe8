"""The interface of vector environments: Gymnasium's, with same-step autoreset, asynchronous steps and saved states."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space

from zhixing.core.spaces import Spaces
from zhixing.core.tree import Tree, tree_map
from zhixing.envs.crash.failure_policy import FailurePolicy, save_crash_report
from zhixing.envs.env_spec import INFO_KEYS
from zhixing.envs.info_fields import OPTION
from zhixing.envs.vector.step_buffers import Array, StepBuffers
from zhixing.envs.vector.sub_env import ScalarInfo, State, sub_env_seed
from zhixing.errors import EnvCrashError, UserError

Info = dict[str, Any]
Result = tuple[Tree, Array, Array, Array, Info]  # obs, reward, terminated, truncated, info


class VectorEnv(gym.vector.VectorEnv[Any, Any, Any], ABC):
    """N environments with same-step autoreset. All back ends implement this interface.

    Returned arrays are live: they stay valid until the next call that steps or resets their rows.

    When an episode ends, `obs` is already the first observation of the next one. Then `info` has `final_obs` (like
    `obs`, with the true last observation in the rows that ended) and `final_info` ({index: numbers of the last info}).
    `info` also has the extras of the environment, if any: `action_mask` [N, n], `state` [N, S], `alive` [N, A]. Their
    last values are in `final_mask`, `final_state` and `final_alive`.

    The values of `info` that are fields are in `info["info_fields"]`, as arrays [N, ...]. Where a step ended an
    episode, they are still those of this step.

    With several agents, observations are [N, A, ...], actions [N, A] or [N, A, k], rewards [N, A], masks [N, A, n].
    Actions of Dict and Tuple spaces are dicts and tuples of such arrays.

    If an environment fails and `failure_policy` replaces it, its episode is truncated at the last valid observation,
    with reward 0 and the key `INTERRUPTED` in `final_info`.
    """

    logged_info_keys: tuple[str, ...] = ()  # numbers in `final_info` to log
    max_episode_steps: int | None = None  # time limit, if known
    failure_policy = FailurePolicy()
    num_env_restarts = 0  # how many failed environments were replaced
    env_fn: Any = None  # makes one environment, in back ends that step environments one by one

    closed = True  # nothing to close until a constructor sets it to False

    def __init__(self, name: str, spaces: Spaces, num_envs: int, backend: str, workers: int) -> None:
        if num_envs < 1:
            raise UserError(f"num_envs is {num_envs}; it must be at least 1")
        self.name, self.spaces, self.num_envs = name, spaces, num_envs
        self.backend, self.workers = backend, workers
        self.metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}
        self.single_observation_space, self.single_action_space = spaces.obs, spaces.action
        self.observation_space = batch_space(spaces.obs, num_envs)
        self.action_space = batch_space(spaces.action, num_envs)
        # environments that the last `load_state_dict` couldn't restore exactly: they started a new episode
        self.inexact: list[int] = []

    @abstractmethod
    def reset(self, *, seed: int | None = None, options: State | None = None) -> tuple[Tree, Info]: ...

    @abstractmethod
    def step(self, actions: Array) -> Result: ...

    @abstractmethod
    def send(self, actions: Array, ids: Array) -> None:
        """Start a step of these environments. `ids` are those of one or more results of `recv`."""

    @abstractmethod
    def recv(self, min_ready: int = 1) -> tuple[Array, Tree, Array, Array, Array, Info]:
        """Wait for at least `min_ready` environments. Return their ids, then results as from `step`.

        Rows and the indices in `final_info` are positions in `ids`.
        """

    @abstractmethod
    def state_dict(self) -> State:
        """Return the state of all environments in mid-episode, as plain values and arrays."""

    @abstractmethod
    def load_state_dict(self, state: State) -> tuple[Tree, Info]:
        """Restore all environments and return their observations as `reset` does.

        Environments that can't be restored exactly start a new episode and are listed in `inexact`.
        """

    @abstractmethod
    def render(self, index: int = 0) -> Array:  # type: ignore[override]
        """Return an image of one environment."""

    def _save_crash_report(self, crash: EnvCrashError) -> None:
        env = {"name": self.name, "options": dict(getattr(self.env_fn, "options", {}))}
        save_crash_report(crash, self.failure_policy, env=env, backend=self.backend)

    def __del__(self) -> None:
        if not self.closed:
            self.close()

    def _seeds(self, seed: int | None) -> list[int | None]:
        """Return the seed of each environment."""
        if seed is None:
            return [None] * self.num_envs
        if seed < 0:
            raise UserError(f"seed is {seed}; it must not be negative")
        return [sub_env_seed(seed, index) for index in range(self.num_envs)]

    def _check_state(self, state: State, kind: str) -> None:
        """Raise `UserError` if `state` is from another environment. `kind` is the format of the state."""
        for what, expected, saved in (
            ("environment", self.name, state["name"]),
            ("num_envs", self.num_envs, state["num_envs"]),
            ("kind of state", kind, state["kind"]),
        ):
            if expected != saved:
                raise UserError(f"the saved state has {what} {saved}; this vector environment has {what} {expected}")


class LockstepVectorEnv(VectorEnv):
    """Base of back ends that step all environments in one call. `send` steps at once and needs all of them."""

    _sent: Result | None = None

    def send(self, actions: Array, ids: Array) -> None:
        if len(ids) != self.num_envs:
            raise ValueError(f"{self.backend} environments step together: send all {self.num_envs}, not {len(ids)}")
        order = np.argsort(ids)
        self._sent = self.step(tree_map(lambda leaf: leaf[order], actions))

    def recv(self, min_ready: int = 1) -> tuple[Array, Tree, Array, Array, Array, Info]:
        if self._sent is None:
            raise ValueError(f"recv needs {min_ready} environments, but no actions were sent; call send first")
        sent, self._sent = self._sent, None
        return np.arange(self.num_envs), *sent


def reset_result(buffers: StepBuffers) -> tuple[Tree, Info]:
    """Return the result of `VectorEnv.reset`."""
    return buffers.obs, {INFO_KEYS[name]: array for name, array in buffers.extras.items()}


def step_result(buffers: StepBuffers, ended: dict[int, ScalarInfo]) -> Result:
    """Return the result of `VectorEnv.step`. `ended` maps the indices of ended episodes to their last info."""
    obs, info = reset_result(buffers)
    if buffers.info:
        info[OPTION] = buffers.info
    if ended:
        info["final_obs"], info["final_info"] = buffers.final_obs, ended
        info.update({f"final_{name}": array for name, array in buffers.final_extras.items()})
    return obs, buffers.reward, buffers.terminated, buffers.truncated, info


def recv_result(
    buffers: StepBuffers, ended: dict[int, ScalarInfo], ids: Array
) -> tuple[Array, Tree, Array, Array, Array, Info]:
    """Return the result of `VectorEnv.recv` for sorted `ids`, without copies if they are consecutive."""
    consecutive = len(ids) == ids[-1] - ids[0] + 1
    rows = buffers.rows(slice(ids[0], ids[-1] + 1) if consecutive else ids)
    positions = {int(index): position for position, index in enumerate(ids)}
    return ids, *step_result(rows, {positions[index]: final_info for index, final_info in ended.items()})


def sorted_ids(ids: Any) -> Array:
    return np.sort(np.asarray(ids, np.int64))

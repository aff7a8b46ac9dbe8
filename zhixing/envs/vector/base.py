"""N copies of a task behind Gymnasium's vector interface, with same-step autoreset."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space

from zhixing.core.spaces import Spaces
from zhixing.core.tree import Tree
from zhixing.envs.crash.failure_policy import FailurePolicy, save_crash_report
from zhixing.envs.env_spec import INFO_KEYS
from zhixing.envs.vector.step_buffers import Array, StepBuffers
from zhixing.envs.vector.sub_env import ScalarInfo, State, sub_env_seed
from zhixing.errors import EnvCrashError, UserError

Info = dict[str, Any]
Result = tuple[Tree, Array, Array, Array, Info]  # obs, reward, terminated, truncated, info


class VectorEnv(gym.vector.VectorEnv[Any, Any, Any], ABC):
    """What every back end gives. Returned arrays are live: valid until the next call that steps or resets their rows.

    Where an episode ended, `obs` is already the first observation of the next one. Then `info` has `final_obs` (like
    `obs`; the rows that ended hold the true last observation) and `final_info` ({index: numbers of the last info}).
    What a task shows beside observations is in `info` always: `action_mask` [N, n], `state` [N, S], `alive` [N, A];
    and beside `final_obs` as `final_mask`, `final_state`, `final_alive`.

    Of many agents, observations are [N, A, ...], actions [N, A] or [N, A, k], rewards [N, A], masks [N, A, n].
    `logged_info_keys` names the numbers in `final_info` to log. `max_episode_steps` is the time limit, if known.

    `faults` says what is done when an environment fails. One that is replaced shows its episode as truncated, with the
    last observation that was right, no reward, and `INTERRUPTED` in its `final_info`; `num_env_restarts` counts them.
    """

    logged_info_keys: tuple[str, ...] = ()
    max_episode_steps: int | None = None
    failure_policy = FailurePolicy()
    num_env_restarts = 0

    closed = True  # until there is something to close: a constructor may fail half way

    def __init__(self, name: str, spaces: Spaces, num: int, backend: str, workers: int) -> None:
        if num < 1:
            raise UserError(f"the number of environments is {num}; it must be at least 1")
        self.name, self.spaces, self.num_envs = name, spaces, num
        self.backend, self.workers = backend, workers
        self.metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}
        self.single_observation_space, self.single_action_space = spaces.obs, spaces.action
        self.observation_space, self.action_space = batch_space(spaces.obs, num), batch_space(spaces.action, num)
        self.inexact: list[int] = []  # environments that the last load_state_dict had to begin anew

    @abstractmethod
    def reset(self, *, seed: int | None = None, options: State | None = None) -> tuple[Tree, Info]: ...

    @abstractmethod
    def step(self, actions: Array) -> Result: ...

    @abstractmethod
    def send(self, actions: Array, ids: Array) -> None:
        """Start a step of these environments. `ids` as `recv` gave them, or several of these together."""

    @abstractmethod
    def recv(self, min_ready: int = 1) -> tuple[Array, Tree, Array, Array, Array, Info]:
        """Results of at least `min_ready` environments: ids, then as `step`, rows and indices by position in ids."""

    @abstractmethod
    def state_dict(self) -> State:
        """Plain arrays, numbers, strings, lists and dicts: all environments in the middle of their episodes."""

    @abstractmethod
    def load_state_dict(self, state: State) -> tuple[Tree, Info]:
        """Put all environments where they were, return what they show. See `inexact` for those that can't."""

    @abstractmethod
    def render(self, index: int = 0) -> Array:  # type: ignore[override]
        """The picture of one environment."""

    def _save_crash_report(self, crash: EnvCrashError, factory: Any) -> None:
        """Write the capsule of a crash, where it goes anywhere."""
        task = {"name": self.name, "options": dict(getattr(factory, "options", {}))}
        save_crash_report(crash, self.failure_policy, env=task, backend=self.backend)

    def __del__(self) -> None:
        if not self.closed:
            self.close()

    def _seeds(self, seed: int | None) -> list[int | None]:
        if seed is None:
            return [None] * self.num_envs
        if seed < 0:
            raise UserError(f"seed {seed} must not be negative")
        return [sub_env_seed(seed, index) for index in range(self.num_envs)]

    def _check_state(self, state: State, kind: str) -> None:
        """`kind` is who wrote it: serial and process write the same, native tasks their own."""
        for what, here, saved in (
            ("task", self.name, state["name"]),
            ("number of environments", self.num_envs, state["num_envs"]),
            ("kind of state", kind, state["kind"]),
        ):
            if here != saved:
                raise UserError(f"the saved environments have the {what} {saved}, these have {here}")


class LockstepVectorEnv(VectorEnv):
    """Back ends whose copies step together: what is sent is done at once, and for all."""

    _sent: Result | None = None

    def send(self, actions: Array, ids: Array) -> None:
        if len(ids) != self.num_envs:
            raise ValueError(f"{self.backend} environments step together: send all {self.num_envs}, not {len(ids)}")
        ordered = np.empty_like(actions)
        ordered[ids] = actions
        self._sent = self.step(ordered)

    def recv(self, min_ready: int = 1) -> tuple[Array, Tree, Array, Array, Array, Info]:
        if self._sent is None:
            raise ValueError(f"recv waits for {min_ready} environments, but none were sent actions")
        sent, self._sent = self._sent, None
        return np.arange(self.num_envs), *sent


def reset_result(buffers: StepBuffers) -> tuple[Tree, Info]:
    """What a reset returns."""
    return buffers.obs, {INFO_KEYS[name]: array for name, array in buffers.extras.items()}


def step_result(buffers: StepBuffers, ended: dict[int, ScalarInfo]) -> Result:
    """What a step returns, when these episodes ended."""
    obs, info = reset_result(buffers)
    if ended:
        info["final_obs"], info["final_info"] = buffers.final_obs, ended
        info.update({f"final_{name}": array for name, array in buffers.final_extras.items()})
    return obs, buffers.reward, buffers.terminated, buffers.truncated, info


def recv_result(
    buffers: StepBuffers, ended: dict[int, ScalarInfo], ids: Array
) -> tuple[Array, Tree, Array, Array, Array, Info]:
    """What `recv` returns: only these rows, without a copy where they are neighbours."""
    neighbours = len(ids) == ids[-1] - ids[0] + 1
    rows = buffers.rows(slice(ids[0], ids[-1] + 1) if neighbours else ids)
    place = {int(index): position for position, index in enumerate(ids)}
    return ids, *step_result(rows, {place[index]: numbers for index, numbers in ended.items()})


def sorted_ids(ids: Any) -> Array:
    return np.sort(np.asarray(ids, np.int64))

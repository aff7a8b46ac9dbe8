"""One copy of a task and its row of arrays: autoreset, action log, snapshot. Serial and worker processes share it,
so that both give the same numbers."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium as gym
import numpy as np

from zhixing.envs.arrays import Arrays
from zhixing.envs.gymnasium_tasks import missing_extra
from zhixing.envs.layout import BESIDE, MASK, Layout, follow
from zhixing.errors import EnvCrashError, UserError
from zhixing.tree import Tree, tree_leaves, tree_map

State = dict[str, Any]
Numbers = dict[str, int | float | bool]


def task_seed(seed: int, index: int) -> int:
    """The seed of environment `index`: a stream of its own, the same in every back end."""
    return int(np.random.SeedSequence([seed, index]).generate_state(1)[0]) & 0x7FFFFFFF  # some tasks take 31 bits


class Slot:
    def __init__(self, env: gym.Env[Any, Any], layout: Layout, arrays: Arrays, row: int, index: int, name: str) -> None:
        self.env, self.arrays, self.row, self.index, self.name = env, arrays, row, index, name
        self.layout = layout
        self.discrete = isinstance(layout.spaces.action, gym.spaces.Discrete) and not layout.spaces.agents
        self.leaves, self.final_leaves = tree_leaves(arrays.obs), tree_leaves(arrays.final_obs)
        self.single = layout.paths == ((),)  # the observation is one array: no keys to follow
        self.has_state = hasattr(env, "state_dict") and hasattr(env, "load_state_dict")
        self.log: list[Any] = []  # the actions of this episode: with `origin` they give its state again
        self.origin: State = {}
        self.seed: int | None = None

    def step(self) -> Numbers | None:
        """Act as this row says. At the end of an episode: the numbers of its last info, the next one begun."""
        arrays, row = self.arrays, self.row
        action = self._own(arrays.action[row])
        self.log.append(action if self.discrete else action.copy())
        try:
            obs, reward, terminated, truncated, info = self.env.step(action)
            arrays.reward[row] = reward
            arrays.terminated[row] = terminated
            arrays.truncated[row] = truncated
            if not (terminated or truncated):
                self._write(obs, info)
                return None
            self._write_final(obs, info)
            numbers = _numbers(info)
        except Exception as error:
            raise self._crash(f"step {len(self.log)} of an episode") from error
        self.reset(None, None)
        return numbers

    def reset(self, seed: int | None, options: State | None) -> None:
        try:
            self._reset(seed, options)
        except Exception as error:
            raise self._crash("a reset") from error

    def _own(self, action: Any) -> Any:
        """A copy: the task may keep or change what it gets, the row is written again at the next step."""
        return int(action) if self.discrete else action.copy()

    def _reset(self, seed: int | None = None, options: State | None = None) -> None:
        if seed is not None:
            self.seed = seed
        rng = None if self.has_state or seed is not None else _rng_state(self.env)
        self.origin = {"seed": seed, "rng": rng, "options": options}
        self.log.clear()
        self._write(*self.env.reset(seed=seed, options=options))

    def _write(self, obs: Any, info: State) -> None:
        row = self.row
        if self.single:
            self.leaves[0][row] = obs
        else:
            for leaf, path in zip(self.leaves, self.layout.paths, strict=True):
                leaf[row] = follow(obs, path)
        for name, array in self.arrays.beside.items():
            array[row] = obs[MASK] if name == "mask" and self.layout.mask_in_obs else info[BESIDE[name]]

    def _write_final(self, obs: Any, info: State) -> None:
        for leaf, path in zip(self.final_leaves, self.layout.paths, strict=True):
            leaf[self.row] = follow(obs, path)
        for name, array in self.arrays.final_beside.items():
            if name == "mask" and self.layout.mask_in_obs:
                array[self.row] = obs[MASK]
            else:  # many tasks give no mask once the episode is over: nothing is forbidden then
                array[self.row] = info.get(MASK, True) if name == "mask" else info[BESIDE[name]]

    def state(self) -> State:
        if not self.origin:
            raise RuntimeError("reset the environments before asking for their state")
        here = self.arrays.rows(self.row)
        state: State = {
            "obs": tree_map(np.copy, here.obs),
            "beside": {name: array.copy() for name, array in here.beside.items()},
            "seed": self.seed,
            "origin": dict(self.origin),
            "actions": np.array(self.log, here.action.dtype).reshape(-1, *here.action.shape),
        }
        if self.has_state:
            return {**state, "task": self.env.state_dict()}  # type: ignore[attr-defined]
        return {**state, "rng": _rng_state(self.env)}

    def load(self, state: State) -> bool:
        """Whether the task is now exactly where it was; if not, a new episode has begun."""
        self.seed = state["seed"]
        try:
            exact = self._replay(state)
        except Exception:  # a replay that went astray may do what the task forbids
            exact = False
        if exact:
            self.origin = dict(state["origin"])
            self.log = [self._own(action) for action in state["actions"]]
            for leaf, saved in zip(self.leaves, tree_leaves(state["obs"]), strict=True):
                leaf[self.row] = saved
            for name, array in self.arrays.beside.items():
                array[self.row] = state["beside"][name]
            return True
        _set_rng(self.env, state.get("rng"))
        self.reset(None, None)
        return False

    def _replay(self, state: State) -> bool:
        if self.has_state:
            self.env.load_state_dict(state["task"])  # type: ignore[attr-defined]
            return True
        origin = state["origin"]
        if origin["rng"] is not None:
            # what the task once built from its seed (levels, generators of its own) must be there too
            self.env.reset(seed=state["seed"])
            _set_rng(self.env, origin["rng"])
        obs, info = self.env.reset(seed=origin["seed"], options=origin["options"])
        for action in state["actions"]:
            obs, _, terminated, truncated, info = self.env.step(self._own(action))
            if terminated or truncated:
                return False
        self._write(obs, info)
        same = [
            leaf[self.row].tobytes() == saved.tobytes()
            for leaf, saved in zip(self.leaves, tree_leaves(state["obs"]), strict=True)
        ]
        return all(same) and bool(_rng_state(self.env) == state["rng"])

    def render(self) -> np.ndarray[Any, Any]:
        try:
            frame = self.env.render()
        except gym.error.DependencyNotInstalled as error:
            raise missing_extra(self.name, error) from error
        except Exception as error:
            raise self._crash("rendering") from error
        if frame is None:
            raise UserError(f"{self.name} gives no picture; make it with render_mode='rgb_array'")
        return np.asarray(frame)

    def _crash(self, when: str) -> EnvCrashError:
        return EnvCrashError(
            f"environment {self.name} (index {self.index}) crashed at {when}:\n{traceback.format_exc()}"
        )


class Slots:
    """Neighbouring environments, stepped one after the other; `first` is the index of the first."""

    def __init__(
        self, makers: Sequence[Callable[[], gym.Env[Any, Any]]], layout: Layout, arrays: Arrays, first: int, name: str
    ) -> None:
        self.first = first
        self.slots: list[Slot] = []
        for row, make in enumerate(makers):
            self.slots.append(Slot(make(), layout, arrays, row, first + row, name))

    def step(self, rows: Sequence[int] | None = None) -> dict[int, Numbers]:
        """Step all, or these; gives the last numbers of the episodes that ended, by index."""
        ended = {}
        for slot in self.slots if rows is None else [self.slots[row] for row in rows]:
            numbers = slot.step()
            if numbers is not None:
                ended[slot.index] = numbers
        return ended

    def reset(self, seeds: Sequence[int | None], options: State | None) -> None:
        for slot, seed in zip(self.slots, seeds, strict=True):
            slot.reset(seed, options)

    def state(self) -> list[State]:
        return [slot.state() for slot in self.slots]

    def load(self, states: Sequence[State]) -> list[int]:
        """The indices of those that could not be restored exactly."""
        return [slot.index for slot, state in zip(self.slots, states, strict=True) if not slot.load(state)]

    def render(self, index: int) -> Tree:
        return self.slots[index - self.first].render()

    def close(self) -> None:
        for slot in self.slots:
            slot.env.close()


def _rng_state(env: gym.Env[Any, Any]) -> State | None:
    """None for a task that keeps no NumPy generator; replay then starts from its seed alone."""
    try:
        return dict(env.unwrapped.np_random.bit_generator.state)
    except AttributeError:
        return None


def _set_rng(env: gym.Env[Any, Any], state: State | None) -> None:
    if state is not None:
        env.unwrapped.np_random.bit_generator.state = state


def _numbers(info: State) -> Numbers:
    kept: Numbers = {}
    for key, value in info.items():
        if isinstance(value, (bool, int, float)):
            kept[key] = value
        elif isinstance(value, (np.ndarray, np.generic)) and value.ndim == 0 and value.dtype.kind in "biuf":
            kept[key] = value.item()
    return kept

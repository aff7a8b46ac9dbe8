"""Users' vector environments: any `gymnasium.vector.VectorEnv`, with its autoreset translated to the same step.

Gymnasium has three modes of autoreset, of which a vector environment names one in `metadata["autoreset_mode"]`:

- SAME_STEP resets in the step that ends an episode, and returns the last observation as `info["final_obs"]`.
- DISABLED never resets, but has `reset(options={"reset_mask": mask})`, which resets only the rows of the mask.
- NEXT_STEP resets in the next step, which ignores the action. Other rows can't wait for that, so a row must be reset
  at once, with a reset mask. A vector environment without it runs as N vectors of one environment, which is slow.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode

from zhixing.core.tree import Tree, tree_leaves, tree_map
from zhixing.envs.api import MisbehaviorError, check_step_result
from zhixing.envs.crash.validation import describe_path
from zhixing.envs.env_spec import INFO_KEYS, MASK, EnvSpec, get_leaf, inspect_env
from zhixing.envs.vector.backend_choice import random_action
from zhixing.envs.vector.base import Info, LockstepVectorEnv, Result, reset_result, step_result
from zhixing.envs.vector.constructors import VectorConstructor, time_limit
from zhixing.envs.vector.step_buffers import Array, allocate
from zhixing.envs.vector.sub_env import ScalarInfo, State, sub_env_seed
from zhixing.errors import EnvCrashError, UserError, note

MODE = "autoreset_mode"
RESET_MASK = "reset_mask"
ATTEMPTS = 20  # seeds with which to try a reset mask


class GymVectorEnv(LockstepVectorEnv):
    """A vector environment of a user.

    Its state is saved if it has `state_dict` and `load_state_dict`. Otherwise a restored vector starts new episodes.
    """

    def __init__(self, constructor: VectorConstructor, num_envs: int, options: State) -> None:
        name = constructor.name
        env: Any = constructor(num_envs, options)
        try:
            self.env_spec = inspect_env(_FirstRow(env, name), name)
            self.same_step = _autoreset_mode(env, name) is AutoresetMode.SAME_STEP
            if not self.same_step and num_envs > 1:
                env = self._guard(lambda: _with_reset_mask(env, constructor, options, self.env_spec), name)
        except BaseException:
            env.close()
            raise
        super().__init__(name, self.env_spec.spaces, num_envs, "native", 1)
        self.env, self.closed = env, False
        self.logged_info_keys = self.env_spec.logged_info_keys
        self.max_episode_steps = time_limit(constructor, options)
        self.metadata["render_fps"] = self.env_spec.render_fps
        self.has_state = hasattr(env, "state_dict") and hasattr(env, "load_state_dict")
        self.buffers = allocate(self.spaces, num_envs)
        self.rng = np.random.default_rng()  # seeds the episodes after a restart

    def reset(self, *, seed: int | None = None, options: State | None = None) -> tuple[Tree, Info]:
        first = self._seeds(seed)[0]
        if first is not None:
            self.rng = np.random.default_rng(first)
        self._guard(lambda: self._write(..., *self.env.reset(seed=first, options=options)))
        return reset_result(self.buffers)

    def step(self, actions: Array) -> Result:
        self.buffers.action[...] = self.spaces.flatten_action(actions)
        ended = self._guard(self._step)
        return step_result(self.buffers, ended)

    def _step(self) -> dict[int, ScalarInfo]:
        """Step all environments. Return the numbers of the last info of each episode that ended, by row."""
        buffers = self.buffers
        # a copy, because the environment may keep or change it
        actions = self.spaces.unflatten_action(buffers.action.copy())
        obs, reward, terminated, truncated, info = check_step_result(self.env.step(actions))
        for target, value, what in (
            (buffers.reward, reward, "reward"),
            (buffers.terminated, terminated, "terminated"),
            (buffers.truncated, truncated, "truncated"),
        ):
            _copy(target, ..., value, what)
        ended = buffers.terminated | buffers.truncated
        if not ended.any():
            self._write(..., obs, info)
            return {}
        if self.same_step:
            if "final_obs" not in info:
                raise MisbehaviorError(
                    f"episodes ended in a step without info['final_obs']; return their last observations there, or set "
                    f"metadata[{MODE!r}] to the mode that it implements"
                )
            last_obs, last_info = _stacked(info["final_obs"], ended), info.get("final_info", {})
        else:
            last_obs, last_info = obs, info
        self._write_final(ended, last_obs, last_info)
        scalars = {row: _scalars(last_info, row) for row in np.flatnonzero(ended).tolist()}
        if self.same_step:
            self._write(..., obs, info)
        else:
            self._write(~ended, obs, info)
            mask_options = {"options": {RESET_MASK: ended.copy()}} if self.num_envs > 1 else {}
            self._write(ended, *self.env.reset(**mask_options))
        return scalars

    def _write(self, rows: Any, obs: Any, info: Info) -> None:
        """Copy rows of current observations, and of the masks and the like that come with them."""
        self._write_obs(self.buffers.obs, rows, obs)
        for field, target in self.buffers.extras.items():
            key = INFO_KEYS[field]
            source = obs if field == "mask" and self.env_spec.mask_in_obs else info
            if key not in source:
                raise MisbehaviorError(f"it returned no {key}, but its first reset did; return it always")
            _copy(target, rows, source[key], key)

    def _write_final(self, rows: Array, obs: Any, info: Info) -> None:
        """Copy rows of last observations of episodes."""
        self._write_obs(self.buffers.final_obs, rows, obs)
        for field, target in self.buffers.final_extras.items():
            key = INFO_KEYS[field]
            source = obs if field == "mask" and self.env_spec.mask_in_obs else info
            if key in source:
                _copy(target, rows, source[key], key)
            elif field == "mask":  # many environments return no mask at the end of an episode
                target[rows] = True
            else:
                raise MisbehaviorError(f"the last info of an episode has no {key}; return it always")

    def _write_obs(self, target: Tree, rows: Any, obs: Any) -> None:
        for leaf, path in zip(tree_leaves(target), self.env_spec.paths, strict=True):
            _copy(leaf, rows, get_leaf(obs, path), f"observation{describe_path(path)}")

    def _guard(self, call: Callable[[], Any], name: str = "") -> Any:
        name = name or self.name
        try:
            return call()
        except UserError:
            raise
        except MisbehaviorError as error:
            raise EnvCrashError(f"the vector environment {name} misbehaved: {error}") from error
        except Exception as error:
            raise EnvCrashError(f"the vector environment {name} crashed:\n{traceback.format_exc()}") from error

    def state_dict(self) -> State:
        state: State = {"rng": dict(self.rng.bit_generator.state)}
        if self.has_state:
            state["obs"] = [leaf.copy() for leaf in tree_leaves(self.buffers.obs)]
            state["extras"] = {field: array.copy() for field, array in self.buffers.extras.items()}
            state["env"] = self.env.state_dict()
        return {"kind": "vector", "name": self.name, "num_envs": self.num_envs, "env_state": state}

    def load_state_dict(self, state: State) -> tuple[Tree, Info]:
        self._check_state(state, "vector")
        saved = state["env_state"]
        self.rng.bit_generator.state = saved["rng"]
        if not self.has_state or "env" not in saved:
            self.inexact = list(range(self.num_envs))
            return self.reset(seed=int(self.rng.integers(2**31 - 1)))
        self.inexact = []
        self.env.load_state_dict(saved["env"])
        for leaf, array in zip(tree_leaves(self.buffers.obs), saved["obs"], strict=True):
            leaf[...] = array
        for field, array in saved["extras"].items():
            self.buffers.extras[field][...] = array
        return reset_result(self.buffers)

    def render(self, index: int = 0) -> Array:  # type: ignore[override]
        frames = self.env.render()
        if frames is None:
            raise UserError(f"{self.name} renders no image; make it with render_mode='rgb_array'")
        return np.asarray(frames[index])

    def close_extras(self, **kwargs: Any) -> None:
        self.env.close()


class SingleVectors(gym.vector.VectorEnv[Any, Any, Any]):
    """N vectors of one environment each as one vector environment with a reset mask."""

    def __init__(self, envs: Sequence[Any]) -> None:
        self.envs, self.num_envs = list(envs), len(envs)
        self.results: list[Any] = [None] * self.num_envs  # the last observation of each
        if all(hasattr(env, "state_dict") and hasattr(env, "load_state_dict") for env in self.envs):
            self.state_dict, self.load_state_dict = self._state_dict, self._load_state_dict

    def reset(self, *, seed: Any = None, options: State | None = None) -> tuple[Any, Info]:
        options = dict(options or {})
        mask = options.pop(RESET_MASK, np.ones(self.num_envs, bool))
        infos: Info = {}
        for row in np.flatnonzero(mask).tolist():
            row_seed = None if seed is None else sub_env_seed(seed, row)
            self.results[row], info = self.envs[row].reset(seed=row_seed, options=options or None)
            infos = self._add_info(infos, _first(info), row)
        return self._stack(), infos

    def step(self, actions: Tree) -> Result:
        infos: Info = {}
        rows = [tree_map(lambda leaf, row=row: leaf[row : row + 1], actions) for row in range(len(self.envs))]
        steps = [env.step(action) for env, action in zip(self.envs, rows, strict=True)]
        for row, (obs, *_, info) in enumerate(steps):
            self.results[row] = obs
            infos = self._add_info(infos, _first(info), row)
        reward, terminated, truncated = (np.concatenate([step[part] for step in steps]) for part in (1, 2, 3))
        return self._stack(), reward, terminated, truncated, infos

    def _stack(self) -> Any:
        return _concatenate(self.results)

    def render(self) -> Any:
        frames = [env.render() for env in self.envs]
        return None if frames[0] is None else tuple(frame[0] for frame in frames)

    def _state_dict(self) -> State:
        return {"envs": [env.state_dict() for env in self.envs]}

    def _load_state_dict(self, state: State) -> None:
        for env, saved in zip(self.envs, state["envs"], strict=True):
            env.load_state_dict(saved)

    def close_extras(self, **kwargs: Any) -> None:
        for env in self.envs:
            env.close()


class _FirstRow(gym.Env[Any, Any]):
    """The first environment of a vector, from which the spec is inferred."""

    def __init__(self, env: Any, name: str) -> None:
        for attribute in ("single_observation_space", "single_action_space"):
            if not isinstance(getattr(env, attribute, None), gym.Space):
                raise UserError(f"{name} has no {attribute}; set it to a gymnasium.spaces.Space in __init__")
        self.env = env
        self.observation_space, self.action_space = env.single_observation_space, env.single_action_space
        self.metadata = env.metadata
        self.num_agents = int(getattr(env.unwrapped, "num_agents", 1))
        self.reward_kind = getattr(env.unwrapped, "reward_kind", "individual")

    def reset(self, *, seed: int | None = None, options: State | None = None) -> tuple[Any, Info]:
        obs, info = self.env.reset(seed=seed, options=options)
        return _first(obs), {key: value[0] for key, value in info.items() if key in INFO_KEYS.values()}


def _autoreset_mode(env: Any, name: str) -> AutoresetMode:
    mode = env.metadata.get(MODE)
    try:
        return AutoresetMode(mode)
    except ValueError:
        allowed = ", ".join(f"AutoresetMode.{known.name}" for known in AutoresetMode)
        raise UserError(
            f"{name} has metadata[{MODE!r}]={mode!r}; allowed are {allowed} (of gymnasium.vector); set it to the mode "
            f"that its step() implements"
        ) from None


def _with_reset_mask(env: Any, constructor: VectorConstructor, options: State, env_spec: EnvSpec) -> Any:
    """Return a vector environment with a reset mask: this one if it has it, or vectors of one environment."""
    name = constructor.name
    supported = _supports_reset_mask(env, env_spec)
    if _autoreset_mode(env, name) is AutoresetMode.DISABLED:
        if supported is False:
            raise UserError(
                f"{name} has the autoreset mode DISABLED, but its reset(options={{'{RESET_MASK}': mask}}) doesn't only "
                f"reset the rows of the mask; implement that, or another autoreset mode"
            )
        return env
    if supported:
        return env
    advice = f"implement reset(options={{'{RESET_MASK}': mask}}) or the autoreset mode SAME_STEP"
    if not constructor.takes_num_envs:
        raise UserError(
            f"{name} has the autoreset mode NEXT_STEP and no reset mask, so an environment can't be reset before the "
            f"next step of all others; {advice}, or give it a parameter num_envs"
        )
    num_envs = env.num_envs
    env.close()
    note(f"{name} has the autoreset mode NEXT_STEP: it runs as {num_envs} vectors of one environment; {advice}")
    return SingleVectors([constructor(1, options) for _ in range(num_envs)])


def _supports_reset_mask(env: Any, env_spec: EnvSpec) -> bool | None:
    """Return whether a reset mask resets its rows only, or None if observations don't reveal it."""
    spaces, num_envs = env_spec.spaces, env.num_envs
    spaces.action.seed(0)

    def leaves(obs: Any) -> list[Array]:
        arrays = tree_leaves(allocate(spaces, num_envs).obs)
        for array, path in zip(arrays, env_spec.paths, strict=True):
            _copy(array, ..., get_leaf(obs, path), f"observation{describe_path(path)}")
        return arrays

    for seed in range(ATTEMPTS):
        first_obs, info = env.reset(seed=seed)
        first, source = leaves(first_obs), first_obs if env_spec.mask_in_obs else info
        masks = source[MASK] if spaces.mask is not None else [None] * num_envs
        sampled = np.stack([spaces.flatten_action(random_action(spaces, mask)) for mask in masks])
        actions = spaces.unflatten_action(sampled.astype(spaces.env_action_field.dtype))
        obs, _, terminated, truncated, _ = env.step(actions)
        before, mask = leaves(obs), np.zeros(num_envs, bool)
        for flags, what in ((terminated, "terminated"), (truncated, "truncated")):
            _copy(mask, np.flatnonzero(~mask), flags, what)
        mask[0] |= not mask.any()
        # rows that would look different if they were reset
        moved = ~mask & np.any([(b != f).reshape(len(b), -1).any(1) for b, f in zip(before, first, strict=True)], 0)
        if moved.any():
            try:
                after = leaves(env.reset(options={RESET_MASK: mask})[0])
            except Exception:  # it doesn't know the option
                return False
            return all(np.array_equal(b[moved], a[moved]) for b, a in zip(before, after, strict=True))
    return None


def _copy(target: Array, rows: Any, value: Any, what: str) -> None:
    """Copy rows of an array `[N,...]`. Raise `MisbehaviorError` if it has another shape or isn't finite."""
    array = np.asarray(value)
    if array.shape != target.shape:
        raise MisbehaviorError(f"its {what} has shape {array.shape}; it must have shape {target.shape}")
    chosen = array[rows]
    if array.dtype.kind == "f" and not np.isfinite(chosen).all():
        raise MisbehaviorError(f"its {what} contains NaN or Inf; numbers must be finite")
    if target.dtype == bool and array.dtype != bool and not np.isin(chosen, (0, 1)).all():
        raise MisbehaviorError(f"its {what} contains values other than True and False")
    target[rows] = chosen


def _stacked(final_obs: Any, ended: Array) -> Any:
    """Return last observations as arrays `[N,...]`, from such arrays or from one observation per ended row."""
    if not (isinstance(final_obs, np.ndarray) and final_obs.dtype == object):
        return final_obs
    rows = np.flatnonzero(ended)
    if any(final_obs[row] is None for row in rows):
        raise MisbehaviorError("info['final_obs'] is None for an episode that ended; return its last observation")
    return _concatenate([_expand(final_obs[row if flag else rows[0]]) for row, flag in enumerate(ended)])


def _expand(obs: Any) -> Any:
    if isinstance(obs, Mapping):
        return {key: _expand(part) for key, part in obs.items()}
    return tuple(map(_expand, obs)) if isinstance(obs, tuple) else np.asarray(obs)[None]


def _concatenate(observations: Sequence[Any]) -> Any:
    first = observations[0]
    if isinstance(first, Mapping):
        return {key: _concatenate([obs[key] for obs in observations]) for key in first}
    if isinstance(first, tuple):
        return tuple(_concatenate(parts) for parts in zip(*observations, strict=True))
    return np.concatenate(observations)


def _first(values: Any) -> Any:
    """Return the first row of nested arrays."""
    if isinstance(values, Mapping):
        return {key: _first(value) for key, value in values.items() if not str(key).startswith("_")}
    return tuple(map(_first, values)) if isinstance(values, tuple) else np.asarray(values)[0]


def _scalars(info: Info, row: int) -> ScalarInfo:
    """Return the numbers that an info `{key: [N]}` has for one row, as Python numbers."""
    scalars: ScalarInfo = {}
    for key, values in info.items():
        is_array = isinstance(values, np.ndarray) and values.ndim == 1 and values.dtype.kind in "biuf"
        if is_array and not key.startswith("_") and info.get(f"_{key}", np.ones(len(values), bool))[row]:
            scalars[key] = values[row].item()
    return scalars

"""Run episodes of one environment, record their steps, repeat them and compare them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np

from zhixing.core.tree import tree_map
from zhixing.envs.api import check_step_result
from zhixing.envs.crash.validation import describe_path
from zhixing.envs.env_spec import MASK, EnvSpec, get_leaf


class StepRecord(NamedTuple):
    """Result of one step, or of a reset, which has no action and no reward."""

    step: int  # number of steps since the first reset
    action: Any
    obs: Any
    reward: Any
    terminated: Any
    truncated: Any
    info: Any

    @property
    def ended(self) -> bool:
        return self.action is not None and bool(self.terminated or self.truncated)

    @property
    def when(self) -> str:
        """Return the position as text for messages, such as "at step 3"."""
        if self.action is not None:
            return f"at step {self.step}"
        return f"at the reset after step {self.step}" if self.step else "at the first reset"


def run_episodes(
    env: gym.Env[Any, Any], env_spec: EnvSpec, sample_action: Callable[[Any], Any], seed: int
) -> Iterator[StepRecord]:
    """Yield the steps of successive episodes. `sample_action(mask)` gets None if there is no valid action mask."""
    record = _reset(env, seed, 0)
    yield record
    while True:
        mask = np.asarray((record.obs if env_spec.mask_in_obs else record.info).get(MASK, ()))
        expected_shape = (*env_spec.spaces.agents, env_spec.spaces.mask)
        record = step_env(env, sample_action(mask[None] if mask.shape == expected_shape else None), record.step + 1)
        yield record
        if record.ended:
            record = _reset(env, None, record.step)
            yield record


def repeat_trace(env: gym.Env[Any, Any], trace: list[StepRecord], seed: int) -> Iterator[StepRecord]:
    """Yield the results of the actions and resets of a recorded trace."""
    for record in trace:
        if record.action is None:
            yield _reset(env, None if record.step else seed, record.step)
        else:
            yield step_env(env, record.action, record.step)


def step_env(env: gym.Env[Any, Any], action: Any, step: int) -> StepRecord:
    obs, *rest = check_step_result(env.step(tree_map(copy.copy, action)))
    return StepRecord(step, action, _copy_obs(obs), *rest)


def _reset(env: gym.Env[Any, Any], seed: int | None, step: int) -> StepRecord:
    obs, info = env.reset(seed=seed)
    return StepRecord(step, None, _copy_obs(obs), None, False, False, info)


def _copy_obs(obs: Any) -> Any:
    """Return a copy, because environments may overwrite an observation in the next step."""
    if isinstance(obs, dict):
        return {key: _copy_obs(part) for key, part in obs.items()}
    return tuple(map(_copy_obs, obs)) if isinstance(obs, tuple) else np.copy(obs)


def find_difference(one: StepRecord, other: StepRecord, env_spec: EnvSpec) -> str | None:
    """Return the name of the first part that isn't bitwise equal, or None."""
    for path in env_spec.paths:
        left, right = (np.asarray(get_leaf(record.obs, path)) for record in (one, other))
        if left.shape != right.shape or left.tobytes() != right.tobytes():
            return f"the observation{describe_path(path)}"
    if one.reward is not None and np.asarray(one.reward).tobytes() != np.asarray(other.reward).tobytes():
        return "the reward"
    return None if one.ended == other.ended else "the end of the episode"

"""Episodes of one copy of a task, to look at and to repeat."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np

from zhixing.envs.api import checked_step
from zhixing.envs.crash.validation import describe_path
from zhixing.envs.env_spec import MASK, EnvSpec, follow


class Shown(NamedTuple):
    """What one step gave; a reset has no action and no reward."""

    action: Any
    obs: Any
    reward: Any
    terminated: Any
    truncated: Any
    info: Any

    @property
    def ended(self) -> bool:
        return self.action is not None and bool(self.terminated or self.truncated)


def episodes(env: gym.Env[Any, Any], env_spec: EnvSpec, act: Callable[[Any], Any], seed: int) -> Iterator[Shown]:
    """One episode after the other, with actions that the mask allows where it is one."""
    shown = Shown(None, *_begun(env, seed))
    yield shown
    while True:
        mask = np.asarray((shown.obs if env_spec.mask_in_obs else shown.info).get(MASK, ()))
        wanted = (*env_spec.spaces.agents, env_spec.spaces.mask)
        shown = stepped(env, act(mask[None] if mask.shape == wanted else None))
        yield shown
        if shown.ended:
            shown = Shown(None, *_begun(env, None))
            yield shown


def again(env: gym.Env[Any, Any], trace: list[Shown], seed: int) -> Iterator[Shown]:
    """The same actions and resets."""
    for step, shown in enumerate(trace):
        if shown.action is None:
            yield Shown(None, *_begun(env, None if step else seed))
        else:
            yield stepped(env, shown.action)


def stepped(env: gym.Env[Any, Any], action: Any) -> Shown:
    obs, *rest = checked_step(env.step(action.copy() if isinstance(action, np.ndarray) else action))
    return Shown(action, _kept(obs), *rest)


def _begun(env: gym.Env[Any, Any], seed: int | None) -> tuple[Any, ...]:
    obs, info = env.reset(seed=seed)
    return _kept(obs), None, False, False, info


def _kept(obs: Any) -> Any:
    """A task may write into what it showed."""
    if isinstance(obs, dict):
        return {key: _kept(part) for key, part in obs.items()}
    return tuple(map(_kept, obs)) if isinstance(obs, tuple) else np.copy(obs)


def difference(one: Shown, other: Shown, env_spec: EnvSpec) -> str | None:
    """What isn't the same, bit by bit."""
    for keys in env_spec.paths:
        left, right = (np.asarray(follow(shown.obs, keys)) for shown in (one, other))
        if left.shape != right.shape or left.tobytes() != right.tobytes():
            return f"the observation{describe_path(keys)}"
    if np.asarray(one.reward).tobytes() != np.asarray(other.reward).tobytes() and one.reward is not None:
        return "the reward"
    return None if one.ended == other.ended else "the end"

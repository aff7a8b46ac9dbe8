"""What is wrong with a single thing that a task showed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from gymnasium.spaces import Box, MultiDiscrete

from zhixing.envs.api import MisbehaviorError, flag_of, reward_of
from zhixing.envs.checker.trial import Shown
from zhixing.envs.crash.validation import describe_path, leaf_spaces, obs_validators
from zhixing.envs.env_spec import MASK, EnvSpec, follow
from zhixing.envs.vector.sub_env import scalar_info

Say = Callable[[str, str, str], None]  # check, mark and words


class Look:
    def __init__(self, env_spec: EnvSpec, say: Say) -> None:
        self.env_spec, self.spaces, self.say = env_spec, env_spec.spaces, say
        self.fits, self.leaves = obs_validators(env_spec), leaf_spaces(env_spec.spaces.obs)

    def at_step(self, shown: Shown, when: str) -> None:
        self._obs(shown.obs, when)
        if self.spaces.mask is not None and not shown.ended:
            self._mask(shown, when)
        if shown.action is not None:
            self._reward(shown.reward, when)
            self._end(shown, when)

    def _reward(self, given: Any, when: str) -> None:
        try:
            reward_of(given, self.spaces.agents)
        except MisbehaviorError as error:
            self.say("rewards", "wrong", f"{error} ({when})")
            return
        if np.ndim(given) and not self.spaces.agents:
            self.say("rewards", "note", f"arrays of shape {np.shape(given)}, taken as the number in them; give a float")

    def _end(self, shown: Shown, when: str) -> None:
        for name in ("terminated", "truncated"):
            flag = getattr(shown, name)
            try:
                flag_of(flag, name)
            except MisbehaviorError as error:
                self.say("ends", "wrong", f"{error} ({when})")
                continue
            if not isinstance(flag, (bool, np.bool_)):
                self.say("ends", "note", f"{name} is {flag!r} {when}; give True or False")
        odd = [name for name, value in scalar_info(shown.info).items() if not np.isfinite(value)]
        if odd and shown.ended:
            self.say("info", "note", f"{', '.join(odd)} {when} isn't finite, and would spoil its mean in the log")

    def _obs(self, obs: Any, when: str) -> None:
        for space, fit, keys in zip(self.leaves, self.fits, self.env_spec.paths, strict=True):
            value = follow(obs, keys)
            try:
                fit(value)
            except MisbehaviorError as error:
                self.say("observations", "wrong", f"{str(error).removeprefix('its observation').strip()} ({when})")
                continue
            given = np.asarray(value)
            if given.dtype.kind not in "biuf":
                self.say("observations", "wrong", f"{given.dtype}{describe_path(keys)} {when} is no number")
                continue
            if not np.isfinite(given).all():
                self.say("observations", "wrong", f"not finite{describe_path(keys)} {when}: {given}")
            if isinstance(space, Box):
                kept = given.astype(space.dtype) if given.dtype.kind == "f" else given
                outside = (kept < space.low) | (kept > space.high)
                if outside.any():
                    worst = kept[outside].flat[0]
                    self.say(
                        "observations", "wrong", f"{worst}{describe_path(keys)} {when} is outside {space}; widen it"
                    )
                elif given.dtype != space.dtype:
                    self.say(
                        "observations", "note", f"of {given.dtype}{describe_path(keys)}, the space says {space.dtype}"
                    )

    def _mask(self, shown: Shown, when: str) -> None:
        holder = shown.obs if self.env_spec.mask_in_obs else shown.info
        if MASK not in holder:
            self.say("masks", "wrong", f"there is no {MASK} {when}; the first reset showed one, so show it always")
            return
        mask, wanted = np.asarray(holder[MASK]), (*self.spaces.agents, self.spaces.mask)
        if mask.shape != wanted:
            self.say("masks", "wrong", f"of shape {mask.shape} {when}; {wanted} is meant")
            return
        if not np.isin(mask, (0, 1)).all():
            self.say("masks", "wrong", f"{mask} {when}; 1 allows an action, 0 forbids it")
        action = self.spaces.action
        starts = np.cumsum([0, *action.nvec[:-1]]) if isinstance(action, MultiDiscrete) else [0]
        if not np.logical_or.reduceat(mask.astype(bool), starts, axis=-1).all():
            self.say("masks", "wrong", f"{mask} {when} forbids every action; allow at least one")

"""Check the result of a single step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from gymnasium.spaces import Box

from zhixing.envs.api import MisbehaviorError, parse_flag, parse_reward
from zhixing.envs.checker.rollout import StepRecord
from zhixing.envs.crash.validation import describe_path, leaf_spaces, obs_validators
from zhixing.envs.env_spec import MASK, EnvSpec, Path, get_leaf
from zhixing.envs.vector.sub_env import scalar_info

Report = Callable[[str, str, str], None]  # takes check, status and message


class StepChecker:
    def __init__(self, env_spec: EnvSpec, report: Report) -> None:
        self.env_spec, self.spaces, self.report = env_spec, env_spec.spaces, report
        self.validators, self.leaf_spaces = obs_validators(env_spec), leaf_spaces(env_spec.spaces.obs)

    def check(self, record: StepRecord) -> None:
        for space, validate, path in zip(self.leaf_spaces, self.validators, self.env_spec.paths, strict=True):
            value = get_leaf(record.obs, path)
            try:
                validate(value)
            except MisbehaviorError as error:
                self.report("observations", "error", f"{error} ({record.when})")
                continue
            self._check_obs_values(np.asarray(value), space, path, record.when)
        if self.spaces.mask is not None and not record.ended:
            self._check_mask(record)
        if record.action is not None:
            self._check_reward(record.reward, record.when)
            self._check_flags(record)
        if record.ended:
            nonfinite = [key for key, value in scalar_info(record.info).items() if not np.isfinite(value)]
            if nonfinite:
                message = f"{', '.join(nonfinite)} is NaN or infinite {record.when}; so would be its mean in the log"
                self.report("info", "warning", message)

    def _check_obs_values(self, value: Any, space: Any, path: Path, when: str) -> None:
        name = f"its observation{describe_path(path)}"
        if value.dtype.kind not in "biuf":
            self.report("observations", "error", f"{name} has dtype {value.dtype} {when}; it must contain numbers")
            return
        if not np.isfinite(value).all():
            self.report("observations", "error", f"{name} contains NaN or infinity {when}: {value}")
        if not isinstance(space, Box):
            return
        stored = value.astype(space.dtype) if value.dtype.kind == "f" else value
        outside = (stored < space.low) | (stored > space.high)
        if outside.any():
            message = f"{name} contains {stored[outside].flat[0]} {when}, outside {space}; widen the bounds"
            self.report("observations", "error", message)
        elif value.dtype != space.dtype:
            message = f"{name} has dtype {value.dtype}, its space has dtype {space.dtype}; make them equal"
            self.report("observations", "warning", message)

    def _check_mask(self, record: StepRecord) -> None:
        when = record.when
        holder = record.obs if self.env_spec.mask_in_obs else record.info
        if MASK not in holder:
            message = f"{MASK} is missing {when}, but the first reset returned one; always return it"
            self.report("action masks", "error", message)
            return
        mask, expected_shape = np.asarray(holder[MASK]), (*self.spaces.agents, self.spaces.mask)
        if mask.shape != expected_shape:
            message = f"{MASK} has shape {mask.shape} {when}; it must have shape {expected_shape}"
            self.report("action masks", "error", message)
            return
        if not np.isin(mask, (0, 1)).all():
            message = f"{MASK} is {mask} {when}; use 1 for allowed and 0 for forbidden actions"
            self.report("action masks", "error", message)
        starts = np.cumsum([0, *self.spaces.layout.sizes[:-1]])
        if not np.logical_or.reduceat(mask.astype(bool), starts, axis=-1).all():
            scope = " of one component" if len(starts) > 1 else ""
            message = f"{MASK} is {mask} {when}, which forbids all actions{scope}; allow at least one"
            self.report("action masks", "error", message)

    def _check_reward(self, reward: Any, when: str) -> None:
        try:
            parse_reward(reward, self.spaces.agents)
        except MisbehaviorError as error:
            self.report("rewards", "error", f"{error} ({when})")
            return
        if np.ndim(reward) and not self.spaces.agents:
            message = f"its reward is an array of shape {np.shape(reward)}, which is used as a number; return a float"
            self.report("rewards", "warning", message)

    def _check_flags(self, record: StepRecord) -> None:
        for name, flag in (("terminated", record.terminated), ("truncated", record.truncated)):
            try:
                parse_flag(flag, name)
            except MisbehaviorError as error:
                self.report("episode ends", "error", f"{error} ({record.when})")
                continue
            if not isinstance(flag, (bool, np.bool_)):
                self.report("episode ends", "warning", f"its {name} is {flag!r} {record.when}; return True or False")

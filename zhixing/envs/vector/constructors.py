"""Find environments that are vector environments themselves: classes, functions and objects of users, and Gymnasium ids
with a `vector_entry_point`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import gymnasium as gym
from gymnasium.envs.registration import load_env_creator

from zhixing.envs.adapters import gymnasium_ids, user
from zhixing.envs.adapters.user import NUM_ENVS
from zhixing.envs.options import construct_env, parameter_names
from zhixing.envs.registry import find_adapter
from zhixing.envs.wrappers.time_limit import OPTION
from zhixing.errors import UserError
from zhixing.utils.importing import import_object


@dataclass(frozen=True)
class VectorConstructor:
    """Makes a `gymnasium.vector.VectorEnv`. `signature` is the function whose parameters are the options.

    Without a parameter `num_envs`, the number of environments is fixed. `only` means that there are no single
    environments of this name.
    """

    name: str
    make: Callable[..., Any]
    signature: Callable[..., Any]
    only: bool
    max_episode_steps: int | None = None

    @property
    def takes_num_envs(self) -> bool:
        return NUM_ENVS in parameter_names(self.signature)

    def __call__(self, num_envs: int, options: Mapping[str, Any]) -> gym.vector.VectorEnv[Any, Any, Any]:
        """Make a vector environment. Raise `UserError` if it isn't one, or has another number of environments."""
        if NUM_ENVS in options:
            raise UserError(
                f"{self.name} has no option {NUM_ENVS!r}: the number of environments is the setting num_envs of the run"
            )
        arguments = {**options, NUM_ENVS: num_envs} if self.takes_num_envs else dict(options)
        env = construct_env(self.name, self.make, arguments, self.signature)
        if not isinstance(env, gym.vector.VectorEnv):
            raise UserError(
                f"{self.name} returned an instance of {type(env).__name__}, not a gymnasium.vector.VectorEnv; a "
                f"function with the parameter num_envs must return a vector environment"
            )
        actual = getattr(env, "num_envs", None)
        if actual != num_envs:
            env.close()
            raise UserError(
                f"num_envs is {num_envs}, but {self.name} has {actual} environments; set num_envs={actual} (for "
                f"evaluations eval_num_envs={actual}), or give it a parameter num_envs"
            )
        return env


def find_vector(name: str) -> VectorConstructor | None:
    """Return the constructor of a vector environment, or None if the name has only single environments."""
    name = gymnasium_ids.resolve_id(name) or name
    adapter = find_adapter(name)
    if adapter is user:
        constructor = import_object(name)
        return VectorConstructor(name, constructor, constructor, only=True) if user.makes_vectors(constructor) else None
    spec = gym.registry.get(name)
    if adapter is not gymnasium_ids or spec is None or spec.vector_entry_point is None:
        return None
    entry_point = spec.vector_entry_point
    creator = entry_point if callable(entry_point) else load_env_creator(entry_point)
    make = partial(gym.make_vec, name, vectorization_mode="vector_entry_point")
    return VectorConstructor(name, make, creator, spec.entry_point is None, spec.max_episode_steps)


def find_torch_task(name: str) -> Any:
    """Return the class of a user's torch task, or None if the name is that of another environment."""
    if gymnasium_ids.resolve_id(name) is not None or find_adapter(name) is not user:
        return None
    task = import_object(name)
    return task if user.is_torch_task(task) else None


def has_fixed_num_envs(name: str) -> bool:
    """Return whether the environment is a vector environment that always has the same number of environments."""
    vector = find_vector(name)
    return vector is not None and vector.only and not vector.takes_num_envs


def time_limit(vector: VectorConstructor, options: Mapping[str, Any]) -> int | None:
    """Return the time limit of the environments, if it is known."""
    limit = options.get(OPTION, vector.max_episode_steps)
    return None if limit is None or limit < 0 else int(limit)

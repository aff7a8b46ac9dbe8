"""Send environments to other processes that can't look them up by name.

An environment may be a Python object, or a Gymnasium id that a script or an imported package registered in this process
only. New worker processes know neither, so they receive the object, the registration and the names of the packages.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterable
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import gymnasium as gym
from gymnasium.envs.registration import registry

from zhixing.envs.adapters import gymnasium_ids
from zhixing.errors import UserError
from zhixing.utils import importing, named_objects


def pack(names: Iterable[str]) -> bytes:
    """Serialize what another process needs to resolve these names. Raise `UserError` if that is impossible."""
    names = list(names)
    specs = [registry[name] for name in names if gymnasium_ids.is_third_party(name)]
    needed = (gymnasium_ids.imported_packages, specs, named_objects.select_objects(names))
    if not any(needed):
        return b""
    try:
        return cloudpickle.dumps(needed)  # unlike pickle, also serializes objects defined in __main__
    except Exception as error:
        raise UserError(
            f"{names[0]} can't be sent to another process ({type(error).__name__}: {str(error).splitlines()[0]}); "
            f"define it in an importable module, or set vector.backend=serial"
        ) from error


def pack_settings(settings: dict[str, Any]) -> bytes:
    """Serialize what another process needs to resolve the names in a run's settings."""
    return pack([settings["env"]["name"], *importing.names_in(settings)])


def unpack(packed: bytes) -> None:
    """Register the objects that `pack` serialized in another process of this run."""
    if not packed:
        return
    packages, specs, objects = pickle.loads(packed)
    importing.approved.update(packages)  # already approved in the first process
    gymnasium_ids.import_packages(packages)
    for spec in specs:
        registry.setdefault(spec.id, spec)
    for name, given in objects.items():
        named_objects.register_as(name, given)


def env_settings(env: Any) -> dict[str, Any]:
    """Return the name and options of an environment that is given as a class, a function or an instance.

    An instance made by `gymnasium.make` is made again from its id and options. Any other instance is a template that is
    copied for each environment.
    """
    if isinstance(env, (gym.Env, gym.vector.VectorEnv)):
        spec = env.spec if isinstance(env, gym.Env) else None
        if spec is not None and spec.id in registry and not spec.additional_wrappers:
            options = {key: value for key, value in spec.kwargs.items() if key != "render_mode"}
            if spec.max_episode_steps != registry[spec.id].max_episode_steps:
                options["max_episode_steps"] = spec.max_episode_steps or -1
            return {"name": spec.id, **options}
        kind = type(env.unwrapped)
        return {"name": named_objects.register_object(CopyFactory(env), f"{kind.__module__}:{kind.__qualname__}(...)")}
    if not callable(env):
        raise UserError(
            f"env is a {type(env).__name__}; allowed are a name such as 'CartPole-v1', a gymnasium.Env or "
            f"gymnasium.vector.VectorEnv, and a class or function that returns one"
        )
    return {"name": named_objects.register_object(env)}


def make_factory(env: Any) -> Any:
    """Return a function that makes environments, given such a function, a class or an instance to copy."""
    return CopyFactory(env) if isinstance(env, (gym.Env, gym.vector.VectorEnv)) else env


class CopyFactory:
    """Returns a deep copy of an environment at each call."""

    def __init__(self, env: gym.Env[Any, Any] | gym.vector.VectorEnv[Any, Any, Any]) -> None:
        self.env = env

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CopyFactory) and other.env is self.env

    def __hash__(self) -> int:
        return id(self.env)

    def __call__(self, render_mode: str | None = None) -> Any:
        kind = type(self.env.unwrapped).__name__
        if render_mode not in (None, self.env.render_mode):
            raise UserError(f"this {kind} doesn't render; pass one that was made with render_mode={render_mode!r}")
        try:
            return copy.deepcopy(self.env)
        except Exception as error:
            raise UserError(
                f"this {kind} can't be copied ({type(error).__name__}: {str(error).splitlines()[0]}), but training and "
                f"evaluation need several; pass a class or a function instead, such as env=lambda: {kind}(...)"
            ) from error

"""Make environments by name.

An adapter is a module with `names()`, `supports(name)` and `make(name, options)`. To add a family, write an adapter
and add its prefix to `PREFIXES`. If `make` implements some of the `COMMON_OPTIONS` itself, `own_options(name, options)`
returns their names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import gymnasium as gym

from zhixing.envs import info_fields, portable, toy
from zhixing.envs.adapters import (
    atari,
    dm_control_suite,
    foraging,
    gymnasium_ids,
    mario,
    pettingzoo_envs,
    procgen_envs,
    retro_games,
    skirmish,
    smac,
    smax,
    user,
)
from zhixing.envs.env_spec import MASK
from zhixing.envs.options import COMMON_OPTIONS
from zhixing.envs.wrappers import action_repeat, frame_stack, time_limit
from zhixing.errors import unknown
from zhixing.utils import named_objects

PREFIXES: dict[str, ModuleType] = {
    "ALE/": atari,
    "dmc/": dm_control_suite,
    "lbf/": foraging,
    "mario/": mario,
    "mpe/": pettingzoo_envs,
    "pettingzoo/": pettingzoo_envs,
    "procgen/": procgen_envs,
    "retro/": retro_games,
    "skirmish/": skirmish,
    "smac/": smac,
    "smax/": smax,
    "toy/": toy,
}

HINT = (
    "(use my.module:MyEnv or my_env.py:MyEnv for your own environment, and package:Id-v0 for an id that a package "
    "registers; an id that a script registers exists only in that script: register it in a module and pass --import "
    "MODULE, or pass the class)"
)


def find_adapter(name: str) -> ModuleType:
    if ":" in name or named_objects.is_registered(name):
        return user
    for prefix, module in PREFIXES.items():
        if f"{name}/".startswith(prefix):  # some environments are named like their family: `mario`
            return module
    return gymnasium_ids


def names() -> list[str]:
    """Return the names of all known environments, which excludes those of users."""
    return sorted(name for module in {gymnasium_ids, *PREFIXES.values()} for name in module.names())


def check_name(name: str) -> str:
    """Return the name without a package that registers it. Raise `UserError` if there is no such environment."""
    name = gymnasium_ids.resolve_id(name) or name
    if not find_adapter(name).supports(name):
        raise unknown("environment", name, names(), HINT)
    return name


def make(name: str, **options: Any) -> gym.Env[Any, Any]:
    """Make an environment. Every environment has the `COMMON_OPTIONS`, which adapters may implement themselves."""
    name = check_name(name)
    module = find_adapter(name)
    time_limit.check_time_limit(name, options)
    frame_stack.check_stack(name, options)
    action_repeat.check_action_repeat(name, options)
    info_fields.check_info_fields(name, options)
    own = module.own_options(name, options) if hasattr(module, "own_options") else ()
    common = {key: options.pop(key) for key in set(COMMON_OPTIONS).difference(own) if key in options}
    repeat = common.get(action_repeat.OPTION, 1)
    if options.get(time_limit.OPTION) not in (None, -1):
        options[time_limit.OPTION] *= repeat  # the adapter counts steps, the option counts actions
    env: gym.Env[Any, Any] = module.make(name, options)
    env = action_repeat.repeat_actions(env, repeat)
    env = time_limit.limit_steps(env, common.get(time_limit.OPTION))
    env = frame_stack.stack_frames(env, common.get(frame_stack.OPTION, 1), unstacked=(MASK,))
    return info_fields.declare(env, common[info_fields.OPTION]) if info_fields.OPTION in common else env


def frame_options(name: str, options: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return how an environment makes observations from screens, or None if it doesn't or is unknown."""
    get_options = getattr(find_adapter(name), "frame_options", None)
    return None if get_options is None else get_options(dict(options))


@dataclass(frozen=True)
class RegisteredEnv:
    """Makes an environment by name. Can be sent to other processes, even if they don't know the name."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self) -> gym.Env[Any, Any]:
        portable.unpack(self.__dict__.get("packed", b""))
        return make(self.name, **self.options)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "packed": portable.pack([self.name])}

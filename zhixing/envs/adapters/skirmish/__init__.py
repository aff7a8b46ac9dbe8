"""Battles of two small teams in NumPy, with SMAC's actions, observations and reward: `skirmish/3m`."""

from __future__ import annotations

from functools import partial
from typing import Any

from zhixing.envs.adapters.skirmish.battles import Battles
from zhixing.envs.adapters.skirmish.env import SkirmishEnv
from zhixing.envs.adapters.skirmish.native import NATIVE, NativeSkirmish
from zhixing.envs.adapters.skirmish.scripted import attack_nearest, focus_fire, random_play
from zhixing.envs.adapters.skirmish.smac import SkirmishSMAC
from zhixing.envs.adapters.skirmish.units import MAPS
from zhixing.envs.options import check_options

__all__ = [
    "MAPS",
    "NATIVE",
    "Battles",
    "NativeSkirmish",
    "SkirmishEnv",
    "SkirmishSMAC",
    "attack_nearest",
    "focus_fire",
    "make",
    "names",
    "random_play",
    "supports",
]


def names() -> list[str]:
    return list(NATIVE)


def supports(name: str) -> bool:
    return name in NATIVE


def make(name: str, options: dict[str, Any]) -> SkirmishEnv:
    constructor = partial(SkirmishEnv, name.removeprefix("skirmish/"))
    check_options(name, constructor, options)
    return constructor(**options)

"""Battles of two small teams, in NumPy, with SMAC's actions, observations and reward: `skirmish/3m`."""

from __future__ import annotations

from functools import partial
from typing import Any

from zhixing.envs.options import check_options
from zhixing.envs.skirmish.battles import Battles
from zhixing.envs.skirmish.env import SkirmishEnv
from zhixing.envs.skirmish.native import NATIVE, NativeSkirmish
from zhixing.envs.skirmish.scripts import attack_nearest, focus_fire, random_play
from zhixing.envs.skirmish.smac import SkirmishSMAC
from zhixing.envs.skirmish.units import MAPS

__all__ = [
    "MAPS",
    "NATIVE",
    "Battles",
    "NativeSkirmish",
    "SkirmishEnv",
    "SkirmishSMAC",
    "attack_nearest",
    "focus_fire",
    "knows",
    "make",
    "names",
    "random_play",
]


def names() -> list[str]:
    return list(NATIVE)


def knows(name: str) -> bool:
    return name in NATIVE


def make(name: str, options: dict[str, Any]) -> SkirmishEnv:
    constructor = partial(SkirmishEnv, name.removeprefix("skirmish/"))
    check_options(name, constructor, options)
    return constructor(**options)

"""Small tasks with known returns, for tests and for trying things out. They save and restore their own state."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

from zhixing.envs.options import check_options
from zhixing.envs.toy.base import ToyEnv
from zhixing.envs.toy.goals import BitFlip
from zhixing.envs.toy.memory import CartPoleNoVelocity, Recall
from zhixing.envs.toy.pixels import PixelCatch
from zhixing.envs.toy.simple import Match, Reach
from zhixing.envs.toy.team import TeamMatch, TeamReach, TwoStep

__all__ = [
    "BitFlip",
    "CartPoleNoVelocity",
    "Match",
    "PixelCatch",
    "Reach",
    "Recall",
    "TeamMatch",
    "TeamReach",
    "ToyEnv",
    "TwoStep",
    "make",
    "names",
    "supports",
]

BIT_FLIP = re.compile(r"toy/bit-flip-([1-9]\d*)")  # with any number of bits
TASKS: dict[str, Callable[..., ToyEnv]] = {
    "toy/match": Match,
    "toy/reach": Reach,
    "toy/bit-flip-15": partial(BitFlip, 15),
    "toy/recall": Recall,
    "toy/cartpole-no-velocity": CartPoleNoVelocity,
    "toy/pixel-catch": PixelCatch,
    "toy/two-step": TwoStep,
    "toy/team-match": TeamMatch,
    "toy/team-reach": TeamReach,
}


def names() -> list[str]:
    return list(TASKS)


def supports(name: str) -> bool:
    return name in TASKS or BIT_FLIP.fullmatch(name) is not None


def make(name: str, options: dict[str, Any]) -> ToyEnv:
    bits = BIT_FLIP.fullmatch(name)
    constructor = partial(BitFlip, int(bits[1])) if bits else TASKS[name]
    check_options(name, constructor, options)
    return constructor(**options)

"""Small environments with known returns, for tests and experiments. Their state can be saved and restored."""

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
from zhixing.envs.toy.simple import Match, Reach, Throw
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
    "Throw",
    "ToyEnv",
    "TwoStep",
    "make",
    "names",
    "supports",
]

BIT_FLIP = re.compile(r"toy/bit-flip-([1-9]\d*)")  # any number of bits is a valid name
ENVS: dict[str, Callable[..., ToyEnv]] = {
    "toy/match": Match,
    "toy/reach": Reach,
    "toy/throw": Throw,
    "toy/bit-flip-15": partial(BitFlip, 15),
    "toy/recall": Recall,
    "toy/cartpole-no-velocity": CartPoleNoVelocity,
    "toy/pixel-catch": PixelCatch,
    "toy/two-step": TwoStep,
    "toy/team-match": TeamMatch,
    "toy/team-reach": TeamReach,
}


def names() -> list[str]:
    return list(ENVS)


def supports(name: str) -> bool:
    return name in ENVS or BIT_FLIP.fullmatch(name) is not None


def make(name: str, options: dict[str, Any]) -> ToyEnv:
    match = BIT_FLIP.fullmatch(name)
    constructor = partial(BitFlip, int(match[1])) if match else ENVS[name]
    check_options(name, constructor, options)
    return constructor(**options)

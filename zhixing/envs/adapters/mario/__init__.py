"""Super Mario Bros. (NES): `mario/1-1` to `mario/8-4` are its levels, `mario` is the whole game.

Rewards, info and endings are those of gym-super-mario-bros, whose package brings the game, too. All options of
`wrap_pixels` are options here, with its defaults.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import gymnasium as gym

from zhixing.envs.adapters.mario.rules import usual_shaping
from zhixing.envs.adapters.mario.task import SuperMario
from zhixing.envs.options import check_options
from zhixing.envs.wrappers.agents import built
from zhixing.envs.wrappers.pixels import PIXEL_OPTIONS, split_options, wrap_pixels
from zhixing.errors import UserError

__all__ = ["SuperMario", "knows", "make", "names", "usual_shaping"]

NAME = re.compile(r"mario(?:/([1-8])-([1-4]))?")
SHAPINGS = {"none": None, "usual": usual_shaping}


def names() -> list[str]:
    return ["mario", *(f"mario/{world}-{stage}" for world in range(1, 9) for stage in range(1, 5))]


def knows(name: str) -> bool:
    return NAME.fullmatch(name) is not None


def make(name: str, options: dict[str, Any]) -> gym.Env[Any, Any]:
    parts = NAME.fullmatch(name)
    assert parts is not None
    level = (int(parts[1]), int(parts[2])) if parts[1] else None
    constructor = partial(SuperMario, name, level)
    check_options(name, constructor, options, extra=PIXEL_OPTIONS)
    own, pixels = split_options(options)
    pixels["shaping"] = _shaping(name, options.get("shaping"))
    env = built(name, constructor, own, named=constructor)
    try:
        return wrap_pixels(env, **pixels)
    except Exception:
        env.close()  # or it would keep the emulator
        raise


def _shaping(name: str, given: Any) -> Any:
    if given is None or callable(given) or (isinstance(given, str) and ":" in given):
        return given
    if given not in SHAPINGS:
        raise UserError(f"{name}: env.shaping={given!r}: allowed are none, usual and my.module:function")
    return SHAPINGS[given]

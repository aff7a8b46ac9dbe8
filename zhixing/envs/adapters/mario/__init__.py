"""Super Mario Bros. (NES): `mario/1-1` to `mario/8-4` are its levels, `mario` is the whole game.

Rewards, info and termination are those of gym-super-mario-bros, whose package also contains the game. All options of
`wrap_pixels` are available, with its defaults.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import gymnasium as gym

from zhixing.envs.adapters.mario.env import SuperMarioEnv
from zhixing.envs.adapters.mario.rules import score_shaping
from zhixing.envs.options import COMMON_OPTIONS, check_options, construct_env
from zhixing.envs.wrappers.frames import select_frame_options
from zhixing.envs.wrappers.pixels import IMAGE_OPTIONS, PIXEL_OPTIONS, split_options, wrap_frames, wrap_pixels
from zhixing.errors import UserError

__all__ = ["SuperMarioEnv", "make", "names", "score_shaping", "supports"]

NAME = re.compile(r"mario(?:/([1-8])-([1-4]))?")
SHAPINGS = {"none": None, "score": score_shaping}


def names() -> list[str]:
    return ["mario", *(f"mario/{world}-{stage}" for world in range(1, 9) for stage in range(1, 5))]


def supports(name: str) -> bool:
    return NAME.fullmatch(name) is not None


def make(name: str, options: dict[str, Any]) -> gym.Env[Any, Any]:
    match = NAME.fullmatch(name)
    assert match is not None
    level = (int(match[1]), int(match[2])) if match[1] else None
    constructor = partial(SuperMarioEnv, name, level)
    check_options(name, constructor, options, extra=PIXEL_OPTIONS)
    game_options, pixel_options = split_options(options)
    pixel_options["shaping"] = _resolve_shaping(name, options.get("shaping"))
    env = construct_env(name, constructor, game_options)
    try:
        if env.reads_ram:
            rest = {key: value for key, value in pixel_options.items() if key not in IMAGE_OPTIONS}
            return wrap_frames(env, pool="last", **rest)
        return wrap_pixels(env, **pixel_options)
    except Exception:
        env.close()  # frees the emulator
        raise


def own_options(name: str, options: dict[str, Any]) -> set[str]:
    own = set(COMMON_OPTIONS).intersection(PIXEL_OPTIONS)
    return own.difference(IMAGE_OPTIONS) if options.get("obs") == "ram" else own


def frame_options(options: dict[str, Any]) -> dict[str, Any] | None:
    """Return how observations are made from screens, for agents that act without the emulator; None with obs=ram."""
    return None if options.get("obs") == "ram" else select_frame_options(options)


def _resolve_shaping(name: str, shaping: Any) -> Any:
    if shaping is None or callable(shaping) or (isinstance(shaping, str) and ":" in shaping):
        return shaping
    if shaping not in SHAPINGS:
        raise UserError(f"{name}: env.shaping={shaping!r}: allowed are none, score and my.module:function")
    return SHAPINGS[shaping]

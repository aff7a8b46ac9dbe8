"""What the game's memory tells: reward, info and endings, as gym-super-mario-bros 7.4.0 defines them.

All are functions of RAM, the console's 2048 bytes (`bytes`, or an array of them), so that any emulator can be asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from zhixing.envs.vector.step_buffers import Array
from zhixing.envs.wrappers.pixels import Info

Ram = Sequence[int] | Array
Level = tuple[int, int]  # world and stage, both from 1

# where things are
STATE, FLOAT_STATE = 0x000E, 0x001D
ENEMIES = slice(0x0016, 0x001B)
PAGE, X, Y_SCREEN, Y = 0x006D, 0x0086, 0x00B5, 0x03B8
AREA_TIMER, STATUS, LIVES, STAGE, WORLD, AREA = 0x06DE, 0x0756, 0x075A, 0x075C, 0x075F, 0x0760
MODE, LEVEL_TIMER = 0x0770, 0x07A0
SCORE, COINS, TIME = slice(0x07DE, 0x07E4), slice(0x07ED, 0x07EF), slice(0x07F8, 0x07FB)  # a byte per digit

DEAD, DYING = 0x06, 0x0B  # of STATE
BUSY = frozenset({0, 1, 2, 3, 4, 5, 7})  # of STATE: climbing, in a pipe, walking by itself, entering
WORLD_OVER = 2  # of MODE
SLIDES = 3  # of FLOAT_STATE: down the pole, or a vine
GOALS = frozenset({0x2D, 0x31})  # of ENEMIES, Bowser and the flag: with one of them it isn't a vine
NO_LIFE = 0xFF  # of LIVES: they go 2, 1, 0 and then here

FASTEST = 5  # pixels per frame: a longer way is a change of place, not a walk
DEATH = -25.0
MOST_REWARD = 15.0
NAMES = ("coins", "flag_get", "life", "score", "stage", "status", "time", "world", "x_pos", "y_pos")  # in info


class Mark(NamedTuple):
    """What the next frame is compared with."""

    x: int
    time: int


def number(ram: Ram, digits: slice) -> int:
    total = 0
    for digit in bytes(ram[digits]):
        total = 10 * total + digit
    return total


def mark(ram: Ram) -> Mark:
    return Mark(int(ram[PAGE]) * 256 + int(ram[X]), number(ram, TIME))


def reward_of(ram: Ram, before: Mark) -> tuple[float, Mark]:
    """The way to the right, less the seconds that went by; death costs 25. Within -15 to 15. And what comes next is
    compared with."""
    now = mark(ram)
    way = now.x - before.x
    if abs(way) > FASTEST:
        way = 0
    ticks = min(now.time - before.time, 0)  # the clock is only ever set forward for a new life or level
    total = way + ticks + (DEATH if dying(ram) or dead(ram) else 0.0)
    return float(min(max(total, -MOST_REWARD), MOST_REWARD)), now


def info_of(ram: Ram) -> Info:
    height = 255 - int(ram[Y])
    return {
        "coins": number(ram, COINS),
        "flag_get": flag(ram),
        "life": int(ram[LIVES]),
        "score": number(ram, SCORE),
        "stage": int(ram[STAGE]) + 1,
        "status": {0: "small", 1: "tall"}.get(int(ram[STATUS]), "fireball"),
        "time": number(ram, TIME),
        "world": int(ram[WORLD]) + 1,
        "x_pos": mark(ram).x,
        "y_pos": height + (255 if int(ram[Y_SCREEN]) < 1 else 0),  # above the screen they count on
    }


def dying(ram: Ram) -> bool:
    return bool(ram[STATE] == DYING or ram[Y_SCREEN] > 1)  # or falling into a hole


def dead(ram: Ram) -> bool:
    return bool(ram[STATE] == DEAD)


def busy(ram: Ram) -> bool:
    return int(ram[STATE]) in BUSY


def world_over(ram: Ram) -> bool:
    return bool(ram[MODE] == WORLD_OVER)


def flag(ram: Ram) -> bool:
    """At the flag, or the axe behind Bowser."""
    return world_over(ram) or bool(ram[FLOAT_STATE] == SLIDES and not GOALS.isdisjoint(ram[ENEMIES]))


def over(ram: Ram, level: Level | None) -> bool:
    """A level ends with Mario's death or at its flag, the whole game with the last life; and, unlike in
    gym-super-mario-bros, which would wait forever, with the princess."""
    if level is not None:
        return dying(ram) or dead(ram) or flag(ram)
    return bool(ram[LIVES] == NO_LIFE or (world_over(ram) and ram[WORLD] == 7))


def area(level: Level) -> int:
    """Where the level lies in its world: in some worlds a walk into a pipe is a place of its own before stage 2."""
    world, stage = level
    return stage + (1 if world in (1, 2, 4, 7) and stage >= 2 else 0)


def usual_shaping(reward: float, info: Info, before: Info, terminated: bool) -> float:
    """Points count as well: (reward + points / 40, 50 more at the flag, 50 less at any other end) / 10."""
    reward += (info["score"] - before["score"]) / 40.0
    if info["flag_get"] and not before["flag_get"]:
        reward += 50.0
    elif terminated and not info["flag_get"]:
        reward -= 50.0
    return reward / 10.0


def read(ram: Ram, addresses: dict[str, int]) -> dict[str, Any]:
    """Further bytes, by name."""
    return {name: int(ram[address]) for name, address in addresses.items()}

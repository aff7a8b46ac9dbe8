"""Reward, info and termination of Super Mario Bros., as gym-super-mario-bros 7.4.0 defines them.

All functions read `ram`, the console's 2,048 bytes (`bytes` or an array), so they work with any emulator.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from zhixing.envs.vector.step_buffers import Array
from zhixing.envs.wrappers.stateful import Info

Ram = Sequence[int] | Array
Level = tuple[int, int]  # world and stage, both from 1

# RAM addresses
STATE, FLOAT_STATE = 0x000E, 0x001D
ENEMIES = slice(0x0016, 0x001B)
PAGE, X, Y_SCREEN, Y = 0x006D, 0x0086, 0x00B5, 0x03B8
AREA_TIMER, STATUS, LIVES, STAGE, WORLD, AREA = 0x06DE, 0x0756, 0x075A, 0x075C, 0x075F, 0x0760
MODE, LEVEL_TIMER = 0x0770, 0x07A0
SCORE, COINS, TIME = slice(0x07DE, 0x07E4), slice(0x07ED, 0x07EF), slice(0x07F8, 0x07FB)  # one byte per digit

# values at these addresses
DEAD, DYING = 0x06, 0x0B  # STATE
BUSY_STATES = frozenset({0, 1, 2, 3, 4, 5, 7})  # STATE: climbing, in a pipe, walking automatically, entering
WORLD_OVER = 2  # MODE
SLIDING = 3  # FLOAT_STATE: down the flagpole, or on a vine
GOAL_SPRITES = frozenset({0x2D, 0x31})  # ENEMIES: Bowser and the flag; without them SLIDING means a vine
NO_LIVES = 0xFF  # LIVES counts 2, 1, 0, 255

MAX_SPEED = 5  # pixels per frame; a larger difference is a teleport, such as a pipe
DEATH_PENALTY = -25.0
MAX_REWARD = 15.0
INFO_KEYS = ("coins", "flag_get", "life", "score", "stage", "status", "time", "world", "x_pos", "y_pos")


class Progress(NamedTuple):
    """Position and clock of one frame. The reward of the next frame is computed relative to it."""

    x: int
    time: int


def read_number(ram: Ram, digits: slice) -> int:
    number = 0
    for digit in bytes(ram[digits]):
        number = 10 * number + digit
    return number


def read_progress(ram: Ram) -> Progress:
    return Progress(int(ram[PAGE]) * 256 + int(ram[X]), read_number(ram, TIME))


def compute_reward(ram: Ram, previous: Progress) -> tuple[float, Progress]:
    """Return the reward of this frame, clipped to [-15, 15], and its progress.

    The reward is the distance moved to the right, minus the seconds elapsed, minus 25 for a death.
    """
    progress = read_progress(ram)
    distance = progress.x - previous.x
    if abs(distance) > MAX_SPEED:
        distance = 0
    ticks = min(progress.time - previous.time, 0)  # the clock only increases at a new life or level
    reward = distance + ticks + (DEATH_PENALTY if is_dying(ram) or is_dead(ram) else 0.0)
    return float(min(max(reward, -MAX_REWARD), MAX_REWARD)), progress


def read_info(ram: Ram) -> Info:
    height = 255 - int(ram[Y])
    return {
        "coins": read_number(ram, COINS),
        "flag_get": has_reached_flag(ram),
        "life": int(ram[LIVES]),
        "score": read_number(ram, SCORE),
        "stage": int(ram[STAGE]) + 1,
        "status": {0: "small", 1: "tall"}.get(int(ram[STATUS]), "fireball"),
        "time": read_number(ram, TIME),
        "world": int(ram[WORLD]) + 1,
        "x_pos": read_progress(ram).x,
        "y_pos": height + (255 if int(ram[Y_SCREEN]) < 1 else 0),  # above the screen
    }


def is_dying(ram: Ram) -> bool:
    return bool(ram[STATE] == DYING or ram[Y_SCREEN] > 1)  # below the screen: falling into a hole


def is_dead(ram: Ram) -> bool:
    return bool(ram[STATE] == DEAD)


def is_busy(ram: Ram) -> bool:
    return int(ram[STATE]) in BUSY_STATES


def is_world_over(ram: Ram) -> bool:
    return bool(ram[MODE] == WORLD_OVER)


def has_reached_flag(ram: Ram) -> bool:
    """Return whether Mario is at the flag, or at the axe behind Bowser."""
    return is_world_over(ram) or bool(ram[FLOAT_STATE] == SLIDING and not GOAL_SPRITES.isdisjoint(ram[ENEMIES]))


def is_terminated(ram: Ram, level: Level | None) -> bool:
    """Return whether the episode is over.

    A level ends at Mario's death or at the flag, the whole game at the loss of the last life or at the princess.
    gym-super-mario-bros never ends at the princess.
    """
    if level is not None:
        return is_dying(ram) or is_dead(ram) or has_reached_flag(ram)
    return bool(ram[LIVES] == NO_LIVES or (is_world_over(ram) and ram[WORLD] == 7))


def area_number(level: Level) -> int:
    """Return the number of the level's area in its world. In some worlds a walk into a pipe is an extra area 2."""
    world, stage = level
    return stage + (1 if world in (1, 2, 4, 7) and stage >= 2 else 0)


def score_shaping(reward: float, info: Info, previous_info: Info, terminated: bool) -> float:
    """Return (reward + score gained / 40, plus 50 at the flag or minus 50 at any other termination) / 10."""
    reward += (info["score"] - previous_info["score"]) / 40.0
    if info["flag_get"] and not previous_info["flag_get"]:
        reward += 50.0
    elif terminated and not info["flag_get"]:
        reward -= 50.0
    return reward / 10.0


def read_bytes(ram: Ram, addresses: dict[str, int]) -> dict[str, Any]:
    """Return the bytes at these addresses, by name."""
    return {name: int(ram[address]) for name, address in addresses.items()}

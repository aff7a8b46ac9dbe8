"""Observations from the console's memory: what surrounds Mario as grids of tiles, and positions and speeds.

The observation is a vector of `SIZE` numbers: three grids of 13 x 13 tiles around Mario (solid tiles and coins,
enemies, other objects such as lifts and mushrooms), then eight numbers about Mario, then four about each of six
objects.
"""

from __future__ import annotations

import numpy as np
from gymnasium.spaces import Box

from zhixing.envs.adapters.mario import rules
from zhixing.envs.vector.step_buffers import Array

TILE = 16  # pixels
GRID, BEHIND, ABOVE = 13, 3, 6  # sides of the grid, columns to the left of Mario, rows above him
LEVEL_ROWS, PAGE_COLUMNS, PAGES = 13, 16, 2  # of the tiles that memory holds: 32 columns, as a ring
OBJECTS = 6  # five enemies or lifts, and one mushroom, flower or star
NUMBERS_OF_MARIO, NUMBERS_PER_OBJECT = 8, 4
SIZE = 3 * GRID * GRID + NUMBERS_OF_MARIO + NUMBERS_PER_OBJECT * OBJECTS
LIMIT = 4.0  # all numbers are clipped to [-4, 4]

# RAM addresses
BUTTONS, SPEED_X, SPEED_Y, SWIMMING = 0x000A, 0x0057, 0x009F, 0x0704
Y_PAGE, Y_PIXEL = rules.Y_SCREEN, 0x00CE
TILES = slice(0x0500, 0x0500 + PAGES * LEVEL_ROWS * PAGE_COLUMNS)
# of the first object; those of the others follow
ACTIVE, KIND, OBJECT_SPEED_X = 0x000F, 0x0016, 0x0058
OBJECT_PAGE, OBJECT_X, OBJECT_Y_PAGE, OBJECT_Y = 0x006E, 0x0087, 0x00B6, 0x00CF
BUTTON_A = 0x80  # in BUTTONS: a jump starts only if A wasn't held before
HARMLESS = np.zeros(256, bool)  # KIND: lifts; power-ups, vines, flags and springs
HARMLESS[0x24:0x2D] = HARMLESS[0x2E:0x33] = True

MAX_RUN, MAX_FALL, MAX_OBJECT_SPEED, VIEW = 40.0, 5.0, 16.0, 128.0  # scales of speeds and distances


def observation_space() -> Box:
    return Box(-LIMIT, LIMIT, (SIZE,), np.float32)


def read_obs(ram: bytes) -> Array:
    """Return the observation `[SIZE]` for the console's 2,048 bytes."""
    memory = np.frombuffer(ram, np.uint8)
    x, _ = rules.read_progress(ram)
    y = (ram[Y_PAGE] - 1) * 256 + ram[Y_PIXEL]  # the top of big Mario, from the top of the screen
    objects = _read_objects(memory, x, y)
    obs = np.zeros(SIZE, np.float32)
    grids = obs[: 3 * GRID * GRID].reshape(3, GRID, GRID)
    grids[0] = _tiles_around(memory, x, y)
    _mark_objects(grids[1:], objects, HARMLESS[memory[KIND : KIND + OBJECTS]])
    obs[grids.size :] = [
        _signed(ram[SPEED_X]) / MAX_RUN,
        _signed(ram[SPEED_Y]) / MAX_FALL,
        ram[rules.FLOAT_STATE] == 0,  # on the ground
        x % TILE / TILE,
        y % TILE / TILE,
        min(ram[rules.STATUS], 2) / 2,
        ram[SWIMMING] != 0,
        ram[BUTTONS] & BUTTON_A != 0,
        *(objects * [1.0, 1.0 / VIEW, 1.0 / VIEW, 1.0 / MAX_OBJECT_SPEED]).ravel(),
    ]
    return obs.clip(-LIMIT, LIMIT)


def _read_objects(memory: Array, x: int, y: int) -> Array:
    """Return `[OBJECTS, 4]`: whether an object is active, its position relative to Mario in pixels, and its speed."""

    def read(address: int) -> Array:
        return memory[address : address + OBJECTS].astype(np.int64)

    distance_x = read(OBJECT_PAGE) * 256 + read(OBJECT_X) - x
    distance_y = (read(OBJECT_Y_PAGE) - 1) * 256 + read(OBJECT_Y) - y
    speed = memory[OBJECT_SPEED_X : OBJECT_SPEED_X + OBJECTS].view(np.int8)
    active = memory[ACTIVE : ACTIVE + OBJECTS] != 0
    return np.stack([np.ones(OBJECTS), distance_x, distance_y, speed], 1) * active[:, None]


def _tiles_around(memory: Array, x: int, y: int) -> Array:
    """Return where tiles are `[GRID, GRID]`. Rows above and below the level are empty."""
    pages = memory[TILES].reshape(PAGES, LEVEL_ROWS, PAGE_COLUMNS)
    rows = np.arange(GRID) - ABOVE + _mario_row(y)
    columns = (np.arange(GRID) - BEHIND + (x + TILE // 2) // TILE) % (PAGES * PAGE_COLUMNS)
    inside = (rows >= 0) & (rows < LEVEL_ROWS)
    tiles = pages[columns // PAGE_COLUMNS, rows.clip(0, LEVEL_ROWS - 1)[:, None], columns % PAGE_COLUMNS]
    return (tiles != 0) & inside[:, None]


def _mario_row(y: int) -> int:
    """Return the row of tiles of Mario's feet. The first row begins 32 pixels below the top of the screen."""
    return (y + TILE // 2) // TILE - 1


def _mark_objects(grids: Array, objects: Array, harmless: Array) -> None:
    """Mark active objects in the grids `[2, GRID, GRID]` of enemies and of harmless objects."""
    for (active, distance_x, distance_y, _), grid in zip(objects, harmless.astype(int), strict=True):
        column = int(distance_x + TILE // 2) // TILE + BEHIND
        row = int(distance_y) // TILE + ABOVE
        if active and 0 <= row < GRID and 0 <= column < GRID:
            grids[grid, row, column] = 1.0


def _signed(byte: int) -> int:
    return byte - 256 if byte >= 128 else byte

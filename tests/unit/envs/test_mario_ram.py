"""`env.obs=ram`: grids and numbers from the console's memory, on memory written by hand and in the game."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from zhixing.envs.adapters.mario import ram_obs, rules
from zhixing.envs.adapters.mario.ram_obs import ABOVE, BEHIND, GRID, SIZE

GRIDS = 3 * GRID * GRID
SPEED_X, SPEED_Y, ON_GROUND, X_IN_TILE, Y_IN_TILE, POWER, SWIMS, HOLDS_JUMP = range(GRIDS, GRIDS + 8)


@pytest.fixture
def memory() -> bytearray:
    """Mario at x = 300 and y = 176, which is on the ground: in column 19 (308 // 16) and row 10 of the tiles."""
    ram = bytearray(2048)
    ram[rules.PAGE], ram[rules.X] = 1, 44
    ram[ram_obs.Y_PAGE], ram[ram_obs.Y_PIXEL] = 1, 176
    return ram


def grids(ram: bytearray) -> Any:
    return ram_obs.read_obs(bytes(ram))[:GRIDS].reshape(3, GRID, GRID)


def place(ram: bytearray, slot: int, kind: int, x: int, y: int) -> None:
    ram[ram_obs.ACTIVE + slot], ram[ram_obs.KIND + slot] = 1, kind
    ram[ram_obs.OBJECT_PAGE + slot], ram[ram_obs.OBJECT_X + slot] = divmod(x, 256)
    ram[ram_obs.OBJECT_Y_PAGE + slot], ram[ram_obs.OBJECT_Y + slot] = 1, y


def test_tiles_are_relative_to_mario_and_wrap_around(memory: bytearray) -> None:
    def address(column: int, row: int) -> int:
        return 0x500 + column // 16 % 2 * 208 + row * 16 + column % 16

    memory[address(20, 11)] = 0x54  # ground one column to the right, one row below
    memory[address(16, 10)] = 0x10  # three columns to the left
    tiles = np.argwhere(grids(memory)[0]).tolist()
    assert sorted(tiles) == [[ABOVE, 0], [ABOVE + 1, BEHIND + 1]]

    memory[rules.PAGE], memory[rules.X] = 1, 248  # column 32: the ring has 32 columns, so column 33 is column 1
    memory[address(33, 10)] = 0x10
    assert grids(memory)[0][ABOVE, BEHIND + 1] == 1
    assert address(33, 10) == address(1, 10)


def test_no_tile_is_above_or_below_the_level(memory: bytearray) -> None:
    for address in range(0x500, 0x6A0):
        memory[address] = 1
    filled = grids(memory)[0].any(1).tolist()
    assert filled == [True] * 9 + [False] * 4  # Mario is in row 10 of 0 to 12, at index 6: rows 4 to 12 are inside


def test_enemies_and_harmless_objects_have_their_own_grids(memory: bytearray) -> None:
    place(memory, 0, 0x06, 300 + 33, 184)  # a Goomba on the ground, two columns to the right
    place(memory, 1, 0x26, 300 - 16, 184 - 32)  # a lift
    place(memory, 5, 0x2E, 300 + 64, 184)  # a mushroom
    place(memory, 2, 0x06, 300 + 500, 184)  # too far away
    _, enemies, harmless = grids(memory)
    assert np.argwhere(enemies).tolist() == [[ABOVE, BEHIND + 2]]
    assert sorted(np.argwhere(harmless).tolist()) == [[ABOVE - 2, BEHIND - 1], [ABOVE, BEHIND + 4]]
    numbers = ram_obs.read_obs(bytes(memory))[GRIDS + 8 :].reshape(6, 4)
    assert numbers[0].tolist() == [1.0, 33 / 128, 8 / 128, 0.0]
    assert numbers[2, 1] == pytest.approx(500 / 128)
    assert not numbers[3].any()  # not active


def test_numbers_of_mario(memory: bytearray) -> None:
    memory[ram_obs.SPEED_X], memory[ram_obs.SPEED_Y] = 0xD8, 0xFB  # -40 and -5: running left, rising
    memory[rules.FLOAT_STATE], memory[rules.STATUS], memory[ram_obs.BUTTONS] = 1, 2, 0xC0
    obs = ram_obs.read_obs(bytes(memory))
    assert obs.shape == (SIZE,)
    assert obs[[SPEED_X, SPEED_Y, ON_GROUND, POWER, SWIMS, HOLDS_JUMP]].tolist() == [-1, -1, 0, 1, 0, 1]
    assert obs[[X_IN_TILE, Y_IN_TILE]].tolist() == [12 / 16, 0]  # 300 = 18 * 16 + 12


def test_observations_in_the_game_show_the_ground_and_the_first_enemy() -> None:
    pytest.importorskip("gym_super_mario_bros")
    pytest.importorskip("stable_retro")
    from zhixing.envs import make

    env = make("mario/1-1", obs="ram", size=64, render_mode="rgb_array")  # the preset's size has no effect
    obs, _ = env.reset(seed=0)
    assert env.observation_space.contains(obs)
    tiles = obs[:GRIDS].reshape(3, GRID, GRID)[0]
    assert tiles[ABOVE + 1 : ABOVE + 3].all()  # two rows of ground
    assert obs[ON_GROUND] == 1
    for _ in range(20):
        obs, *_ = env.step(3)
        if obs[GRID * GRID : 2 * GRID * GRID].any():
            break
    assert obs[GRID * GRID : 2 * GRID * GRID].any()  # a Goomba
    assert obs[SPEED_X] > 0
    assert env.render().shape == (224, 240, 3)
    env.close()
    stacked = make("mario/1-1", obs="ram", stack=2)
    first, _ = stacked.reset(seed=0)
    assert first.size == 2 * SIZE
    stacked.close()


def test_unknown_observation_is_rejected() -> None:
    pytest.importorskip("gym_super_mario_bros")
    from zhixing.envs import make
    from zhixing.errors import UserError

    with pytest.raises(UserError, match=r"env\.obs='memory': allowed are pixels, ram"):
        make("mario/1-1", obs="memory")

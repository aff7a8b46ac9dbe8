"""Connect four on bitboards: PettingZoo's `connect_four`, many games at once.

A state is two integers `[N,2]`: the stones of the player to move, and those of both. Column c has the bits from 7c on,
its lowest cell first; the seventh stays empty, so that no line goes on from one column into the next.
"""

from __future__ import annotations

import numpy as np

from zhixing.envs.vector.step_buffers import Array
from zhixing.search.bits import count_bits

ROWS, COLUMNS = 6, 7
CELLS = ROWS * COLUMNS
SIDE = ROWS + 1  # bits of a column
FULL_COLUMN = (1 << ROWS) - 1
BOTTOM = sum(1 << SIDE * column for column in range(COLUMNS))
BOARD = BOTTOM * FULL_COLUMN
TOPS = np.array([1 << SIDE * column + ROWS - 1 for column in range(COLUMNS)])
COLUMN = np.array([FULL_COLUMN << SIDE * column for column in range(COLUMNS)])
STEPS = np.array([1, SIDE, SIDE + 1, SIDE - 1])  # bits between neighbours: upwards, to the right, along both diagonals
# the bit of each cell as PettingZoo shows them: its first row is the highest
PLACE = np.array([[SIDE * column + ROWS - 1 - row for column in range(COLUMNS)] for row in range(ROWS)], np.int64)
GRID = np.arange(CELLS).reshape(ROWS, COLUMNS)
# playouts number the cells from the lowest row upwards
RISING = PLACE[::-1]
STONE = 1 << RISING.reshape(-1)
NEVER = 1e300  # later than any time that a playout draws
NUMBER_BITS = 63  # where a time holds the number of its cell
CHUNK = 96  # playouts at once: arrays of more games leave the cache, and each costs three times as much


class ConnectFour:
    name = "pettingzoo/connect_four"
    num_players = 2
    gamma = 1.0
    num_actions = COLUMNS
    obs_shape: tuple[int, ...] = (ROWS, COLUMNS, 2)
    max_moves = CELLS
    cell_symmetries = np.stack([GRID.reshape(-1), GRID[:, ::-1].reshape(-1)])  # as it is, mirrored
    action_symmetries = np.stack([np.arange(COLUMNS), np.arange(COLUMNS)[::-1]])

    def start(self, num: int) -> Array:
        return np.zeros((num, 2), np.int64)

    def legal(self, state: Array) -> Array:
        return (state[:, 1, None] & TOPS) == 0

    def play(self, state: Array, action: Array) -> tuple[Array, Array, Array]:
        own, taken = state[:, 0], state[:, 1]
        stone = (taken + BOTTOM) & COLUMN.take(action)  # of each column the lowest free cell, of these the chosen one
        after = np.empty_like(state)
        np.bitwise_xor(own, taken, out=after[:, 0])
        np.bitwise_or(taken, stone, out=after[:, 1])
        won = has_line(own | stone)
        return after, won.astype(np.float32), won | (after[:, 1] == BOARD)

    def over(self, state: Array) -> Array:
        own, taken = state[:, 0], state[:, 1]
        return has_line(own ^ taken) | has_line(own) | (taken == BOARD)

    def to_move(self, state: Array) -> Array:
        return count_bits(state[:, 1]) & 1

    def observe(self, state: Array) -> Array:
        stones = state[:, None, None].copy()
        stones[..., 1] ^= stones[..., 0]
        return (stones >> PLACE[..., None] & 1).astype(np.int8)

    def from_obs(self, obs: Array) -> Array:
        stones: Array = (obs.astype(np.int64) << PLACE[..., None]).sum((1, 2))  # [N,2]
        stones[:, 1] |= stones[:, 0]
        return stones

    def playout(self, state: Array, rng: np.random.Generator) -> Array:
        """All moves at once. Where each column gets its next stone after an exponential delay, the next of all falls
        into any column that isn't full with the same chance: the order of play is one sort of the cells by their times.
        The winner is who has a line first among the positions on the way."""
        num = len(state)
        if num > CHUNK:
            return np.concatenate([self.playout(state[i : i + CHUNK], rng) for i in range(0, num, CHUNK)])
        own, taken = state[:, 0], state[:, 1]
        before = (taken[:, None] >> RISING[:, None] & 1).astype(bool)  # [6,N,7]
        time = rng.standard_exponential((ROWS, num, COLUMNS))
        time[before] = 0.0
        for row in range(1, ROWS):
            time[row] += time[row - 1]
        time[before] = NEVER
        by_game = np.ascontiguousarray(time.transpose(1, 0, 2)).reshape(num, CELLS)
        key = by_game.view(np.int64) & ~NUMBER_BITS | np.arange(CELLS)  # positive floats sort as integers do
        key.sort(-1)
        stones = STONE.take(key & NUMBER_BITS)  # [N,42] in the order of play
        stones[:, 0] |= own
        stones[:, 1] |= own ^ taken
        boards = np.bitwise_or.accumulate(stones.reshape(num, -1, 2), 1)  # after each move of the one and the other
        lines = has_line(boards).reshape(num, CELLS)
        first = lines.argmax(1)
        free = CELLS - count_bits(taken)  # what comes later are the cells taken before
        won = lines.any(1) & (first < free)
        return won * (1.0 - 2.0 * (first & 1))


def has_line(stones: Array) -> Array:
    """Whether there are four in a row: pairs of neighbours that have such a pair two further on."""
    step = STEPS.reshape(4, *[1] * stones.ndim)
    pairs = stones & stones >> step
    pairs &= pairs >> 2 * step
    return np.bitwise_or.reduce(pairs) != 0

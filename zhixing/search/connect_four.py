"""Connect four on bitboards: PettingZoo's `connect_four`, for a batch of games.

A state is two integers `[N,2]`: the stones of the player to move, and the stones of both players. Column c has the bits
from 7c on, lowest cell first. Its seventh bit stays empty, so no line continues from one column into the next.
"""

from __future__ import annotations

import numpy as np

from zhixing.envs.vector.step_buffers import Array
from zhixing.search.bitboard import popcount
from zhixing.search.board_game import TwoPlaneGame

ROWS, COLUMNS = 6, 7
CELLS = ROWS * COLUMNS
COLUMN_BITS = ROWS + 1
FULL_COLUMN = (1 << ROWS) - 1
BOTTOM = sum(1 << COLUMN_BITS * column for column in range(COLUMNS))
BOARD = BOTTOM * FULL_COLUMN
TOPS = np.array([1 << COLUMN_BITS * column + ROWS - 1 for column in range(COLUMNS)])
COLUMN = np.array([FULL_COLUMN << COLUMN_BITS * column for column in range(COLUMNS)])
DIRECTIONS = np.array([1, COLUMN_BITS, COLUMN_BITS + 1, COLUMN_BITS - 1])  # bit offsets: up, right, both diagonals
# the bit of each cell in PettingZoo's layout, whose first row is the highest
CELL_BIT = np.array(
    [[COLUMN_BITS * column + ROWS - 1 - row for column in range(COLUMNS)] for row in range(ROWS)], np.int64
)
GRID = np.arange(CELLS).reshape(ROWS, COLUMNS)
# playouts number the cells from the lowest row upwards
PLAYOUT_BIT = CELL_BIT[::-1]
PLAYOUT_STONE = 1 << PLAYOUT_BIT.reshape(-1)
NEVER = 1e300  # greater than any sampled time
CELL_MASK = 63  # low bits of a time, which hold the number of its cell
CHUNK = 96  # playouts at once: larger arrays exceed the CPU cache, which triples the time per playout


class ConnectFour(TwoPlaneGame):
    name = "pettingzoo/connect_four"
    num_actions = COLUMNS
    obs_shape: tuple[int, ...] = (ROWS, COLUMNS, 2)
    max_moves = CELLS
    cell_symmetries = np.stack([GRID.reshape(-1), GRID[:, ::-1].reshape(-1)])  # identity, mirrored
    action_symmetries = np.stack([np.arange(COLUMNS), np.arange(COLUMNS)[::-1]])

    def initial_states(self, num: int) -> Array:
        return np.zeros((num, 2), np.int64)

    def legal_actions(self, state: Array) -> Array:
        return (state[:, 1, None] & TOPS) == 0

    def play(self, state: Array, action: Array) -> tuple[Array, Array, Array]:
        player, both = state[:, 0], state[:, 1]
        stone = (both + BOTTOM) & COLUMN.take(action)  # the lowest free cell of the chosen column
        after = np.empty_like(state)
        np.bitwise_xor(player, both, out=after[:, 0])
        np.bitwise_or(both, stone, out=after[:, 1])
        won = has_line(player | stone)
        return after, won.astype(np.float32), won | (after[:, 1] == BOARD)

    def is_over(self, state: Array) -> Array:
        player, both = state[:, 0], state[:, 1]
        return has_line(player ^ both) | has_line(player) | (both == BOARD)

    def current_player(self, state: Array) -> Array:
        return popcount(state[:, 1]) & 1

    def observe(self, state: Array) -> Array:
        stones = state[:, None, None].copy()
        stones[..., 1] ^= stones[..., 0]
        return (stones >> CELL_BIT[..., None] & 1).astype(np.int8)

    def from_obs(self, obs: Array) -> Array:
        stones: Array = (obs.astype(np.int64) << CELL_BIT[..., None]).sum((1, 2))  # [N,2]
        stones[:, 1] |= stones[:, 0]
        return stones

    def playout(self, state: Array, rng: np.random.Generator) -> Array:
        """Play all moves at once.

        Each column gets its next stone after an exponential delay, so the next stone falls into any column that isn't
        full with equal probability, and sorting the cells by time gives the order of play. The first player to complete
        a line on the way wins.
        """
        num = len(state)
        if num > CHUNK:
            return np.concatenate([self.playout(state[i : i + CHUNK], rng) for i in range(0, num, CHUNK)])
        player, both = state[:, 0], state[:, 1]
        occupied = (both[:, None] >> PLAYOUT_BIT[:, None] & 1).astype(bool)  # [6,N,7]
        time = rng.standard_exponential((ROWS, num, COLUMNS))
        time[occupied] = 0.0
        for row in range(1, ROWS):
            time[row] += time[row - 1]
        time[occupied] = NEVER
        by_game = np.ascontiguousarray(time.transpose(1, 0, 2)).reshape(num, CELLS)
        key = by_game.view(np.int64) & ~CELL_MASK | np.arange(CELLS)  # positive floats sort as integers do
        key.sort(-1)
        stones = PLAYOUT_STONE.take(key & CELL_MASK)  # [N,42] in the order of play
        stones[:, 0] |= player
        stones[:, 1] |= player ^ both
        boards = np.bitwise_or.accumulate(
            stones.reshape(num, -1, 2), 1
        )  # each player's stones after each of their moves
        lines = has_line(boards).reshape(num, CELLS)
        first = lines.argmax(1)
        num_free = CELLS - popcount(both)  # the occupied cells come after these
        won = lines.any(1) & (first < num_free)
        return won * (1.0 - 2.0 * (first & 1))


def has_line(stones: Array) -> Array:
    """Return whether there are four in a row: a pair of neighbors, and another pair two cells further."""
    step = DIRECTIONS.reshape(4, *[1] * stones.ndim)
    pairs = stones & stones >> step
    pairs &= pairs >> 2 * step
    return np.bitwise_or.reduce(pairs) != 0

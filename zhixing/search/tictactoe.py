"""Tic-tac-toe on bitboards: PettingZoo's `tictactoe`, many games at once.

A state is two integers `[N,2]`: the marks of the player to move, and those of both. Bit i is cell i of PettingZoo's
board, which is also action i.
"""

from __future__ import annotations

import numpy as np

from zhixing.envs.vector.step_buffers import Array
from zhixing.search.bits import count_bits

SIDE = 3
CELLS = SIDE * SIDE
BOARD = (1 << CELLS) - 1
BITS = 1 << np.arange(CELLS, dtype=np.int64)
GRID = np.arange(CELLS).reshape(SIDE, SIDE)
LINES = [*GRID, *GRID.T, GRID.diagonal(), GRID[:, ::-1].diagonal()]
# of each of the 512 sets of marks whether there is a line among them
HAS_LINE = np.array([any(all(marks >> cell & 1 for cell in line) for line in LINES) for marks in range(1 << CELLS)])
TURNS = [np.rot90(grid, turns).reshape(-1) for grid in (GRID, GRID.T) for turns in range(4)]


class TicTacToe:
    name = "pettingzoo/tictactoe"
    num_players = 2
    gamma = 1.0
    num_actions = CELLS
    obs_shape: tuple[int, ...] = (SIDE, SIDE, 2)
    max_moves = CELLS
    cell_symmetries = action_symmetries = np.stack(TURNS)

    def start(self, num: int) -> Array:
        return np.zeros((num, 2), np.int64)

    def legal(self, state: Array) -> Array:
        return (state[:, 1, None] & BITS) == 0

    def play(self, state: Array, action: Array) -> tuple[Array, Array, Array]:
        own, taken = state[:, 0], state[:, 1]
        mark = BITS.take(action)
        after = np.stack([own ^ taken, taken | mark], 1)
        won = HAS_LINE.take(own | mark)
        return after, won.astype(np.float32), won | (after[:, 1] == BOARD)

    def over(self, state: Array) -> Array:
        own, taken = state[:, 0], state[:, 1]
        return HAS_LINE.take(own ^ taken) | HAS_LINE.take(own) | (taken == BOARD)

    def to_move(self, state: Array) -> Array:
        return count_bits(state[:, 1]) & 1

    def observe(self, state: Array) -> Array:
        marks = state[:, None].copy()
        marks[..., 1] ^= marks[..., 0]
        return (marks >> np.arange(CELLS)[:, None] & 1).astype(np.int8).reshape(-1, *self.obs_shape)

    def from_obs(self, obs: Array) -> Array:
        marks: Array = (obs.reshape(-1, CELLS, 2).astype(np.int64) * BITS[:, None]).sum(1)  # [N,2]
        marks[:, 1] |= marks[:, 0]
        return marks

    def playout(self, state: Array, rng: np.random.Generator) -> Array:
        """All moves at once: the free cells in random order, and who has a line first on the way."""
        own, taken = state[:, 0], state[:, 1]
        before = (taken[:, None] >> np.arange(CELLS) & 1).astype(bool)
        marks = BITS.take((rng.random(before.shape) + before).argsort(-1))  # [N,9] in the order of play
        mine, its = marks.copy(), marks
        mine[:, 1::2], its[:, ::2] = 0, 0
        mine[:, 0] |= own
        its[:, 0] |= own ^ taken
        mine, its = (HAS_LINE.take(np.bitwise_or.accumulate(boards, 1)) for boards in (mine, its))
        first = (mine | its).argmax(1)
        won = (mine | its).any(1) & (first < CELLS - count_bits(taken))
        return won * (1.0 - 2.0 * (first & 1))

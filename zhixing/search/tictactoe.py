"""Tic-tac-toe on bitboards: PettingZoo's `tictactoe`, for a batch of games.

A state is two integers `[N,2]`: the marks of the player to move, and the marks of both players. Bit i is cell i of
PettingZoo's board, which is also action i.
"""

from __future__ import annotations

import numpy as np

from zhixing.envs.vector.step_buffers import Array
from zhixing.search.bitboard import popcount
from zhixing.search.board_game import TwoPlaneGame

SIDE = 3
CELLS = SIDE * SIDE
BOARD = (1 << CELLS) - 1
BITS = 1 << np.arange(CELLS, dtype=np.int64)
GRID = np.arange(CELLS).reshape(SIDE, SIDE)
LINES = [*GRID, *GRID.T, GRID.diagonal(), GRID[:, ::-1].diagonal()]
# for each of the 512 sets of marks, whether it contains a line
HAS_LINE = np.array([any(all(marks >> cell & 1 for cell in line) for line in LINES) for marks in range(1 << CELLS)])
SYMMETRIES = [np.rot90(grid, k).reshape(-1) for grid in (GRID, GRID.T) for k in range(4)]


class TicTacToe(TwoPlaneGame):
    name = "pettingzoo/tictactoe"
    num_actions = CELLS
    obs_shape: tuple[int, ...] = (SIDE, SIDE, 2)
    max_moves = CELLS
    cell_symmetries = action_symmetries = np.stack(SYMMETRIES)

    def initial_states(self, num: int) -> Array:
        return np.zeros((num, 2), np.int64)

    def legal_actions(self, state: Array) -> Array:
        return (state[:, 1, None] & BITS) == 0

    def play(self, state: Array, action: Array) -> tuple[Array, Array, Array]:
        player, both = state[:, 0], state[:, 1]
        mark = BITS.take(action)
        after = np.stack([player ^ both, both | mark], 1)
        won = HAS_LINE.take(player | mark)
        return after, won.astype(np.float32), won | (after[:, 1] == BOARD)

    def is_over(self, state: Array) -> Array:
        player, both = state[:, 0], state[:, 1]
        return HAS_LINE.take(player ^ both) | HAS_LINE.take(player) | (both == BOARD)

    def current_player(self, state: Array) -> Array:
        return popcount(state[:, 1]) & 1

    def observe(self, state: Array) -> Array:
        marks = state[:, None].copy()
        marks[..., 1] ^= marks[..., 0]
        return (marks >> np.arange(CELLS)[:, None] & 1).astype(np.int8).reshape(-1, *self.obs_shape)

    def from_obs(self, obs: Array) -> Array:
        marks: Array = (obs.reshape(-1, CELLS, 2).astype(np.int64) * BITS[:, None]).sum(1)  # [N,2]
        marks[:, 1] |= marks[:, 0]
        return marks

    def playout(self, state: Array, rng: np.random.Generator) -> Array:
        """Play all moves at once: shuffle the free cells and find the first player to complete a line."""
        player, both = state[:, 0], state[:, 1]
        occupied = (both[:, None] >> np.arange(CELLS) & 1).astype(bool)
        marks = BITS.take((rng.random(occupied.shape) + occupied).argsort(-1))  # [N,9] in the order of play
        player_marks, opponent_marks = marks.copy(), marks
        player_marks[:, 1::2], opponent_marks[:, ::2] = 0, 0
        player_marks[:, 0] |= player
        opponent_marks[:, 0] |= player ^ both
        lines = HAS_LINE.take(np.bitwise_or.accumulate(player_marks, 1))
        lines |= HAS_LINE.take(np.bitwise_or.accumulate(opponent_marks, 1))
        first = lines.argmax(1)
        won = lines.any(1) & (first < CELLS - popcount(both))
        return won * (1.0 - 2.0 * (first & 1))

"""Perfect play by exhaustive search: tic-tac-toe has 5,478 positions."""

from __future__ import annotations

import numpy as np

from zhixing.envs.vector.step_buffers import Array
from zhixing.errors import UserError
from zhixing.search.board_game import BoardGame
from zhixing.search.tictactoe import CELLS, TicTacToe

IMPOSSIBLE = 2  # the value of unreachable positions


class PerfectPlayer:
    """Choose uniformly among the best moves.

    `values [512,512]` holds the value of every position for the player to move, indexed by the marks of that player and
    the marks of both players.
    """

    def __init__(self, game: BoardGame) -> None:
        if not isinstance(game, TicTacToe):
            raise UserError(f"{game.name} has too many positions for perfect play; {TicTacToe.name} has few enough")
        self.game: BoardGame = game
        self.values: Array = np.full((1 << CELLS, 1 << CELLS), IMPOSSIBLE, np.int8)
        levels = [game.initial_states(1)]  # unfinished positions by number of moves
        while len(levels[-1]):
            row, action = np.nonzero(game.legal_actions(levels[-1]))
            after, reward, ended = game.play(levels[-1][row], action)
            self.values[tuple(after[ended].T)] = -reward[ended]
            levels.append(np.unique(after[~ended], axis=0))
        for state in reversed(levels[:-1]):
            self.values[tuple(state.T)] = self.action_values(state).max(-1)

    def choose(self, state: Array, rng: np.random.Generator) -> Array:
        values = self.action_values(state)
        best = values == values.max(-1, keepdims=True)
        return np.where(best, rng.random(best.shape), -1.0).argmax(-1)

    def action_values(self, state: Array) -> Array:
        """Return the value `[N,n]` of each action under perfect play; below -1 for illegal actions."""
        values = np.full((len(state), CELLS), -IMPOSSIBLE, np.int8)
        row, action = np.nonzero(self.game.legal_actions(state))
        after, _, _ = self.game.play(state[row], action)
        values[row, action] = -self.values[tuple(after.T)]
        return values

"""Perfect play by trying everything: tic-tac-toe has 5,478 positions."""

from __future__ import annotations

import numpy as np

from zhixing.envs.vector.step_buffers import Array
from zhixing.errors import UserError
from zhixing.search.games import Game
from zhixing.search.tictactoe import CELLS, TicTacToe

IMPOSSIBLE = 2  # the value of marks that no game leads to


class PerfectPlayer:
    """Any of the best moves, with equal chances.

    `values [512,512]` are those of all positions for the player to move, by the marks of that player and of both.
    """

    def __init__(self, game: Game) -> None:
        if not isinstance(game, TicTacToe):
            raise UserError(f"{game.name} has too many positions for perfect play; {TicTacToe.name} has few enough")
        self.game: Game = game
        self.values: Array = np.full((1 << CELLS, 1 << CELLS), IMPOSSIBLE, np.int8)
        levels = [game.start(1)]  # those that come up after as many moves, and at which it isn't over
        while len(levels[-1]):
            row, action = np.nonzero(game.legal(levels[-1]))
            after, reward, ended = game.play(levels[-1][row], action)
            self.values[tuple(after[ended].T)] = -reward[ended]
            levels.append(np.unique(after[~ended], axis=0))
        for state in reversed(levels[:-1]):
            self.values[tuple(state.T)] = self.action_values(state).max(-1)

    def choose(self, state: Array, rng: np.random.Generator) -> Array:
        worth = self.action_values(state)
        best = worth == worth.max(-1, keepdims=True)
        return np.where(best, rng.random(best.shape), -1.0).argmax(-1)

    def action_values(self, state: Array) -> Array:
        """What each action `[N,n]` earns when both play perfectly on; less than a loss where it is illegal."""
        worth = np.full((len(state), CELLS), -IMPOSSIBLE, np.int8)
        row, action = np.nonzero(self.game.legal(state))
        after, _, _ = self.game.play(state[row], action)
        worth[row, action] = -self.values[tuple(after.T)]
        return worth

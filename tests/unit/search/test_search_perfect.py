"""Tests of perfect play."""

from __future__ import annotations

import numpy as np
import pytest

from zhixing.errors import UserError
from zhixing.search.games import make_game
from zhixing.search.match import play_match
from zhixing.search.perfect import IMPOSSIBLE, PerfectPlayer
from zhixing.search.players import RandomPlayer, mcts_player

GAME = make_game("pettingzoo/tictactoe")
PERFECT = PerfectPlayer(GAME)


def minimax(state: np.ndarray) -> int:
    """Return the value of a position by plain recursion."""
    best = -2
    for action in np.flatnonzero(GAME.legal_actions(state)[0]):
        after, reward, ended = GAME.play(state, np.array([action]))
        best = max(best, int(reward[0]) if ended[0] else -minimax(after))
    return best


def test_values_of_all_positions() -> None:
    assert (PERFECT.values != IMPOSSIBLE).sum() == 5478  # the known number of positions of tic-tac-toe
    assert PERFECT.values[0, 0] == 0
    assert [(PERFECT.values == value).sum() for value in (1, 0, -1)] == [2836, 1068, 1574]  # also known
    rng = np.random.default_rng(0)
    for _ in range(60):
        state = GAME.initial_states(1)
        for _ in range(rng.integers(2, 6)):
            action = rng.choice(np.flatnonzero(GAME.legal_actions(state)[0]))
            after, _, ended = GAME.play(state, np.array([action]))
            if ended[0]:
                break
            state = after
        assert PERFECT.values[tuple(state[0])] == minimax(state)


def test_chooses_uniformly_among_the_best_moves() -> None:
    rng = np.random.default_rng(0)
    corner, _, _ = GAME.play(GAME.initial_states(1), np.array([0]))
    # the only answer to a corner is the center; all first moves are equally good
    assert set(PERFECT.choose(corner.repeat(200, 0), rng)) == {4}
    first = np.bincount(PERFECT.choose(GAME.initial_states(4500), rng), minlength=9)
    assert first.min() > 400
    assert first.max() < 600  # 500 each, standard deviation 21


@pytest.mark.parametrize("opponent", [RandomPlayer(GAME), mcts_player(GAME, 100), PERFECT])
def test_never_loses(opponent: object) -> None:
    result = play_match(GAME, PERFECT, opponent, 400, np.random.default_rng(0))  # type: ignore[arg-type]
    assert result.losses == 0
    if opponent is PERFECT:
        assert result.draws == 400
    elif isinstance(opponent, RandomPlayer):
        assert result.as_first.wins > 190
        assert result.as_second.wins > 150


def test_larger_games_are_rejected() -> None:
    with pytest.raises(UserError, match="pettingzoo/connect_four has too many positions"):
        PerfectPlayer(make_game("pettingzoo/connect_four"))

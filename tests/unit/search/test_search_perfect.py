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
    """One position at a time, without memory."""
    best = -2
    for action in np.flatnonzero(GAME.legal(state)[0]):
        after, reward, ended = GAME.play(state, np.array([action]))
        best = max(best, int(reward[0]) if ended[0] else -minimax(after))
    return best


def test_knows_all_positions() -> None:
    assert (PERFECT.values != IMPOSSIBLE).sum() == 5478  # the number known of tic-tac-toe
    assert PERFECT.values[0, 0] == 0
    assert [(PERFECT.values == value).sum() for value in (1, 0, -1)] == [2836, 1068, 1574]  # and of these
    rng = np.random.default_rng(0)
    for _ in range(60):
        state = GAME.start(1)
        for _ in range(rng.integers(2, 6)):
            action = rng.choice(np.flatnonzero(GAME.legal(state)[0]))
            after, _, ended = GAME.play(state, np.array([action]))
            if ended[0]:
                break
            state = after
        assert PERFECT.values[tuple(state[0])] == minimax(state)


def test_picks_all_best_moves_and_no_other() -> None:
    rng = np.random.default_rng(0)
    corner, _, _ = GAME.play(GAME.start(1), np.array([0]))
    # the only answer to a corner is the middle; every first move is as good as the others
    assert set(PERFECT.choose(corner.repeat(200, 0), rng)) == {4}
    first = np.bincount(PERFECT.choose(GAME.start(4500), rng), minlength=9)
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


def test_larger_games_are_refused() -> None:
    with pytest.raises(UserError, match="pettingzoo/connect_four has too many positions"):
        PerfectPlayer(make_game("pettingzoo/connect_four"))

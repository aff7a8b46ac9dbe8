"""Matches between players, and Elo ratings from their results."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from zhixing.envs.vector.step_buffers import Array
from zhixing.errors import UserError, unknown
from zhixing.search.board_game import BoardGame, random_action
from zhixing.search.players import Player


class Tally(NamedTuple):
    wins: int
    draws: int
    losses: int


@dataclass(frozen=True, eq=False)
class MatchResult:
    """Results from the player's perspective: `outcomes [E]` (1, 0 or -1), the player's `seats [E]` (0 moves first) and
    the `lengths [E]` of the games in moves."""

    outcomes: Array
    seats: Array
    lengths: Array

    @property
    def as_first(self) -> Tally:
        return self._tally(self.seats == 0)

    @property
    def as_second(self) -> Tally:
        return self._tally(self.seats == 1)

    def _tally(self, games: Array) -> Tally:
        return Tally(*(int((self.outcomes[games] == sign).sum()) for sign in (1, 0, -1)))

    @property
    def wins(self) -> int:
        return self.as_first.wins + self.as_second.wins

    @property
    def draws(self) -> int:
        return self.as_first.draws + self.as_second.draws

    @property
    def losses(self) -> int:
        return self.as_first.losses + self.as_second.losses

    @property
    def episodes(self) -> int:
        return len(self.outcomes)

    @property
    def score(self) -> float:
        """Return the points per game: a win counts 1, a draw 0.5."""
        return (self.wins + 0.5 * self.draws) / self.episodes


def play_match(
    game: BoardGame,
    player: Player,
    opponent: Player,
    episodes: int,
    rng: np.random.Generator,
    opening_moves: int = 0,
    on_step: Callable[[], None] = lambda: None,
) -> MatchResult:
    """Play all games of a match at once. The player moves first in games 0, 2, 4, ...

    Deterministic players would repeat the same two games. `opening_moves` random moves make them differ: each pair of
    games has its own opening, played from both sides. `on_step` is called after each move and may raise.
    """
    if episodes < 1:
        raise UserError(f"a match needs at least 1 episode, not {episodes}")
    state = game.initial_states((episodes + 1) // 2)
    for _ in range(opening_moves):
        state, _, over = game.play(state, random_action(game.legal_actions(state), rng))
        if over.any():
            raise UserError(f"opening_moves={opening_moves} can end a game of {game.name}; use fewer")
    state = state.repeat(2, axis=0)[:episodes]
    seat = np.arange(episodes) % 2  # the player's
    outcome, length, over = np.zeros(episodes), np.full(episodes, opening_moves), np.zeros(episodes, bool)
    while len(playing := np.flatnonzero(~over)):
        length[playing] += 1
        players_turn = game.current_player(state[playing]) == seat[playing]
        for sign, mover, rows in ((1.0, player, playing[players_turn]), (-1.0, opponent, playing[~players_turn])):
            if len(rows):
                state[rows], reward, over[rows] = game.play(state[rows], mover.choose(state[rows], rng))
                outcome[rows] += sign * reward
        on_step()
    return MatchResult(outcome, seat, length)


def elo_difference(score: float) -> float:
    """Return the rating difference that corresponds to a score in points per game; infinite for 0 and 1."""
    if not 0.0 <= score <= 1.0:
        raise UserError(f"score {score} must be between 0 and 1 points per game")
    if score in (0.0, 1.0):
        return math.copysign(math.inf, score - 0.5)
    return 400.0 * math.log10(score / (1.0 - score))


def elo(results: Mapping[tuple[str, str], MatchResult], anchor: str, rating: float = 0.0) -> dict[str, float]:
    """Fit maximum-likelihood Elo ratings to results by (player, opponent). The anchor's rating is fixed.

    The expected score is 1 / (1 + 10^(-difference / 400)). Each pair gets one additional draw, so ratings stay finite
    for players who won or lost all games.
    """
    names = sorted({name for pair in results for name in pair})
    if anchor not in names:
        raise unknown("player", anchor, names)
    connected = {anchor}
    while new := {name for pair in results if connected & set(pair) for name in pair} - connected:
        connected |= new
    if unconnected := set(names) - connected:
        raise UserError(f"no chain of matches connects {anchor} with {', '.join(sorted(unconnected))}")
    index = {name: i for i, name in enumerate(names)}
    first, second = np.array([[index[a], index[b]] for a, b in results]).T
    games = np.array([result.episodes + 1.0 for result in results.values()])
    points = np.array([result.wins + 0.5 * (result.draws + 1) for result in results.values()])
    strength = np.zeros(len(names))  # in units of 400 / ln 10
    free = np.array([name != anchor for name in names])
    for _ in range(100):
        expected = 1.0 / (1.0 + np.exp(strength[second] - strength[first]))
        gradient, hessian = np.zeros(len(names)), np.zeros((len(names), len(names)))
        np.add.at(gradient, first, points - games * expected)
        np.add.at(gradient, second, games * expected - points)
        weight = games * expected * (1.0 - expected)
        for a, b, sign in ((first, first, 1), (second, second, 1), (first, second, -1), (second, first, -1)):
            np.add.at(hessian, (a, b), sign * weight)
        step = np.linalg.solve(hessian[np.ix_(free, free)], gradient[free])
        strength[free] += np.clip(step, -2.0, 2.0)  # Newton's steps overshoot far from the solution
        if np.abs(step).max(initial=0.0) < 1e-10:
            break
    return {name: rating + 400.0 / math.log(10.0) * strength[i] for name, i in index.items()}

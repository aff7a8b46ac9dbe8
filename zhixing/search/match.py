"""MatchEvaluator between players, and ratings from their results."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from zhixing.envs.vector.step_buffers import Array
from zhixing.errors import UserError, unknown
from zhixing.search.games import Game, random_action
from zhixing.search.players import Player


class Tally(NamedTuple):
    wins: int
    draws: int
    losses: int


@dataclass(frozen=True, eq=False)
class MatchResult:
    """What the player, not its opponent, achieved in each game: `outcomes [E]` of 1, 0 or -1, its `seats [E]` (0 where
    it began) and the `lengths [E]` of the games in moves."""

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
        """Points per game: a win is one, a draw half a point."""
        return (self.wins + 0.5 * self.draws) / self.episodes


def play_match(
    game: Game,
    player: Player,
    opponent: Player,
    episodes: int,
    rng: np.random.Generator,
    opening: int = 0,
    on_step: Callable[[], None] = lambda: None,
) -> MatchResult:
    """All games at once; the player begins every other one, the first among them.

    Two players without chance play the same two games over and over, unless these start with an `opening` of so many
    random moves: another one for each pair of games, in which both sit on either side. `on_step` is called after each
    move and may raise.
    """
    if episodes < 1:
        raise UserError(f"a match of {episodes} episodes can't be played; it needs at least 1")
    state = game.start((episodes + 1) // 2)
    for _ in range(opening):
        state, _, over = game.play(state, random_action(game.legal(state), rng))
        if over.any():
            raise UserError(f"an opening of {opening} random moves can end {game.name}; take fewer")
    state = state.repeat(2, axis=0)[:episodes]
    seat = np.arange(episodes) % 2  # the player's
    outcome, length, over = np.zeros(episodes), np.full(episodes, opening), np.zeros(episodes, bool)
    while len(playing := np.flatnonzero(~over)):
        length[playing] += 1
        mine = game.to_move(state[playing]) == seat[playing]
        for sign, who, rows in ((1.0, player, playing[mine]), (-1.0, opponent, playing[~mine])):
            if len(rows):
                state[rows], reward, over[rows] = game.play(state[rows], who.choose(state[rows], rng))
                outcome[rows] += sign * reward
        on_step()
    return MatchResult(outcome, seat, length)


def elo_difference(score: float) -> float:
    """How much higher than its opponent a player with these points per game is rated; infinite for 0 and 1."""
    if not 0.0 <= score <= 1.0:
        raise UserError(f"a score of {score} points per game is impossible; it lies between 0 and 1")
    if score in (0.0, 1.0):
        return math.copysign(math.inf, score - 0.5)
    return 400.0 * math.log10(score / (1.0 - score))


def elo(results: Mapping[tuple[str, str], MatchResult], anchor: str, rating: float = 0.0) -> dict[str, float]:
    """Ratings that make all results between pairs (player, opponent) the most likely, the anchor's being given.

    A player is expected to score 1 / (1 + 10^(-difference / 400)). Each pair is taken to have drawn one more game, so
    that who has won or lost all of them has a rating, too.
    """
    names = sorted({name for pair in results for name in pair})
    if anchor not in names:
        raise unknown("player", anchor, names)
    linked = {anchor}
    while more := {name for pair in results if linked & set(pair) for name in pair} - linked:
        linked |= more
    if apart := set(names) - linked:
        raise UserError(f"no chain of matches leads from {anchor} to {', '.join(sorted(apart))}")
    place = {name: i for i, name in enumerate(names)}
    first, second = np.array([[place[a], place[b]] for a, b in results]).T
    games = np.array([result.episodes + 1.0 for result in results.values()])
    points = np.array([result.wins + 0.5 * (result.draws + 1) for result in results.values()])
    strength = np.zeros(len(names))  # in units of 400 / ln 10
    free = np.array([name != anchor for name in names])
    for _ in range(100):
        expected = 1.0 / (1.0 + np.exp(strength[second] - strength[first]))
        slope, curve = np.zeros(len(names)), np.zeros((len(names), len(names)))
        np.add.at(slope, first, points - games * expected)
        np.add.at(slope, second, games * expected - points)
        weight = games * expected * (1.0 - expected)
        for a, b, sign in ((first, first, 1), (second, second, 1), (first, second, -1), (second, first, -1)):
            np.add.at(curve, (a, b), sign * weight)
        step = np.linalg.solve(curve[np.ix_(free, free)], slope[free])
        strength[free] += np.clip(step, -2.0, 2.0)  # far from the answer Newton's steps are too long
        if np.abs(step).max(initial=0.0) < 1e-10:
            break
    return {name: rating + 400.0 / math.log(10.0) * strength[i] for name, i in place.items()}

"""Players choose a move in each of N games at once."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from torch import nn

from zhixing.envs.vector.step_buffers import Array
from zhixing.search.board_game import BoardGame, random_action
from zhixing.search.evaluators import NetworkEvaluator, PlayoutEvaluator
from zhixing.search.games import Model
from zhixing.search.tree import Evaluator, SearchResult, search


class Player(Protocol):
    def choose(self, state: Array, rng: np.random.Generator) -> Array:
        """Return legal actions `[N]` in unfinished states `[N,...]`."""


class RandomPlayer:
    def __init__(self, game: BoardGame) -> None:
        self.game = game

    def choose(self, state: Array, rng: np.random.Generator) -> Array:
        return random_action(self.game.legal_actions(state), rng)


class SearchPlayer:
    """Choose the most visited action of a search. Ties go to the higher mean return."""

    def __init__(self, game: Model, evaluate: Evaluator, simulations: int, **settings: Any) -> None:
        """`settings` are passed to `search`."""
        self.game, self.evaluate, self.simulations, self.settings = game, evaluate, simulations, settings

    def search(self, state: Array, rng: np.random.Generator) -> SearchResult:
        return search(self.game, state, self.simulations, self.evaluate, rng, **self.settings)

    def choose(self, state: Array, rng: np.random.Generator) -> Array:
        return most_visited(self.search(state, rng))


def mcts_player(game: BoardGame, simulations: int, playouts: int = 1, c: float = 1.4) -> SearchPlayer:
    """Make a player that searches by UCT with random playouts."""
    return SearchPlayer(game, PlayoutEvaluator(playouts), simulations, select="uct", c=c)


def puct_player(game: BoardGame, net: nn.Module, simulations: int, c: float = 1.25, leaves: int = 1) -> SearchPlayer:
    """Make a player that searches by PUCT with a network's priors and values, as in self-play but without noise."""
    return SearchPlayer(game, NetworkEvaluator(net), simulations, select="puct", c=c, leaves=leaves)


class GreedyNetworkPlayer:
    """Choose a network's most likely action, without a search."""

    def __init__(self, game: BoardGame, net: nn.Module) -> None:
        self.game, self.evaluate = game, NetworkEvaluator(net)

    def choose(self, state: Array, rng: np.random.Generator) -> Array:
        legal = self.game.legal_actions(state)
        prior, _ = self.evaluate(self.game, state, legal, rng)
        return np.where(legal, prior, -1.0).argmax(-1)


def sample_by_visits(visits: Array, rng: np.random.Generator) -> Array:
    """Sample one action per row `[N,n]` in proportion to its visits."""
    cumulative = visits.cumsum(-1)
    return (rng.random((len(visits), 1)) * cumulative[:, -1:] >= cumulative).sum(-1)


def most_visited(result: SearchResult) -> Array:
    """Return the most visited action `[N]`. Ties go to the highest mean return."""
    most = result.visits == result.visits.max(-1, keepdims=True)
    return np.where(most, result.action_values, -np.inf).argmax(-1)

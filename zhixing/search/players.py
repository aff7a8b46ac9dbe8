"""Players: from the states of N games at once to a move in each."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from torch import nn

from zhixing.envs.vector.step_buffers import Array
from zhixing.search.evaluate import Network, Playouts
from zhixing.search.games import Game, Model, random_action
from zhixing.search.tree import Evaluate, Result, search


class Player(Protocol):
    def choose(self, state: Array, rng: np.random.Generator) -> Array:
        """Legal actions `[N]` in states `[N,...]` at which it isn't over."""


class RandomPlayer:
    def __init__(self, game: Game) -> None:
        self.game = game

    def choose(self, state: Array, rng: np.random.Generator) -> Array:
        return random_action(self.game.legal(state), rng)


class SearchPlayer:
    """The most visited action of a search; of equally visited ones that of the higher mean return."""

    def __init__(self, game: Model, evaluate: Evaluate, simulations: int, **settings: Any) -> None:
        """`settings` are those of `search`."""
        self.game, self.evaluate, self.simulations, self.settings = game, evaluate, simulations, settings

    def search(self, state: Array, rng: np.random.Generator) -> Result:
        return search(self.game, state, self.simulations, self.evaluate, rng, **self.settings)

    def choose(self, state: Array, rng: np.random.Generator) -> Array:
        return most_visited(self.search(state, rng))


def mcts_player(game: Game, simulations: int, playouts: int = 1, c: float = 1.4) -> SearchPlayer:
    """Plain Monte-Carlo tree search: UCT with random playouts."""
    return SearchPlayer(game, Playouts(playouts), simulations, select="uct", c=c)


def network_player(game: Game, net: nn.Module, simulations: int, c: float = 1.25, leaves: int = 1) -> SearchPlayer:
    """A network that looks ahead: PUCT with its priors and values, as in self-play but without noise."""
    return SearchPlayer(game, Network(net), simulations, select="puct", c=c, leaves=leaves)


class NetPlayer:
    """A network alone: the action that it holds for the most likely."""

    def __init__(self, game: Game, net: nn.Module) -> None:
        self.game, self.evaluate = game, Network(net)

    def choose(self, state: Array, rng: np.random.Generator) -> Array:
        legal = self.game.legal(state)
        prior, _ = self.evaluate(self.game, state, legal, rng)
        return np.where(legal, prior, -1.0).argmax(-1)


def draw(visits: Array, rng: np.random.Generator) -> Array:
    """One action per row `[N,n]`, by its share of visits; never one without."""
    edges = visits.cumsum(-1)
    return (rng.random((len(visits), 1)) * edges[:, -1:] >= edges).sum(-1)


def most_visited(found: Result) -> Array:
    """Return the most visited action `[N]`; of equally visited ones that of the highest mean return."""
    most = found.visits == found.visits.max(-1, keepdims=True)
    return np.where(most, found.action_values, -np.inf).argmax(-1)

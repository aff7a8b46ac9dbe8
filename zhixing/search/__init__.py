"""Tree search: games and copies of tasks to search, the search itself, players, matches and self-play."""

from __future__ import annotations

from zhixing.search.board_net import BoardNet
from zhixing.search.copies import Copies
from zhixing.search.evaluate import Network, Playouts, numpy_generator
from zhixing.search.games import GAMES, Game, Model, augment, make_game, random_action, seat_to_move
from zhixing.search.match import MatchResult, elo, elo_difference, play_match
from zhixing.search.perfect import PerfectPlayer
from zhixing.search.players import (
    NetPlayer,
    Player,
    RandomPlayer,
    SearchPlayer,
    mcts_player,
    most_visited,
    network_player,
)
from zhixing.search.self_play import Played, SelfPlay, as_steps
from zhixing.search.tree import Result, search

__all__ = [
    "GAMES",
    "BoardNet",
    "Copies",
    "Game",
    "MatchResult",
    "Model",
    "NetPlayer",
    "Network",
    "PerfectPlayer",
    "Played",
    "Player",
    "Playouts",
    "RandomPlayer",
    "Result",
    "SearchPlayer",
    "SelfPlay",
    "as_steps",
    "augment",
    "elo",
    "elo_difference",
    "make_game",
    "mcts_player",
    "most_visited",
    "network_player",
    "numpy_generator",
    "play_match",
    "random_action",
    "search",
    "seat_to_move",
]

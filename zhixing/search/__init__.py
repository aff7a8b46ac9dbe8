"""Tree search: games and environment models, the search itself, players, matches and self-play."""

from __future__ import annotations

from zhixing.search.board_game import BoardGame, GameEnv, check_game, current_seat, random_action
from zhixing.search.board_net import BoardNet
from zhixing.search.env_model import EnvModel
from zhixing.search.evaluators import NetworkEvaluator, PlayoutEvaluator, numpy_generator
from zhixing.search.games import GAMES, Model, augment, find_game, make_game
from zhixing.search.match import MatchResult, elo, elo_difference, play_match
from zhixing.search.perfect import PerfectPlayer
from zhixing.search.players import (
    GreedyNetworkPlayer,
    Player,
    RandomPlayer,
    SearchPlayer,
    mcts_player,
    most_visited,
    puct_player,
)
from zhixing.search.self_play import CACHE_SIZE, FinishedGames, SelfPlay, to_transitions
from zhixing.search.tree import SearchResult, search

__all__ = [
    "CACHE_SIZE",
    "GAMES",
    "BoardGame",
    "BoardNet",
    "EnvModel",
    "FinishedGames",
    "GameEnv",
    "GreedyNetworkPlayer",
    "MatchResult",
    "Model",
    "NetworkEvaluator",
    "PerfectPlayer",
    "Player",
    "PlayoutEvaluator",
    "RandomPlayer",
    "SearchPlayer",
    "SearchResult",
    "SelfPlay",
    "augment",
    "check_game",
    "current_seat",
    "elo",
    "elo_difference",
    "find_game",
    "make_game",
    "mcts_player",
    "most_visited",
    "numpy_generator",
    "play_match",
    "puct_player",
    "random_action",
    "search",
    "to_transitions",
]

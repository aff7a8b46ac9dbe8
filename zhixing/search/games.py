"""The protocol of models that can be searched, and games by their environments' names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from zhixing.core.batch import Batch
from zhixing.core.tree import Tree
from zhixing.envs.adapters import gymnasium_ids, user
from zhixing.envs.options import construct_env
from zhixing.envs.vector.step_buffers import Array
from zhixing.errors import UserError, unknown
from zhixing.search.board_game import BoardGame, check_game
from zhixing.search.connect_four import ConnectFour
from zhixing.search.pettingzoo_game import PettingZooGame
from zhixing.search.tictactoe import TicTacToe
from zhixing.utils.importing import import_object


class Model(Protocol):
    """A model that can be played from any state, in batches. States are arrays `[N,...]` of any type, one per row.

    `play` returns the reward of the player who moved. Games of two players are zero-sum. Rewards are discounted by
    `gamma` per step.
    """

    num_players: int
    num_actions: int
    gamma: float

    def legal_actions(self, state: Array) -> Array:
        """Return a mask `[N,n]` of the legal actions."""

    def play(self, state: Array, action: Array) -> tuple[Array, Array, Array]:
        """Take legal actions `[N]` and return the next states, the rewards `[N]` and whether the game is over `[N]`."""

    def is_over(self, state: Array) -> Array: ...

    def current_player(self, state: Array) -> Array:
        """Return the index `[N]` of the player to move."""

    def observe(self, state: Array) -> Tree:
        """Return the observation of the player to move."""

    def playout(self, state: Array, rng: np.random.Generator) -> Array:
        """Play randomly to the end. Return the returns `[N]` of the player to move."""


BITBOARDS: dict[str, type[BoardGame]] = {game.name: game for game in (ConnectFour, TicTacToe)}
PETTINGZOO = ("pettingzoo/chess", "pettingzoo/go")  # played by copies of PettingZoo's environments
GAMES = (*BITBOARDS, *PETTINGZOO)
CHESS_MOVES, GO_SIZE = 512, 19
HIDDEN_CARDS = "its players don't see all cards, but a search would"
UNSEARCHABLE = {
    "pettingzoo/hanabi": "its players cooperate, and don't see their own cards",
    "pettingzoo/leduc_holdem": HIDDEN_CARDS,
    "pettingzoo/texas_holdem": HIDDEN_CARDS,
    "pettingzoo/texas_holdem_no_limit": HIDDEN_CARDS,
    "pettingzoo/rps": "its players choose at the same time, so there is no best move",
}


def find_game(name: str, options: Mapping[str, Any] | None = None) -> BoardGame | None:
    """Make a game by its environment's name: a built-in one or a class of a user, which is checked.

    Return None if the environment isn't a game, and raise `UserError` for a game that can't be searched.
    """
    if name in BITBOARDS:
        return BITBOARDS[name]()
    if name in PETTINGZOO:
        given = dict(options or {})
        size = given.get("board_size", GO_SIZE)
        return PettingZooGame(name, given, CHESS_MOVES if name.endswith("chess") else 2 * size * size)
    if name in UNSEARCHABLE:
        raise UserError(
            f"{name} can't be searched: {UNSEARCHABLE[name]}; games that can are {', '.join(GAMES)} and your own"
        )
    if not user.supports(name) or gymnasium_ids.resolve_id(name) is not None:
        return None
    constructor = import_object(name)
    if not (isinstance(constructor, type) and issubclass(constructor, BoardGame)):
        return None
    game: BoardGame = construct_env(name, constructor, options or {})
    game.name = name
    check_game(game)
    return game


def make_game(name: str, options: Mapping[str, Any] | None = None) -> BoardGame:
    """Make a game by its environment's name, such as `pettingzoo/tictactoe` or `my.module:MyGame`."""
    game = find_game(name, options)
    if game is None:
        raise unknown("game", name, GAMES, "(or your.module:YourGame, a class that derives from BoardGame)")
    return game


def augment(game: BoardGame, batch: Batch, rng: np.random.Generator) -> Batch:
    """Apply a random symmetry of the board to the fields obs, mask and policy of each position `[B]`."""
    index = rng.integers(len(game.cell_symmetries), size=len(batch))
    cells, actions = game.cell_symmetries[index], game.action_symmetries[index]
    flat = batch.obs.reshape(*cells.shape, -1)
    return batch.replace(
        obs=np.take_along_axis(flat, cells[..., None], 1).reshape(batch.obs.shape),
        mask=np.take_along_axis(batch.mask, actions, 1),
        policy=np.take_along_axis(batch.policy, actions, 1),
    )

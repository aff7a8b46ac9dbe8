"""Protocols of models that can be searched, and the built-in games by their environments' names."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from zhixing.core.batch import Batch
from zhixing.core.tree import Tree
from zhixing.envs.vector.step_buffers import Array
from zhixing.errors import unknown
from zhixing.search.connect_four import ConnectFour
from zhixing.search.tictactoe import TicTacToe


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


class Game(Model, Protocol):
    """A deterministic game of two alternating players with perfect information.

    Observations are those of PettingZoo, and determine the state. `cell_symmetries [K,H*W]` and `action_symmetries
    [K,n]` are the source of each cell and action when the board is rotated or mirrored; the first is the identity.
    """

    name: str
    obs_shape: tuple[int, ...]  # (H, W, planes)
    max_moves: int
    cell_symmetries: Array
    action_symmetries: Array

    def initial_states(self, num: int) -> Array: ...

    def from_obs(self, obs: Array) -> Array:
        """Return the states in which the player to move has these observations."""


GAMES: dict[str, type[Game]] = {game.name: game for game in (ConnectFour, TicTacToe)}


def make_game(name: str) -> Game:
    """Make a game by its environment's name, such as `pettingzoo/tictactoe`."""
    if name not in GAMES:
        raise unknown("game", name, GAMES)
    return GAMES[name]()


def random_action(legal: Array, rng: np.random.Generator) -> Array:
    """Sample one legal action per row of a mask `[N,n]`, uniformly."""
    return np.where(legal, rng.random(legal.shape), -1.0).argmax(-1)


def current_seat(obs: Array) -> Array:
    """Return the seat to move `[N]` from the observations of both seats, `[N,2,...,2]`.

    The second seat is to move if the first has more pieces.
    """
    pieces = obs[:, 0].reshape(len(obs), -1, 2).sum(1)  # [N,2] pieces of the first and of the second seat
    return (pieces[:, 0] > pieces[:, 1]).astype(np.int64)


def augment(game: Game, batch: Batch, rng: np.random.Generator) -> Batch:
    """Apply a random symmetry of the board to the fields obs, mask and policy of each position `[B]`."""
    index = rng.integers(len(game.cell_symmetries), size=len(batch))
    cells, actions = game.cell_symmetries[index], game.action_symmetries[index]
    flat = batch.obs.reshape(*cells.shape, -1)
    return batch.replace(
        obs=np.take_along_axis(flat, cells[..., None], 1).reshape(batch.obs.shape),
        mask=np.take_along_axis(batch.mask, actions, 1),
        policy=np.take_along_axis(batch.policy, actions, 1),
    )

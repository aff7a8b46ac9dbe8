"""What a search steps: rows of states, all at once. And the games that we have so, by their environments' names."""

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
    """Something that can be played on from any state. States are arrays `[N,...]` of any type, one row each.

    `play` gives what the player who moved earns, and whether it is over; it isn't asked to go on from there. What one
    of two players earns the other loses. What is earned a step later counts `gamma` as much.
    """

    num_players: int
    num_actions: int
    gamma: float

    def legal(self, state: Array) -> Array:
        """Which actions `[N,n]` may be taken."""

    def play(self, state: Array, action: Array) -> tuple[Array, Array, Array]:
        """Legal actions `[N]` to the states after them, rewards `[N]` and ends `[N]`."""

    def over(self, state: Array) -> Array: ...

    def to_move(self, state: Array) -> Array:
        """The number `[N]` of the player whose turn it is."""

    def observe(self, state: Array) -> Tree:
        """What the player to move sees."""

    def playout(self, state: Array, rng: np.random.Generator) -> Array:
        """What the player to move earns `[N]` when everybody plays at random to the end."""


class Game(Model, Protocol):
    """A game of two who take turns, without chance and without secrets: what the player to move sees, as PettingZoo
    shows it, tells the state.

    `cell_symmetries [K,H*W]` and `action_symmetries [K,n]` say where each cell and each action comes from when the
    board is turned or mirrored; the first changes nothing.
    """

    name: str
    obs_shape: tuple[int, ...]  # (H, W, planes)
    max_moves: int
    cell_symmetries: Array
    action_symmetries: Array

    def start(self, num: int) -> Array: ...

    def from_obs(self, obs: Array) -> Array:
        """The states that the player to move sees like this."""


GAMES: dict[str, type[Game]] = {kind.name: kind for kind in (ConnectFour, TicTacToe)}


def make_game(name: str) -> Game:
    """A game by its environment's name, such as `pettingzoo/tictactoe`."""
    if name not in GAMES:
        raise unknown("game", name, GAMES)
    return GAMES[name]()


def random_action(legal: Array, rng: np.random.Generator) -> Array:
    """One of the legal actions `[N,n]` of each row, with equal chances."""
    return np.where(legal, rng.random(legal.shape), -1.0).argmax(-1)


def seat_to_move(obs: Array) -> Array:
    """Whose turn it is `[N]` when both seats are seen at once, `[N,2,...,2]`: who began has as many pieces or more."""
    pieces = obs[:, 0].reshape(len(obs), -1, 2).sum(1)  # [N,2] of the first seat and the second
    return (pieces[:, 0] > pieces[:, 1]).astype(np.int64)


def augment(game: Game, batch: Batch, rng: np.random.Generator) -> Batch:
    """Each position `[B]` of the fields obs, mask and policy as one of its mirror images, drawn with equal chances."""
    which = rng.integers(len(game.cell_symmetries), size=len(batch))
    cells, actions = game.cell_symmetries[which], game.action_symmetries[which]
    flat = batch.obs.reshape(*cells.shape, -1)
    return batch.replace(
        obs=np.take_along_axis(flat, cells[..., None], 1).reshape(batch.obs.shape),
        mask=np.take_along_axis(batch.mask, actions, 1),
        policy=np.take_along_axis(batch.policy, actions, 1),
    )

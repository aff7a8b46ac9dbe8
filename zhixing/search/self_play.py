"""Games of a network against itself, all at once: their positions, what searches made of them, and how they ended."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from torch import nn

from zhixing.collect.collector import Collector, Experience, check_collect, collect_episodes
from zhixing.collect.evaluation import Episode
from zhixing.core.batch import Batch
from zhixing.core.policy import Phase
from zhixing.core.state import read_count
from zhixing.envs.vector.step_buffers import Array
from zhixing.errors import UserError
from zhixing.search.evaluate import Network
from zhixing.search.games import Game
from zhixing.search.players import draw, most_visited
from zhixing.search.tree import search


class Played(NamedTuple):
    """The games that ended, with the positions `[B]` of all of them in `batch`.

    `obs` and `mask` are what the player to move saw, `policy` the share of visits that each action got, `value` the
    mean return that the search found, `outcome` what that player earned in the end: 1, 0 or -1, discounted.
    """

    batch: Batch
    lengths: Array  # [E] moves of each game
    outcomes: Array  # [E] what the first player earned


class SelfPlay(Collector):
    """`num_games` games in lock step; one that ends begins anew.

    In the first `explore_moves` of a game actions are drawn by their visits, later the most visited is taken. The roots
    get `noise`, see `search`. With `fast_simulations` a move is searched with `simulations`, and kept to learn from,
    only with the chance `full_share`; the others are searched with fewer and without noise, to end games sooner and so
    to have more outcomes (Wu, 2019).
    """

    _saved = ("state", "moves", "states", "policies", "values", "kept")

    def __init__(
        self,
        game: Game,
        net: nn.Module,
        num_games: int,
        simulations: int,
        *,
        seed: int,
        c: float = 1.25,
        noise: float = 0.25,
        alpha: float = 1.0,
        explore_moves: int = 10,
        fast_simulations: int | None = None,
        full_share: float = 0.25,
        memory: int = 1 << 18,
    ) -> None:
        """`memory` is that of `Network`: it is kept as long as one call of `play` lasts."""
        if num_games < 1 or simulations < 1:
            raise UserError(f"num_games {num_games} and simulations {simulations} must be at least 1")
        self.game, self.num_games, self.simulations = game, num_games, simulations
        self.c, self.noise, self.alpha, self.explore_moves = c, noise, alpha, explore_moves
        self.fast_simulations, self.full_share = fast_simulations, full_share
        self.evaluate = Network(net, memory)
        self.rng = np.random.default_rng(seed)
        self.state = game.start(num_games)
        self.moves = np.zeros(num_games, np.int64)  # made in each game
        # the games so far, move by move
        lead = num_games, game.max_moves
        self.states = np.zeros((*lead, *self.state.shape[1:]), self.state.dtype)
        self.policies = np.zeros((*lead, game.num_actions), np.float32)
        self.values = np.zeros(lead, np.float32)
        self.kept = np.zeros(lead, bool)
        self.env_steps = 0  # moves, over all games
        self.schedule_lead = 0  # unused: searches have no schedules

    def play(self, moves: int) -> Played:
        """Make so many moves in each game with the network as it is now."""
        self.evaluate.forget()
        parts = [self._move() for _ in range(moves)]
        return Played(
            Batch.cat([part.batch for part in parts]),
            np.concatenate([part.lengths for part in parts]),
            np.concatenate([part.outcomes for part in parts]),
        )

    def collect(
        self, steps: int | None = None, episodes: int | None = None, phase: Phase = Phase.COLLECT
    ) -> Experience:
        """Make `steps` moves in each game, or as many as it takes until `episodes` games have ended.

        The batch holds the positions of the games that ended. An episode's return is the outcome for the first player.
        """
        check_collect(steps, episodes)
        if episodes is not None:
            return collect_episodes(self._collect, episodes)
        assert steps is not None
        return self._collect(steps)

    def _collect(self, steps: int) -> Experience:
        played = self.play(steps)
        self.env_steps += steps * self.num_games
        episodes = [Episode(float(won), int(n), {}) for won, n in zip(played.outcomes, played.lengths, strict=True)]
        return Experience(as_steps(played.batch).map(lambda leaf: leaf[:, None]), episodes)

    def _move(self) -> Played:
        full = self.fast_simulations is None or self.rng.random() < self.full_share
        found = search(
            self.game,
            self.state,
            self.simulations if full else self.fast_simulations or 1,
            self.evaluate,
            self.rng,
            c=self.c,
            noise=self.noise if full else 0.0,
            alpha=self.alpha,
        )
        policy = found.visits / found.visits.sum(-1, keepdims=True)
        here = np.arange(self.num_games), self.moves
        self.states[here], self.policies[here], self.values[here] = self.state, policy, found.value
        self.kept[here] = full
        action = np.where(self.moves < self.explore_moves, draw(policy, self.rng), most_visited(found))
        mover = self.game.to_move(self.state)
        self.state, reward, ended = self.game.play(self.state, action)
        self.moves += 1
        return self._finish(np.flatnonzero(ended), mover, reward)

    def _finish(self, games: Array, mover: Array, reward: Array) -> Played:
        """The positions of these games, in which `mover` made the last move and earned `reward`; they begin anew."""
        lengths = self.moves[games]
        which, at = np.nonzero(self.kept[games] & (np.arange(self.game.max_moves) < lengths[:, None]))
        rows = games[which]
        states = self.states[rows, at]
        outcome = np.where(self.game.to_move(states) == mover[rows], reward[rows], -reward[rows])
        outcome = outcome * self.game.gamma ** (lengths[which] - 1 - at)
        batch = Batch(
            obs=self.game.observe(states),
            mask=self.game.legal(states),
            policy=self.policies[rows, at],
            value=self.values[rows, at],
            outcome=outcome.astype(np.float32),
        )
        self.state[games], self.moves[games] = self.game.start(len(games)), 0
        return Played(batch, lengths, np.where(mover[games] == 0, reward[games], -reward[games]))

    def state_dict(self) -> dict[str, Any]:
        arrays = {name: getattr(self, name).copy() for name in self._saved}
        return {**arrays, "rng": dict(self.rng.bit_generator.state), "env_steps": self.env_steps}

    def load_state_dict(self, state: dict[str, Any]) -> list[int]:
        """Continue from a saved state; exactly, if it was saved between calls of `play`. No game is lost."""
        for name in self._saved:
            mine, saved = getattr(self, name), np.asarray(state[name])
            if mine.shape != saved.shape:
                raise UserError(f"the saved self-play has {name} of shape {saved.shape}, this one {mine.shape}")
            mine[...] = saved
        self.rng.bit_generator.state = state["rng"]
        self.env_steps = read_count("self-play", state, "env_steps")
        return []


def as_steps(batch: Batch) -> Batch:
    """Positions as a `Buffer` stores steps: each ends an episode of its own, the outcome is its reward."""
    over = np.ones(len(batch), bool)
    return Batch(
        obs=batch.obs,
        mask=batch.mask,
        policy=batch.policy,
        value=batch.value,
        reward=batch.outcome,
        terminated=over,
        truncated=~over,
        next_obs=batch.obs,
        next_mask=batch.mask,
    )

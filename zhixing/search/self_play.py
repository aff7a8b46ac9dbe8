"""Self-play: a network plays many games against itself at once, and records positions, search results and outcomes."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from torch import nn

from zhixing.collectors.collector import Collector, Experience, check_collect, collect_episodes
from zhixing.collectors.evaluation import Episode
from zhixing.core.batch import Batch
from zhixing.core.policy import Phase
from zhixing.core.state import read_count
from zhixing.envs.vector.step_buffers import Array
from zhixing.errors import UserError
from zhixing.search.board_game import BoardGame
from zhixing.search.evaluators import NetworkEvaluator
from zhixing.search.players import most_visited, sample_by_visits
from zhixing.search.tree import search

CACHE_SIZE = 1 << 18  # states whose network results are cached


class FinishedGames(NamedTuple):
    """The games that ended, with all their positions `[B]` in `batch`.

    `obs` and `mask` are those of the player to move, `policy` the fraction of visits per action, `value` the mean
    return of the search, and `outcome` that player's final result: 1, 0 or -1, discounted.
    """

    batch: Batch
    lengths: Array  # [E] moves of each game
    outcomes: Array  # [E] results of the first player


class SelfPlay(Collector):
    """Play `num_games` games in lock step. A game that ends is restarted.

    The first `explore_moves` of a game are sampled in proportion to visits; later moves are the most visited. For
    `noise` and `alpha`, see `search`.

    With `fast_simulations`, a move is searched with all `simulations` and recorded for training only with probability
    `full_share`. Other moves use fewer simulations and no noise, so games end sooner and give more outcomes (Wu, 2019).
    """

    _saved = ("state", "moves", "states", "policies", "values", "recorded")

    def __init__(
        self,
        game: BoardGame,
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
        cache_size: int = CACHE_SIZE,
    ) -> None:
        """`cache_size` is passed to `NetworkEvaluator`. The cache is cleared at each call of `play`."""
        if num_games < 1 or simulations < 1:
            raise UserError(f"num_games {num_games} and simulations {simulations} must be at least 1")
        self.game, self.num_games, self.simulations = game, num_games, simulations
        self.c, self.noise, self.alpha, self.explore_moves = c, noise, alpha, explore_moves
        self.fast_simulations, self.full_share = fast_simulations, full_share
        self.evaluate = NetworkEvaluator(net, cache_size)
        self.rng = np.random.default_rng(seed)
        self.state = game.initial_states(num_games)
        self.moves = np.zeros(num_games, np.int64)  # made so far in each game
        # the history of each game, by move
        shape = num_games, game.max_moves
        self.states = np.zeros((*shape, *self.state.shape[1:]), self.state.dtype)
        self.policies = np.zeros((*shape, game.num_actions), np.float32)
        self.values = np.zeros(shape, np.float32)
        self.recorded = np.zeros(shape, bool)
        self.env_steps = 0  # moves, over all games
        self.schedule_lead = 0  # unused: searches have no schedules

    def play(self, moves: int) -> FinishedGames:
        """Make `moves` moves in each game with the network's current weights."""
        self.evaluate.clear_cache()
        parts = [self._move() for _ in range(moves)]
        return FinishedGames(
            Batch.cat([part.batch for part in parts]),
            np.concatenate([part.lengths for part in parts]),
            np.concatenate([part.outcomes for part in parts]),
        )

    def collect(
        self, steps: int | None = None, episodes: int | None = None, phase: Phase = Phase.COLLECT
    ) -> Experience:
        """Make `steps` moves in each game, or play until `episodes` games have ended.

        The batch contains the positions of the games that ended. An episode's return is the first player's outcome.
        """
        check_collect(steps, episodes)
        if episodes is not None:
            return collect_episodes(self._collect, episodes)
        assert steps is not None
        return self._collect(steps)

    def _collect(self, steps: int) -> Experience:
        finished = self.play(steps)
        self.env_steps += steps * self.num_games
        episodes = [
            Episode(float(outcome), int(length), {})
            for outcome, length in zip(finished.outcomes, finished.lengths, strict=True)
        ]
        return Experience(to_transitions(finished.batch).map(lambda leaf: leaf[:, None]), episodes)

    def _move(self) -> FinishedGames:
        full = self.fast_simulations is None or self.rng.random() < self.full_share
        result = search(
            self.game,
            self.state,
            self.simulations if full else self.fast_simulations or 1,
            self.evaluate,
            self.rng,
            c=self.c,
            noise=self.noise if full else 0.0,
            alpha=self.alpha,
        )
        policy = result.visits / result.visits.sum(-1, keepdims=True)
        index = np.arange(self.num_games), self.moves
        self.states[index], self.policies[index], self.values[index] = self.state, policy, result.value
        self.recorded[index] = full
        action = np.where(self.moves < self.explore_moves, sample_by_visits(policy, self.rng), most_visited(result))
        mover = self.game.current_player(self.state)
        self.state, reward, ended = self.game.play(self.state, action)
        self.moves += 1
        return self._finish(np.flatnonzero(ended), mover, reward)

    def _finish(self, games: Array, mover: Array, reward: Array) -> FinishedGames:
        """Return the positions of the games that ended, and restart them. Their last move by `mover` gave `reward`."""
        lengths = self.moves[games]
        which, move = np.nonzero(self.recorded[games] & (np.arange(self.game.max_moves) < lengths[:, None]))
        rows = games[which]
        states = self.states[rows, move]
        outcome = np.where(self.game.current_player(states) == mover[rows], reward[rows], -reward[rows])
        outcome = outcome * self.game.gamma ** (lengths[which] - 1 - move)
        batch = Batch(
            obs=self.game.observe(states),
            mask=self.game.legal_actions(states),
            policy=self.policies[rows, move],
            value=self.values[rows, move],
            outcome=outcome.astype(np.float32),
        )
        self.state[games], self.moves[games] = self.game.initial_states(len(games)), 0
        return FinishedGames(batch, lengths, np.where(mover[games] == 0, reward[games], -reward[games]))

    def state_dict(self) -> dict[str, Any]:
        arrays = {name: getattr(self, name).copy() for name in self._saved}
        return {**arrays, "rng": dict(self.rng.bit_generator.state), "env_steps": self.env_steps}

    def load_state_dict(self, state: dict[str, Any]) -> list[int]:
        """Continue from a saved state; exactly, if it was saved between calls of `play`. No game is lost."""
        for name in self._saved:
            current, saved = getattr(self, name), np.asarray(state[name])
            if current.shape != saved.shape:
                raise UserError(f"the saved self-play has {name} of shape {saved.shape}, this one {current.shape}")
            current[...] = saved
        self.rng.bit_generator.state = state["rng"]
        self.env_steps = read_count("self-play", state, "env_steps")
        return []


def to_transitions(batch: Batch) -> Batch:
    """Convert positions to transitions for a `Buffer`: each is a one-step episode whose reward is the outcome."""
    terminated = np.ones(len(batch), bool)
    return Batch(
        obs=batch.obs,
        mask=batch.mask,
        policy=batch.policy,
        value=batch.value,
        reward=batch.outcome,
        terminated=terminated,
        truncated=~terminated,
        next_obs=batch.obs,
        next_mask=batch.mask,
    )

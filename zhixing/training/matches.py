"""Games between agents: who a name stands for, and evaluations that are matches."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from zhixing.collect.evaluation import Episode, Evaluation
from zhixing.core.policy import Phase, Policy
from zhixing.core.seeding import derive_seed
from zhixing.envs.vector.step_buffers import Array
from zhixing.errors import UserError
from zhixing.search import GAMES, Game, PerfectPlayer, Player, RandomPlayer, mcts_player, play_match
from zhixing.search.policy import SearchPolicy
from zhixing.training.agent import load

SIMULATIONS = 100  # of an opponent called just `mcts`


class PolicyPlayer:
    """A policy of both seats in the place of a player: it is shown what an environment would show."""

    def __init__(self, game: Game, policy: Policy) -> None:
        if policy.initial_hidden(1) is not None:
            raise UserError(f"a policy with memory can't play matches of {game.name}: it sees single positions")
        self.game, self.policy = game, policy

    @torch.no_grad()
    def choose(self, state: Array, rng: np.random.Generator) -> Array:
        rows, seat = np.arange(len(state)), self.game.current_player(state)
        view, legal = self.game.observe(state), self.game.legal_actions(state)
        obs = np.stack([view, view[..., ::-1]], 1)  # whose turn it is, and who waits
        mask = np.zeros((len(state), 2, self.game.num_actions), bool)
        mask[:, 0], mask[:, 1, 0] = legal, True
        order = np.stack([seat, 1 - seat], 1)[..., None]  # by seat
        obs = np.take_along_axis(obs, order.reshape(-1, 2, *[1] * (view.ndim - 1)), 1)
        mask = np.take_along_axis(mask, order, 1)
        chance = torch.Generator().manual_seed(int(rng.integers(2**63 - 1)))
        decision = self.policy.act(torch.from_numpy(obs), None, torch.from_numpy(mask), Phase.EVAL, chance, 0)
        return decision.action.numpy()[rows, seat]


def as_player(game: Game, policy: Policy) -> Player:
    return policy.player if isinstance(policy, SearchPolicy) else PolicyPlayer(game, policy)


def make_opponent(game: Game, name: str) -> Player:
    """`random`, `perfect`, `mcts`, `mcts:SIMULATIONS`, or the agent of a run."""
    if name == "random":
        return RandomPlayer(game)
    if name == "perfect":
        return PerfectPlayer(game)
    if found := re.fullmatch(r"mcts(?::([1-9]\d*))?", name):
        return mcts_player(game, int(found[1] or SIMULATIONS))
    if not Path(name).is_dir():
        raise UserError(
            f"there is no opponent {name!r}: name random, perfect, mcts, mcts:SIMULATIONS or a run's folder"
        )
    agent = load(name)
    if agent.cfg.env.name != game.name:
        raise UserError(f"the opponent {name} plays {agent.cfg.env.name}, not {game.name}")
    return as_player(game, agent.policy)


def make_game(env: str) -> Game:
    if env not in GAMES:
        raise UserError(f"{env} is no game to play a match in; these are: {', '.join(GAMES)}")
    return GAMES[env]()


class MatchEvaluator:
    """Evaluates a policy by games against an opponent; the policy moves first in half of them."""

    max_episode_steps: int | None = None  # games end by their rules

    def __init__(self, game: Game, policy: Policy, opponent: str) -> None:
        self.game, self.player = game, as_player(game, policy)
        self.opponent = make_opponent(game, opponent)

    @torch.no_grad()
    def evaluate(
        self, episodes: int, seed: int, on_step: Callable[[], None] = lambda: None, max_steps: int | None = None
    ) -> Evaluation:
        """A game's return is 1, 0 or -1. The same seed gives the same games. `on_step` is called after each move; games
        end by their rules, whatever `max_steps` says."""
        rng = np.random.default_rng(derive_seed(seed, "match"))
        result = play_match(self.game, self.player, self.opponent, episodes, rng, on_step=on_step)
        ends = {1: "won", 0: "drawn", -1: "lost"}
        played = []
        for outcome, seat, length in zip(result.outcomes, result.seats, result.lengths, strict=True):
            told = {end: float(outcome == value) for value, end in ends.items()}
            begun = ("first", "second")[seat]
            played.append(Episode(float(outcome), int(length), told | {f"{begun}_{k}": v for k, v in told.items()}))
        return Evaluation(played)

    def close(self) -> None:
        """Do nothing: games hold no resources."""

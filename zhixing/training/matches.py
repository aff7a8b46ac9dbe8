"""Matches in board games: opponents by name, and evaluation against them."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from zhixing.collectors.evaluation import Episode, Evaluation
from zhixing.config import RunConfig
from zhixing.core.policy import Phase, Policy
from zhixing.core.seeding import derive_seed
from zhixing.envs.vector.step_buffers import Array
from zhixing.errors import UserError
from zhixing.search import GAMES, BoardGame, PerfectPlayer, Player, RandomPlayer, find_game, mcts_player, play_match
from zhixing.search.policy import SearchPolicy
from zhixing.training.agent import load

SIMULATIONS = 100  # per move of the opponent `mcts`


class PolicyPlayer:
    """A player that acts with a two-agent policy, which gets the same observations as in an environment."""

    def __init__(self, game: BoardGame, policy: Policy) -> None:
        if policy.initial_hidden(1) is not None:
            raise UserError(
                f"a recurrent policy can't play matches in {game.name}, because players get single positions; train "
                f"with net.recurrent=none"
            )
        self.game, self.policy = game, policy

    @torch.no_grad()
    def choose(self, state: Array, rng: np.random.Generator) -> Array:
        player = self.game.current_player(state)  # [B]
        obs, rows = self.game.seat_obs(state), np.arange(len(state))
        mask = np.zeros((len(state), 2, self.game.num_actions), bool)
        mask[rows, player], mask[rows, 1 - player, 0] = self.game.legal_actions(state), True
        torch_rng = torch.Generator().manual_seed(int(rng.integers(2**63 - 1)))
        decision = self.policy.act(torch.from_numpy(obs), None, torch.from_numpy(mask), Phase.EVAL, torch_rng, 0)
        return decision.action.numpy()[np.arange(len(state)), player]


def as_player(game: BoardGame, policy: Policy) -> Player:
    return policy.player if isinstance(policy, SearchPolicy) else PolicyPlayer(game, policy)


def make_opponent(game: BoardGame, name: str) -> Player:
    """Return the player called `random`, `perfect`, `mcts` or `mcts:SIMULATIONS`, or the agent of a run folder."""
    if name == "random":
        return RandomPlayer(game)
    if name == "perfect":
        return PerfectPlayer(game)
    if match := re.fullmatch(r"mcts(?::([1-9]\d*))?", name):
        return mcts_player(game, int(match[1] or SIMULATIONS))
    if not Path(name).is_dir():
        raise UserError(
            f"unknown opponent {name!r}: allowed are random, perfect, mcts, mcts:SIMULATIONS or a run folder"
        )
    agent = load(name)
    if agent.cfg.env.name != game.name:
        raise UserError(f"the opponent {name} was trained on {agent.cfg.env.name}; choose one trained on {game.name}")
    return as_player(game, agent.policy)


def make_game(cfg: RunConfig) -> BoardGame:
    """Make the game of a run. Raise `UserError` if its environment isn't one."""
    game = find_game(cfg.env.name, cfg.env.options)
    if game is None:
        raise UserError(
            f"{cfg.env.name} is not a board game with opponents; leave out the opponent, or use {', '.join(GAMES)} or "
            f"your own game"
        )
    return game


class MatchEvaluator:
    """Evaluates a policy by games against an opponent; the policy moves first in half of them."""

    max_episode_steps: int | None = None  # games end by their rules

    def __init__(self, game: BoardGame, policy: Policy, opponent: str) -> None:
        self.game, self.player = game, as_player(game, policy)
        self.opponent = make_opponent(game, opponent)

    @torch.no_grad()
    def evaluate(
        self, episodes: int, seed: int, on_step: Callable[[], None] = lambda: None, max_steps: int | None = None
    ) -> Evaluation:
        """Play `episodes` games. Their returns are 1, 0 or -1; the same seed gives the same games.

        `on_step` is called after each move. `max_steps` is ignored, because games end by their rules.
        """
        rng = np.random.default_rng(derive_seed(seed, "match"))
        result = play_match(self.game, self.player, self.opponent, episodes, rng, on_step=on_step)
        outcomes = {1: "won", 0: "drawn", -1: "lost"}
        games = []
        for outcome, seat, length in zip(result.outcomes, result.seats, result.lengths, strict=True):
            info = {name: float(outcome == value) for value, name in outcomes.items()}
            order = ("first", "second")[seat]
            info |= {f"{order}_{name}": value for name, value in info.items()}
            games.append(Episode(float(outcome), int(length), info))
        return Evaluation(games)

    def close(self) -> None:
        """Do nothing: games hold no resources."""

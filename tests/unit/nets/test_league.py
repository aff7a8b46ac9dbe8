"""Leagues: which snapshot an episode draws, how long it stays, and the counts of results."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import torch
from gymnasium.spaces import Box, Discrete
from torch import nn

from zhixing.core.policy import Decision, Phase, Policy
from zhixing.core.spaces import Spaces
from zhixing.nets.league import LeaguePolicy

SPACES = Spaces(Box(-1.0, 1.0, (1,), np.float32), Discrete(10))


class Constant(Policy):
    """Always takes the same action."""

    def __init__(self, action: float) -> None:
        super().__init__(SPACES)
        self.action = nn.Parameter(torch.tensor(action))

    def act(self, obs: Any, hidden: Any, mask: Any, phase: Phase, rng: torch.Generator, env_steps: int) -> Decision:
        return Decision(self.action.long().expand(len(obs)).clone())


def make_league(num: int, size: int = 4, prioritized: bool = False) -> LeaguePolicy:
    """Return a league with snapshots that take the actions 0, 1, 2, ..."""
    league = LeaguePolicy(Constant(0.0), size, prioritized)
    for action in range(1, num):
        league.add(Constant(float(action)))
    return league


def act(league: LeaguePolicy, hidden: Any, rng: torch.Generator) -> Decision:
    obs = torch.zeros(len(hidden["snapshot"]), 1)
    return league.act(obs, hidden, None, Phase.COLLECT, rng, 0)


def test_episodes_keep_their_snapshot_and_new_ones_draw_again() -> None:
    league, rng = make_league(3), torch.Generator().manual_seed(0)
    first = act(league, league.initial_hidden(300), rng)
    assert first.action.tolist() == first.extras["snapshot"].tolist()
    counts = Counter(first.action.tolist())
    assert all(70 < counts[action] < 130 for action in range(3))
    assert act(league, first.hidden, rng).action.tolist() == first.action.tolist()
    hidden = {"snapshot": first.hidden["snapshot"].clone().index_fill_(0, torch.arange(100), 0.0)}  # as the actor does
    second = act(league, hidden, rng)
    assert second.action[100:].tolist() == first.action[100:].tolist()
    assert second.action[:100].tolist() != first.action[:100].tolist()


def test_new_snapshot_replaces_the_oldest_and_starts_without_results() -> None:
    league = make_league(3, size=3)
    for snapshot in range(3):
        league.record(snapshot, 1.0)
    league.add(Constant(7.0))
    assert [float(snapshot.action) for snapshot in league.snapshots] == [7.0, 1.0, 2.0]
    assert league.games.tolist() == [0.0, 1.0, 1.0]
    assert league.points.tolist() == [0.0, 1.0, 1.0]


def test_prioritized_draw_prefers_opponents_that_win() -> None:
    """Against the snapshots, the policy has 2 wins, 2 losses and no game: scores 3/4, 1/4 and 1/2."""
    league = make_league(3, prioritized=True)
    for snapshot, result in ((0, 1.0), (0, 1.0), (1, 0.0), (1, 0.0)):
        league.record(snapshot, result)
    # (1 - score)^2 is 1/16, 9/16 and 4/16
    torch.testing.assert_close(league.probabilities(), torch.tensor([1.0, 9.0, 4.0]) / 14)
    league.prioritized = False
    torch.testing.assert_close(league.probabilities(), torch.ones(3) / 3)


def test_counts_are_part_of_the_saved_state() -> None:
    league = make_league(3)
    league.record(1, 0.5)
    other = make_league(1)
    other.load_state_dict(league.state_dict())
    assert other.points.tolist() == [0.0, 0.5, 0.0, 0.0]
    assert int(other.num_taken) == 3
    assert [float(snapshot.action) for snapshot in other.snapshots][:3] == [0.0, 1.0, 2.0]

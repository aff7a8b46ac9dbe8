"""Tests of players, matches, Elo ratings and networks of board games."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from zhixing.errors import UserError
from zhixing.search.board_game import random_action
from zhixing.search.board_net import BoardNet
from zhixing.search.evaluators import NetworkEvaluator, numpy_generator
from zhixing.search.games import make_game
from zhixing.search.match import MatchResult, Tally, elo, elo_difference, play_match
from zhixing.search.perfect import PerfectPlayer
from zhixing.search.players import (
    GreedyNetworkPlayer,
    RandomPlayer,
    SearchPlayer,
    mcts_player,
    most_visited,
    puct_player,
)
from zhixing.search.tree import SearchResult

TICTACTOE, CONNECT_FOUR = make_game("pettingzoo/tictactoe"), make_game("pettingzoo/connect_four")


class FirstPlayer:
    """Choose the first legal action, and record the states."""

    def __init__(self) -> None:
        self.states: list[np.ndarray] = []

    def choose(self, state: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        self.states.append(state)
        return TICTACTOE.legal_actions(state).argmax(-1)


def make_net(game: object = TICTACTOE, seed: int = 0) -> BoardNet:
    torch.manual_seed(seed)
    net = BoardNet(game.obs_shape, game.num_actions, blocks=1, channels=8)  # type: ignore[attr-defined]
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return net


def test_seats_alternate_and_results_are_from_the_view_of_the_player() -> None:
    class LastPlayer(FirstPlayer):
        def choose(self, state: np.ndarray, rng: np.random.Generator) -> np.ndarray:
            self.states.append(state)
            return 8 - TICTACTOE.legal_actions(state)[:, ::-1].argmax(-1)

    # the player who moves first completes a row first: 0, 1, 2 or 8, 7, 6
    rng = np.random.default_rng(0)
    first, last = FirstPlayer(), LastPlayer()
    result = play_match(TICTACTOE, first, last, 5, rng)
    assert (result.as_first, result.as_second) == (Tally(3, 0, 0), Tally(0, 0, 2))
    assert (result.lengths == 5).all()
    assert (result.wins, result.draws, result.losses, result.episodes, result.score) == (3, 0, 2, 5, 0.6)
    reverse = play_match(TICTACTOE, last, first, 4, rng)
    assert (reverse.as_first, reverse.as_second) == (Tally(2, 0, 0), Tally(0, 0, 2))
    # each player is called only at its turn
    for state in first.states[0], last.states[0]:
        assert len(state) in (2, 3)
    # a player may play itself
    assert play_match(TICTACTOE, first, first, 2, rng).score == 0.5


def test_each_pair_of_games_has_its_own_opening() -> None:
    class LeftPlayer(FirstPlayer):
        def choose(self, state: np.ndarray, rng: np.random.Generator) -> np.ndarray:
            self.states.append(state)
            return CONNECT_FOUR.legal_actions(state).argmax(-1)

    left = LeftPlayer()
    result = play_match(CONNECT_FOUR, left, LeftPlayer(), 9, np.random.default_rng(0), opening_moves=3)
    # after three moves the second player moves: the player in every other game
    boards = np.asarray(CONNECT_FOUR.observe(left.states[0])).reshape(4, -1)
    assert (boards.sum(-1) == 3).all()
    assert len(np.unique(boards, axis=0)) > 1
    assert (result.lengths > 3).all()
    # equal players win one and lose the other game of a pair
    assert (result.outcomes[:8:2] == -result.outcomes[1:8:2]).all()
    with pytest.raises(UserError, match="opening_moves=6 can end a game of pettingzoo/tictactoe"):
        play_match(TICTACTOE, FirstPlayer(), FirstPlayer(), 200, np.random.default_rng(0), opening_moves=6)


def test_mcts_plays_perfectly_on_tictactoe() -> None:
    result = play_match(TICTACTOE, mcts_player(TICTACTOE, 2000), PerfectPlayer(TICTACTOE), 40, np.random.default_rng(0))
    assert result.losses == 0


def test_more_simulations_play_better() -> None:
    rng = np.random.default_rng(0)
    result = play_match(CONNECT_FOUR, mcts_player(CONNECT_FOUR, 200), mcts_player(CONNECT_FOUR, 20), 60, rng)
    assert result.score > 0.75
    assert play_match(CONNECT_FOUR, mcts_player(CONNECT_FOUR, 20), RandomPlayer(CONNECT_FOUR), 60, rng).score > 0.8


def test_network_players_use_the_network() -> None:
    net = make_net(CONNECT_FOUR)
    with torch.no_grad():
        net.policy.bias[:] = torch.tensor([0.0, 0.0, 50.0, 0.0, 0.0, 0.0, 0.0])
    rng = np.random.default_rng(0)
    greedy, searching = GreedyNetworkPlayer(CONNECT_FOUR, net), puct_player(CONNECT_FOUR, net, 8)
    state = CONNECT_FOUR.initial_states(3)
    for _ in range(3):
        assert greedy.choose(state, rng).tolist() == searching.choose(state, rng).tolist() == [2, 2, 2]
        state, _, _ = CONNECT_FOUR.play(state, np.array([2, 2, 2]))
    for _ in range(3):
        state, _, _ = CONNECT_FOUR.play(state, np.array([2, 2, 2]))
    for player in (greedy, searching):  # the column is full
        assert (player.choose(state, rng) != 2).all()


def test_returns_only_break_ties_of_visits() -> None:
    """Also if returns exceed [-1, 1], as outside of games: here a difference of 40 counts less than one visit."""
    visits = np.array([[5.0, 4.0, 0.0], [5.0, 5.0, 0.0], [3.0, 3.0, 0.0]])
    values = np.array([[-20.0, 20.0, 0.0], [-20.0, 20.0, 0.0], [-7.0, -9.0, 0.0]])
    assert most_visited(SearchResult(visits, np.zeros(3), values, visits)).tolist() == [0, 1, 0]


def test_most_visited_breaks_ties_by_value() -> None:
    visits = np.array([[3.0, 5.0, 5.0, 0.0], [0.0, 0.0, 1.0, 0.0]])
    values = np.array([[0.9, -0.5, -0.2, 0.0], [0.0, 0.0, -1.0, 0.0]])
    assert most_visited(SearchResult(visits, np.zeros(2), values, visits)).tolist() == [2, 2]


def test_cache_is_used_until_cleared() -> None:
    net, rng = make_net(CONNECT_FOUR), np.random.default_rng(0)
    batch_sizes = []
    net.register_forward_hook(lambda module, args, out: batch_sizes.append(len(args[0])))
    plain, cached = NetworkEvaluator(net), NetworkEvaluator(net, cache_size=1 << 12)
    state = CONNECT_FOUR.initial_states(40)
    for _ in range(4):
        state, _, _ = CONNECT_FOUR.play(state, random_action(CONNECT_FOUR.legal_actions(state), rng))
    legal = CONNECT_FOUR.legal_actions(state)
    expected = plain(CONNECT_FOUR, state, legal, rng)
    num_unique = len(np.unique(state, axis=0))
    assert num_unique < 40  # some are equal
    batch_sizes.clear()
    for _ in range(2):
        actual = cached(CONNECT_FOUR, state, legal, rng)
        for a, b in zip(actual, expected, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-6)
    assert batch_sizes == [num_unique]
    assert (cached.num_queries, cached.num_cache_hits) == (80, 40)
    with torch.no_grad():
        net.value.bias += 0.5
    np.testing.assert_array_equal(cached(CONNECT_FOUR, state, legal, rng)[1], actual[1])
    cached.clear_cache()
    assert (cached(CONNECT_FOUR, state, legal, rng)[1] > actual[1]).all()


def test_cache_collisions_are_detected() -> None:
    net, rng = make_net(CONNECT_FOUR), np.random.default_rng(0)
    cached, plain = NetworkEvaluator(net, cache_size=2), NetworkEvaluator(net)
    state = CONNECT_FOUR.initial_states(200)
    for _ in range(6):
        legal = CONNECT_FOUR.legal_actions(state)
        actual, expected = (evaluator(CONNECT_FOUR, state, legal, rng) for evaluator in (cached, plain))
        for a, b in zip(actual, expected, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-6)
        state, _, _ = CONNECT_FOUR.play(state, random_action(legal, rng))
    with pytest.raises(UserError, match="cache_size 100 must be a power of two, such as 128"):
        NetworkEvaluator(net, cache_size=100)


def test_several_leaves_need_fewer_network_calls() -> None:
    net = make_net()
    calls = []
    net.register_forward_hook(lambda module, args, out: calls.append(len(args[0])))
    for leaves in (1, 8):
        calls.clear()
        player = SearchPlayer(TICTACTOE, NetworkEvaluator(net), 32, leaves=leaves)
        player.choose(TICTACTOE.initial_states(1), np.random.default_rng(0))
        assert len(calls) == 1 + 32 // leaves


def test_numpy_generator_depends_on_the_torch_generator() -> None:
    rng = torch.Generator().manual_seed(3)
    saved = rng.get_state()
    first, second = (numpy_generator(rng).random(4) for _ in range(2))
    assert (first != second).all()
    rng.set_state(saved)
    np.testing.assert_array_equal(numpy_generator(rng).random(4), first)


def test_board_net_starts_uniform_and_masks() -> None:
    net = BoardNet((6, 7, 2), 7, blocks=2, channels=16)
    obs = torch.randint(0, 2, (5, 6, 7, 2), dtype=torch.int8)
    mask = torch.tensor([True, False, True, True, True, True, True]).expand(5, 7)
    logits, value = net(obs, mask)
    assert value.tolist() == [0.0] * 5
    np.testing.assert_allclose(logits.softmax(-1).detach(), mask / 6, atol=1e-7)
    # 2·16·9 + 16, four times 16·16·9 + 16, 16·8 + 8, 168·7 + 7, 168·16 + 16, 16 + 1
    assert sum(p.numel() for p in net.parameters()) == 304 + 4 * 2320 + 136 + 1183 + 2704 + 17


def test_board_net_learns() -> None:
    """Learn from few examples whether the player to move has a stone in the top left corner."""
    torch.manual_seed(0)
    net = BoardNet((3, 3, 2), 9, blocks=2, channels=16)
    optimizer = torch.optim.Adam(net.parameters(), 3e-3)
    obs = torch.randint(0, 2, (256, 3, 3, 2), dtype=torch.int8)
    target = obs[:, 0, 0, 0].float() * 2 - 1
    for _ in range(60):
        logits, value = net(obs)
        loss = (value - target).square().mean() + torch.nn.functional.cross_entropy(logits, obs[:, 1, 1, 1].long())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.1


def test_elo_difference() -> None:
    assert elo_difference(0.5) == 0.0
    assert elo_difference(10 / 11) == pytest.approx(400.0)  # ten times as many points
    assert elo_difference(0.25) == pytest.approx(-190.85, abs=0.01)  # 400 log10(1/3)
    assert elo_difference(1.0) == math.inf
    assert elo_difference(0.0) == -math.inf
    with pytest.raises(UserError, match="must be between 0 and 1"):
        elo_difference(1.5)


def make_result(wins: int, draws: int, losses: int) -> MatchResult:
    outcomes = np.repeat([1, 0, -1], [wins, draws, losses])
    return MatchResult(outcomes, np.zeros_like(outcomes), np.ones_like(outcomes))


def test_elo_fits_all_results_together() -> None:
    # one pair with an additional draw: 9.5 points of 11 games give 400 log10(9.5 / 1.5)
    ratings = elo({("a", "b"): make_result(9, 0, 1)}, anchor="b", rating=1000.0)
    assert ratings["b"] == 1000.0
    assert ratings["a"] == pytest.approx(1000.0 + 400.0 * math.log10(9.5 / 1.5))
    # a cycle with contradicting results: the expected points of each player must equal the achieved ones
    results = {
        ("a", "b"): make_result(70, 10, 20),
        ("b", "c"): make_result(50, 0, 50),
        ("c", "a"): make_result(30, 20, 50),
    }
    ratings = elo(results, anchor="c")
    achieved, expected = dict.fromkeys("abc", 0.0), dict.fromkeys("abc", 0.0)
    for (player, opponent), match in results.items():
        games, points = match.episodes + 1, match.wins + 0.5 * match.draws + 0.5
        score = 1.0 / (1.0 + 10.0 ** ((ratings[opponent] - ratings[player]) / 400.0))
        for name, won, expected_score in ((player, points, score), (opponent, games - points, 1.0 - score)):
            achieved[name] += won
            expected[name] += expected_score * games
    for name in "abc":
        assert expected[name] == pytest.approx(achieved[name], abs=1e-6)
    assert ratings["a"] > ratings["b"] > ratings["c"] - 100


def test_elo_of_one_sided_results_is_finite() -> None:
    ratings = elo({("new", "old"): make_result(100, 0, 0), ("old", "first"): make_result(100, 0, 0)}, anchor="first")
    # 100.5 of 101 points each
    step = 400.0 * math.log10(100.5 / 0.5)
    assert ratings["old"] == pytest.approx(step)
    assert ratings["new"] == pytest.approx(2 * step)
    with pytest.raises(UserError, match="no chain of matches connects a with c, d"):
        elo({("a", "b"): make_result(1, 0, 0), ("c", "d"): make_result(1, 0, 0)}, anchor="a")
    with pytest.raises(UserError, match="unknown player 'x'"):
        elo({("a", "b"): make_result(1, 0, 0)}, anchor="x")


def test_match_needs_an_episode() -> None:
    with pytest.raises(UserError, match="at least 1 episode, not 0"):
        play_match(TICTACTOE, FirstPlayer(), FirstPlayer(), 0, np.random.default_rng(0))

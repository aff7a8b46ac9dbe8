from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from zhixing.errors import UserError
from zhixing.search.board_net import BoardNet
from zhixing.search.evaluate import Network, numpy_generator
from zhixing.search.games import make_game, random_action
from zhixing.search.match import MatchResult, Tally, elo, elo_difference, play_match
from zhixing.search.perfect import PerfectPlayer
from zhixing.search.players import NetPlayer, RandomPlayer, SearchPlayer, mcts_player, most_visited, network_player
from zhixing.search.tree import Result

TICTACTOE, CONNECT_FOUR = make_game("pettingzoo/tictactoe"), make_game("pettingzoo/connect_four")


class First:
    """The first legal action, and what it was asked."""

    def __init__(self) -> None:
        self.asked: list[np.ndarray] = []

    def choose(self, state: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        self.asked.append(state)
        return TICTACTOE.legal(state).argmax(-1)


def small_net(game: object = TICTACTOE, seed: int = 0) -> BoardNet:
    torch.manual_seed(seed)
    net = BoardNet(game.obs_shape, game.num_actions, blocks=1, channels=8)  # type: ignore[attr-defined]
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return net


def test_seats_alternate_and_results_are_the_players() -> None:
    class Row(First):
        """0, 1, 2 if they are free, else the last that is: wins in three moves against the last free cells."""

        def choose(self, state: np.ndarray, rng: np.random.Generator) -> np.ndarray:
            self.asked.append(state)
            return TICTACTOE.legal(state).argmax(-1)

    class Last(First):
        def choose(self, state: np.ndarray, rng: np.random.Generator) -> np.ndarray:
            self.asked.append(state)
            return 8 - TICTACTOE.legal(state)[:, ::-1].argmax(-1)

    # whoever begins completes a row first: the one 0, 1, 2, the other 8, 7, 6
    rng = np.random.default_rng(0)
    row, last = Row(), Last()
    result = play_match(TICTACTOE, row, last, 5, rng)
    assert (result.as_first, result.as_second) == (Tally(3, 0, 0), Tally(0, 0, 2))
    assert (result.lengths == 5).all()
    assert (result.wins, result.draws, result.losses, result.episodes, result.score) == (3, 0, 2, 5, 0.6)
    other = play_match(TICTACTOE, last, row, 4, rng)
    assert (other.as_first, other.as_second) == (Tally(2, 0, 0), Tally(0, 0, 2))
    # each is asked only at its turn: as many marks of both when it began, one more of the other's when it didn't
    for state in row.asked[0], last.asked[0]:
        assert len(state) in (2, 3)
    # a player may meet itself
    assert play_match(TICTACTOE, row, row, 2, rng).score == 0.5


def test_openings_differ_by_pairs_of_games_with_both_seats_each() -> None:
    class Left(First):
        def choose(self, state: np.ndarray, rng: np.random.Generator) -> np.ndarray:
            self.asked.append(state)
            return CONNECT_FOUR.legal(state).argmax(-1)

    left = Left()
    result = play_match(CONNECT_FOUR, left, Left(), 9, np.random.default_rng(0), opening=3)
    # with three moves made, the second player moves next: the player in every other game
    shown = np.asarray(CONNECT_FOUR.observe(left.asked[0])).reshape(4, -1)
    assert (shown.sum(-1) == 3).all()
    assert len(np.unique(shown, axis=0)) > 1
    assert (result.lengths > 3).all()
    # whoever they are, two alike win and lose the two games of a pair
    assert (result.outcomes[:8:2] == -result.outcomes[1:8:2]).all()
    with pytest.raises(UserError, match="6 random moves can end pettingzoo/tictactoe"):
        play_match(TICTACTOE, First(), First(), 200, np.random.default_rng(0), opening=6)


def test_mcts_plays_perfectly_on_tictactoe() -> None:
    result = play_match(TICTACTOE, mcts_player(TICTACTOE, 2000), PerfectPlayer(TICTACTOE), 40, np.random.default_rng(0))
    assert result.losses == 0


def test_more_simulations_play_better() -> None:
    rng = np.random.default_rng(0)
    result = play_match(CONNECT_FOUR, mcts_player(CONNECT_FOUR, 200), mcts_player(CONNECT_FOUR, 20), 60, rng)
    assert result.score > 0.75
    assert play_match(CONNECT_FOUR, mcts_player(CONNECT_FOUR, 20), RandomPlayer(CONNECT_FOUR), 60, rng).score > 0.8


def test_network_players_follow_the_network() -> None:
    net = small_net(CONNECT_FOUR)
    with torch.no_grad():
        net.policy.bias[:] = torch.tensor([0.0, 0.0, 50.0, 0.0, 0.0, 0.0, 0.0])
    rng = np.random.default_rng(0)
    alone, ahead = NetPlayer(CONNECT_FOUR, net), network_player(CONNECT_FOUR, net, 8)
    state = CONNECT_FOUR.start(3)
    for _ in range(3):
        assert alone.choose(state, rng).tolist() == ahead.choose(state, rng).tolist() == [2, 2, 2]
        state, _, _ = CONNECT_FOUR.play(state, np.array([2, 2, 2]))
    for _ in range(3):
        state, _, _ = CONNECT_FOUR.play(state, np.array([2, 2, 2]))
    for player in (alone, ahead):  # the column is full
        assert (player.choose(state, rng) != 2).all()


def test_returns_decide_only_between_equally_visited_actions() -> None:
    """Rewards of other tasks than games aren't within [-1, 1]: here a return of 40 doesn't make up for one visit."""
    visits = np.array([[5.0, 4.0, 0.0], [5.0, 5.0, 0.0], [3.0, 3.0, 0.0]])
    values = np.array([[-20.0, 20.0, 0.0], [-20.0, 20.0, 0.0], [-7.0, -9.0, 0.0]])
    assert most_visited(Result(visits, np.zeros(3), values, visits)).tolist() == [0, 1, 0]


def test_most_visited_prefers_the_better_of_equals() -> None:
    visits = np.array([[3.0, 5.0, 5.0, 0.0], [0.0, 0.0, 1.0, 0.0]])
    values = np.array([[0.9, -0.5, -0.2, 0.0], [0.0, 0.0, -1.0, 0.0]])
    assert most_visited(Result(visits, np.zeros(2), values, visits)).tolist() == [2, 2]


def test_what_a_network_said_is_kept_until_forgotten() -> None:
    net, rng = small_net(CONNECT_FOUR), np.random.default_rng(0)
    asked = []
    net.register_forward_hook(lambda module, args, out: asked.append(len(args[0])))
    plain, remembering = Network(net), Network(net, memory=1 << 12)
    state = CONNECT_FOUR.start(40)
    for _ in range(4):
        state, _, _ = CONNECT_FOUR.play(state, random_action(CONNECT_FOUR.legal(state), rng))
    legal = CONNECT_FOUR.legal(state)
    expected = plain(CONNECT_FOUR, state, legal, rng)
    different = len(np.unique(state, axis=0))
    assert different < 40  # some came up twice
    asked.clear()
    for _ in range(2):
        found = remembering(CONNECT_FOUR, state, legal, rng)
        for mine, its in zip(found, expected, strict=True):
            np.testing.assert_allclose(mine, its, atol=1e-6)
    assert asked == [different]
    assert (remembering.asked, remembering.answered) == (80, 40)
    with torch.no_grad():
        net.value.bias += 0.5
    np.testing.assert_array_equal(remembering(CONNECT_FOUR, state, legal, rng)[1], found[1])
    remembering.forget()
    assert (remembering(CONNECT_FOUR, state, legal, rng)[1] > found[1]).all()


def test_states_that_share_a_place_in_memory_are_told_apart() -> None:
    net, rng = small_net(CONNECT_FOUR), np.random.default_rng(0)
    crowded, plain = Network(net, memory=2), Network(net)
    state = CONNECT_FOUR.start(200)
    for _ in range(6):
        legal = CONNECT_FOUR.legal(state)
        found, expected = (net(CONNECT_FOUR, state, legal, rng) for net in (crowded, plain))
        for mine, its in zip(found, expected, strict=True):
            np.testing.assert_allclose(mine, its, atol=1e-6)
        state, _, _ = CONNECT_FOUR.play(state, random_action(legal, rng))
    with pytest.raises(UserError, match="memory 100 must be a power of two, such as 128"):
        Network(net, memory=100)


def test_several_leaves_need_fewer_calls_of_the_network() -> None:
    net = small_net()
    calls = []
    net.register_forward_hook(lambda module, args, out: calls.append(len(args[0])))
    for leaves in (1, 8):
        calls.clear()
        player = SearchPlayer(TICTACTOE, Network(net), 32, leaves=leaves)
        player.choose(TICTACTOE.start(1), np.random.default_rng(0))
        assert len(calls) == 1 + 32 // leaves


def test_numpy_generators_follow_torchs() -> None:
    rng = torch.Generator().manual_seed(3)
    saved = rng.get_state()
    first, second = (numpy_generator(rng).random(4) for _ in range(2))
    assert (first != second).all()
    rng.set_state(saved)
    np.testing.assert_array_equal(numpy_generator(rng).random(4), first)


def test_board_net_starts_without_opinion_and_masks() -> None:
    net = BoardNet((6, 7, 2), 7, blocks=2, channels=16)
    obs = torch.randint(0, 2, (5, 6, 7, 2), dtype=torch.int8)
    mask = torch.tensor([True, False, True, True, True, True, True]).expand(5, 7)
    logits, value = net(obs, mask)
    assert value.tolist() == [0.0] * 5
    np.testing.assert_allclose(logits.softmax(-1).detach(), mask / 6, atol=1e-7)
    # 2·16·9 + 16, four times 16·16·9 + 16, 16·8 + 8, 168·7 + 7, 168·16 + 16, 16 + 1
    assert sum(p.numel() for p in net.parameters()) == 304 + 4 * 2320 + 136 + 1183 + 2704 + 17


def test_board_net_learns_who_wins() -> None:
    """Whether the player to move has a stone in the top left corner, from few examples."""
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


def test_elo_difference_of_a_score() -> None:
    assert elo_difference(0.5) == 0.0
    assert elo_difference(10 / 11) == pytest.approx(400.0)  # ten times as many points
    assert elo_difference(0.25) == pytest.approx(-190.85, abs=0.01)  # 400 log10(1/3)
    assert elo_difference(1.0) == math.inf
    assert elo_difference(0.0) == -math.inf
    with pytest.raises(UserError, match="lies between 0 and 1"):
        elo_difference(1.5)


def result(wins: int, draws: int, losses: int) -> MatchResult:
    outcomes = np.repeat([1, 0, -1], [wins, draws, losses])
    return MatchResult(outcomes, np.zeros_like(outcomes), np.ones_like(outcomes))


def test_elo_fits_all_results_together() -> None:
    # one pair: (9 + 1/2) points of 10 + 1 games... 9.5 / 11 gives 400 log10(9.5 / 1.5)
    ratings = elo({("a", "b"): result(9, 0, 1)}, anchor="b", rating=1000.0)
    assert ratings["b"] == 1000.0
    assert ratings["a"] == pytest.approx(1000.0 + 400.0 * math.log10(9.5 / 1.5))
    # a chain with contradicting results: what is expected of everybody must be what they achieved
    results = {("a", "b"): result(70, 10, 20), ("b", "c"): result(50, 0, 50), ("c", "a"): result(30, 20, 50)}
    ratings = elo(results, anchor="c")
    achieved, expected = dict.fromkeys("abc", 0.0), dict.fromkeys("abc", 0.0)
    for (one, other), match in results.items():
        games, points = match.episodes + 1, match.wins + 0.5 * match.draws + 0.5
        chance = 1.0 / (1.0 + 10.0 ** ((ratings[other] - ratings[one]) / 400.0))
        for name, won, share in ((one, points, chance), (other, games - points, 1.0 - chance)):
            achieved[name] += won
            expected[name] += share * games
    for name in "abc":
        assert expected[name] == pytest.approx(achieved[name], abs=1e-6)
    assert ratings["a"] > ratings["b"] > ratings["c"] - 100


def test_elo_of_one_sided_results_is_finite() -> None:
    ratings = elo({("new", "old"): result(100, 0, 0), ("old", "first"): result(100, 0, 0)}, anchor="first")
    # 100.5 of 101 points each
    step = 400.0 * math.log10(100.5 / 0.5)
    assert ratings["old"] == pytest.approx(step)
    assert ratings["new"] == pytest.approx(2 * step)
    with pytest.raises(UserError, match="no chain of matches leads from a to c, d"):
        elo({("a", "b"): result(1, 0, 0), ("c", "d"): result(1, 0, 0)}, anchor="a")
    with pytest.raises(UserError, match="unknown player 'x'"):
        elo({("a", "b"): result(1, 0, 0)}, anchor="x")


def test_a_match_needs_games() -> None:
    with pytest.raises(UserError, match="0 episodes"):
        play_match(TICTACTOE, First(), First(), 0, np.random.default_rng(0))

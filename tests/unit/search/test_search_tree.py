"""Tests of the tree search."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from unit.search.reference_search import ReferenceNode, ReferenceSearch

from zhixing.errors import UserError
from zhixing.search.board_game import random_action
from zhixing.search.evaluators import PlayoutEvaluator
from zhixing.search.games import make_game
from zhixing.search.players import most_visited
from zhixing.search.tree import SearchTrees, search

TICTACTOE, CONNECT_FOUR = make_game("pettingzoo/tictactoe"), make_game("pettingzoo/connect_four")


class Maze:
    """Single-player model: 40 rooms with three doors. Each door has a reward; rooms divisible by seven are terminal."""

    num_players, num_actions, gamma = 1, 3, 0.9

    def __init__(self) -> None:
        self.rewards = np.random.default_rng(5).integers(-8, 9, (40, 3)) / 4.0

    def legal_actions(self, state: np.ndarray) -> np.ndarray:
        return (state[:, None] + np.arange(3)) % 4 != 0  # one door in four is closed

    def play(self, state: np.ndarray, action: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        after = (3 * state + action + 1) % 40
        return after, self.rewards[state, action], self.is_over(after)

    def is_over(self, state: np.ndarray) -> np.ndarray:
        return state % 7 == 0

    def current_player(self, state: np.ndarray) -> np.ndarray:
        return np.zeros(len(state), np.int8)

    def observe(self, state: np.ndarray) -> np.ndarray:
        return state

    def playout(self, state: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        return np.zeros(len(state))


class Nim:
    """Take one or two from a heap; taking two gives another turn, and taking the last wins. Turns don't alternate."""

    num_players, num_actions, gamma = 2, 2, 1.0

    def legal_actions(self, state: np.ndarray) -> np.ndarray:
        return np.stack([state[:, 0] >= 1, state[:, 0] >= 2], 1)

    def play(self, state: np.ndarray, action: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        heap = state[:, 0] - 1 - action
        after = np.stack([heap, np.where(action == 1, state[:, 1], 1 - state[:, 1])], 1)
        return after, (heap == 0).astype(float), heap == 0

    def is_over(self, state: np.ndarray) -> np.ndarray:
        return state[:, 0] == 0

    def current_player(self, state: np.ndarray) -> np.ndarray:
        return state[:, 1].astype(np.int8)

    def observe(self, state: np.ndarray) -> np.ndarray:
        return state

    def playout(self, state: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        return np.zeros(len(state))


def hashed_evaluation(model: Any, states: np.ndarray, legal: np.ndarray, rng: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return pseudorandom priors and values that depend on the state alone."""
    flat = states.reshape(len(states), -1).astype(np.int64)
    mixed = flat[:, :1] * 7919 + flat[:, -1:] * 104729 + np.arange(model.num_actions + 1) * 15485863
    numbers = (mixed ^ mixed >> 7) % 1009 / 1009.0
    prior = np.where(legal, numbers[:, :-1] + 0.01, 0.0)
    return prior / prior.sum(-1, keepdims=True), 2.0 * numbers[:, -1] - 1.0


def play_moves(game: Any, moves: list[int]) -> np.ndarray:
    state = game.initial_states(1)
    for move in moves:
        state, _, ended = game.play(state, np.array([move]))
        assert not ended[0]
    return state


def assert_equal_subtrees(trees: SearchTrees, row: int, node: ReferenceNode, n: int) -> int:
    """Compare a subtree and return its number of nodes."""
    np.testing.assert_array_equal(trees.states[row], node.state[0])
    assert trees.value[row] == pytest.approx(node.value)
    if node.terminal:
        assert trees.open[row] == 0
        return 1
    count = 1
    for action in range(n):
        if action not in node.legal:
            assert trees.children[row, action] == 0
            assert trees.stats[row, 0, action] == 0
            assert trees.stats[row, 2, action] == -np.inf
            continue
        assert trees.stats[row, 0, action] == node.visits[action]
        assert trees.stats[row, 1, action] == pytest.approx(node.returns[action], abs=1e-9)
        assert (trees.children[row, action] > 0) == (action in node.children)
        if action in node.children:
            count += assert_equal_subtrees(trees, trees.children[row, action], node.children[action], n)
    return count


@pytest.mark.parametrize("select", ["uct", "puct"])
@pytest.mark.parametrize(
    ("model", "root"),
    [
        (TICTACTOE, play_moves(TICTACTOE, [])),
        (TICTACTOE, play_moves(TICTACTOE, [4, 0, 8, 2])),
        (CONNECT_FOUR, play_moves(CONNECT_FOUR, [3, 3, 2, 3, 4])),
        (Nim(), np.array([[9, 1]])),
        (Maze(), np.array([5])),
    ],
    ids=["tictactoe", "tictactoe-late", "connect-four", "nim", "maze"],
)
def test_equals_the_reference_search(model: Any, root: np.ndarray, select: Any) -> None:
    rng = np.random.default_rng(0)
    trees = SearchTrees(model, root, 300, hashed_evaluation, rng, select, 1.3)
    reference = ReferenceSearch(model, root, hashed_evaluation, select, 1.3)
    for _ in range(300):
        trees.simulate()
        reference.simulate()
    assert assert_equal_subtrees(trees, 1, reference.root, model.num_actions) > 25


@pytest.mark.parametrize("leaves", [1, 4])
@pytest.mark.parametrize("select", ["uct", "puct"])
def test_trees_of_a_batch_are_independent(select: Any, leaves: int) -> None:
    rng = np.random.default_rng(1)
    roots = np.concatenate(
        [play_moves(CONNECT_FOUR, moves) for moves in ([], [3], [3, 3, 0, 3, 0], [0, 0, 0, 0, 0, 0, 1])]
    )
    batched = search(CONNECT_FOUR, roots, 120, hashed_evaluation, rng, select=select, leaves=leaves)
    for i, root in enumerate(roots):
        single = search(CONNECT_FOUR, root[None], 120, hashed_evaluation, rng, select=select, leaves=leaves)
        for all_rows, row in zip(batched, single, strict=True):
            np.testing.assert_array_equal(all_rows[i], row[0])


@pytest.mark.parametrize(
    ("model", "root"), [(CONNECT_FOUR, play_moves(CONNECT_FOUR, [3, 3, 3, 2, 4])), (Maze(), np.array([5]))]
)
def test_virtual_losses_are_removed(model: Any, root: np.ndarray) -> None:
    trees = SearchTrees(model, root.repeat(2, 0), 400, hashed_evaluation, np.random.default_rng(1), "puct", 2.0)
    for _ in range(40):
        trees.simulate(10)
    assert trees.num_nodes == 1 + 2 * 401
    assert trees.result().visits.sum(-1).tolist() == [400, 400]
    # an action that ends the game returns exactly its reward at each visit
    node, action = np.nonzero(trees.children)
    child = trees.children[node, action]
    terminal = trees.open[child] == 0
    visits, returns = trees.stats[node[terminal], 0, action[terminal]], trees.stats[node[terminal], 1, action[terminal]]
    assert terminal.sum() > 5
    assert visits.max() > 1
    np.testing.assert_allclose(returns, visits * trees.reward[child[terminal]], atol=1e-9)
    # the value is close to that of a search with single leaves
    single = search(model, root, 400, hashed_evaluation, np.random.default_rng(1), c=2.0)
    assert abs(trees.result().value[0] - single.value[0]) < 0.25


# the player to move has a winning move, or must block the opponent's
WINS = [
    (TICTACTOE, [0, 3, 1, 4], 2),
    (TICTACTOE, [0, 4, 8, 2, 3], 6),
    (CONNECT_FOUR, [0, 1, 0, 1, 0, 1], 0),
    (CONNECT_FOUR, [1, 6, 2, 6, 4, 5], 3),
    (CONNECT_FOUR, [0, 1, 1, 2, 2, 3, 2, 3, 3, 6], 3),
]
BLOCKS = [
    (TICTACTOE, [0, 4, 1], 2),
    (TICTACTOE, [4, 0, 2], 6),
    (CONNECT_FOUR, [0, 6, 0, 6, 0], 0),
    (CONNECT_FOUR, [1, 6, 2, 6, 4], 3),
]


@pytest.mark.parametrize(("game", "moves", "expected"), WINS + BLOCKS)
@pytest.mark.parametrize("leaves", [1, 8])
def test_finds_wins_and_blocks(game: Any, moves: list[int], expected: int, leaves: int) -> None:
    rng = np.random.default_rng(0)
    roots = play_moves(game, moves).repeat(5, 0)
    result = search(game, roots, 400, PlayoutEvaluator(2), rng, select="uct", c=1.4, leaves=leaves)
    assert (most_visited(result) == expected).all()


def test_finds_a_win_in_three_moves() -> None:
    # two stones in the middle of the lowest row with both sides free: a third makes an open three
    state = play_moves(CONNECT_FOUR, [2, 2, 3, 3])
    result = search(
        CONNECT_FOUR, state.repeat(5, 0), 1500, PlayoutEvaluator(), np.random.default_rng(0), select="uct", c=1.0
    )
    assert set(most_visited(result)) <= {1, 4}
    assert (result.value > 0.6).all()


def test_values_are_for_the_player_to_move() -> None:
    rng = np.random.default_rng(0)
    won = play_moves(TICTACTOE, [0, 3, 1, 4])  # 2 wins at once
    lost = play_moves(TICTACTOE, [0, 4, 8, 2, 6, 3, 1][:5])  # 0, 6 and 8 threaten 3 and 7: only one can be blocked
    result = search(TICTACTOE, np.concatenate([won, lost]), 2000, PlayoutEvaluator(), rng, select="uct", c=1.0)
    assert result.value[0] > 0.8
    assert result.action_values[0, 2] == 1.0
    assert result.value[1] < -0.5


def test_single_player_rewards_are_discounted() -> None:
    class Corridor(Maze):
        """Five rooms: action 2 moves forward, action 0 returns to the start, and the last room has reward 8."""

        gamma = 0.5

        def legal_actions(self, state: np.ndarray) -> np.ndarray:
            return np.tile([True, False, True], (len(state), 1))

        def play(self, state: np.ndarray, action: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
            after = np.where(action == 2, state + 1, 0)
            return after, (after == 4) * 8.0, after == 4

        def is_over(self, state: np.ndarray) -> np.ndarray:
            return state == 4

    result = search(
        Corridor(), np.array([0, 1, 2, 3, 4]), 3000, PlayoutEvaluator(), np.random.default_rng(0), select="uct", c=0.5
    )
    # a reward of 8 at step k has the value 8 / 2^(k-1): 1, 2, 4 and 8, and 0 at the terminal state
    np.testing.assert_allclose(result.action_values[:, 2], [1.0, 2.0, 4.0, 8.0, 0.0], rtol=0.1)
    assert result.visits[4].sum() == 0
    assert result.visits[:, 1].sum() == 0


def test_terminal_roots_are_skipped() -> None:
    rng = np.random.default_rng(0)
    state, _, ended = TICTACTOE.play(play_moves(TICTACTOE, [0, 3, 1, 4]), np.array([2]))
    assert ended[0]
    roots = np.concatenate([state, TICTACTOE.initial_states(1), state])
    result = search(TICTACTOE, roots, 50, hashed_evaluation, rng)
    assert result.visits.sum(-1).tolist() == [0, 50, 0]
    assert result.value[[0, 2]].tolist() == [0, 0]
    single = search(TICTACTOE, TICTACTOE.initial_states(1), 50, hashed_evaluation, rng)
    np.testing.assert_array_equal(result.visits[1], single.visits[0])
    assert search(TICTACTOE, state, 50, hashed_evaluation, rng).visits.sum() == 0


@pytest.mark.parametrize("select", ["uct", "puct"])
def test_illegal_actions_are_never_visited(select: Any) -> None:
    rng = np.random.default_rng(0)
    state = CONNECT_FOUR.initial_states(100)
    for _ in range(28):  # some columns get full
        after, _, ended = CONNECT_FOUR.play(state, random_action(CONNECT_FOUR.legal_actions(state), rng))
        state = after[~ended]
    legal = CONNECT_FOUR.legal_actions(state)
    assert (~legal.all(1)).sum() >= 10
    for evaluate in (hashed_evaluation, PlayoutEvaluator()):
        trees = SearchTrees(CONNECT_FOUR, state, 200, evaluate, rng, select, 1.4)
        trees.add_noise(0.5, 0.3)
        for _ in range(50):
            trees.simulate(4)
        # not only at the roots
        nodes = np.flatnonzero(trees.open)
        illegal = ~CONNECT_FOUR.legal_actions(trees.states[nodes])
        assert trees.stats[nodes, 0][illegal].sum() == 0
        assert (trees.children[nodes][illegal] == 0).all()
        assert (trees.result().visits[~legal] == 0).all()
        assert (trees.result().prior[~legal] == 0).all()


def test_noise_is_added_at_roots_only() -> None:
    rng = np.random.default_rng(0)
    root = play_moves(CONNECT_FOUR, [0, 0, 0, 0, 0, 0])  # column 0 is full
    roots = root.repeat(2000, 0)
    trees = SearchTrees(CONNECT_FOUR, roots, 1, hashed_evaluation, rng, "puct", 1.3)
    before = trees.result().prior[0]
    trees.add_noise(0.5, 0.5)
    noisy = trees.result().prior
    np.testing.assert_allclose(noisy.sum(-1), 1.0)
    noise = (noisy - 0.5 * before) / 0.5  # [B,n]
    assert (noise[:, 0] == 0).all()
    # six legal actions, Dirichlet(0.5): mean 1/6, variance (1/6)(5/6) / (6 · 0.5 + 1) = 0.0347
    np.testing.assert_allclose(noise[:, 1:].mean(0), 1 / 6, atol=0.02)
    np.testing.assert_allclose(noise[:, 1:].var(0), 5 / 144, atol=0.005)
    trees.simulate()
    children = np.arange(2001, 4001)
    expected, _ = hashed_evaluation(
        CONNECT_FOUR, trees.states[children], CONNECT_FOUR.legal_actions(trees.states[children]), rng
    )
    np.testing.assert_array_equal(np.maximum(trees.stats[children, 2], 0.0), expected)
    # the noise determines the first action
    assert len(np.unique(trees.result().visits.argmax(-1))) == 6


def test_uct_tries_all_actions_in_random_order() -> None:
    roots = CONNECT_FOUR.initial_states(300)
    for simulations in (6, 7):
        result = search(CONNECT_FOUR, roots, simulations, PlayoutEvaluator(), np.random.default_rng(0), select="uct")
        assert result.visits.max() == 1
    untried = search(CONNECT_FOUR, roots, 6, PlayoutEvaluator(), np.random.default_rng(0), select="uct").visits.argmin(
        -1
    )
    assert np.bincount(untried, minlength=7).min() > 20  # 300 / 7 = 43


def test_search_depends_on_the_seed() -> None:
    runs = [
        search(
            CONNECT_FOUR,
            CONNECT_FOUR.initial_states(3),
            100,
            PlayoutEvaluator(),
            np.random.default_rng(seed),
            select="uct",
            noise=0.2,
        )
        for seed in (3, 3, 4)
    ]
    np.testing.assert_array_equal(runs[0].visits, runs[1].visits)
    assert (runs[0].visits != runs[2].visits).any()


def test_invalid_settings_are_rejected() -> None:
    rng = np.random.default_rng(0)
    for invalid in ({"leaves": 0}, {"c": 0.0}):
        with pytest.raises(UserError, match="must be at least 1, c"):
            search(TICTACTOE, TICTACTOE.initial_states(1), 10, hashed_evaluation, rng, **invalid)
    with pytest.raises(UserError, match="simulations 0"):
        search(TICTACTOE, TICTACTOE.initial_states(1), 0, hashed_evaluation, rng)
    with pytest.raises(UserError, match="playouts 0"):
        PlayoutEvaluator(0)

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from unit.search.naive import NaiveNode, NaiveSearch

from zhixing.errors import UserError
from zhixing.search.evaluate import Playouts
from zhixing.search.games import make_game, random_action
from zhixing.search.players import most_visited
from zhixing.search.tree import Trees, search

TICTACTOE, CONNECT_FOUR = make_game("pettingzoo/tictactoe"), make_game("pettingzoo/connect_four")


class Maze:
    """Forty rooms with three doors; each door pays something, rooms divisible by seven are exits."""

    num_players, num_actions, gamma = 1, 3, 0.9

    def __init__(self) -> None:
        self.pay = np.random.default_rng(5).integers(-8, 9, (40, 3)) / 4.0

    def legal(self, state: np.ndarray) -> np.ndarray:
        return (state[:, None] + np.arange(3)) % 4 != 0  # one door in four is shut

    def play(self, state: np.ndarray, action: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        after = (3 * state + action + 1) % 40
        return after, self.pay[state, action], self.over(after)

    def over(self, state: np.ndarray) -> np.ndarray:
        return state % 7 == 0

    def to_move(self, state: np.ndarray) -> np.ndarray:
        return np.zeros(len(state), np.int8)

    def observe(self, state: np.ndarray) -> np.ndarray:
        return state

    def playout(self, state: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        return np.zeros(len(state))


class Nim:
    """Take one or two of a heap, and move again after taking two: who takes the last wins. A turn isn't always over."""

    num_players, num_actions, gamma = 2, 2, 1.0

    def legal(self, state: np.ndarray) -> np.ndarray:
        return np.stack([state[:, 0] >= 1, state[:, 0] >= 2], 1)

    def play(self, state: np.ndarray, action: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        heap = state[:, 0] - 1 - action
        after = np.stack([heap, np.where(action == 1, state[:, 1], 1 - state[:, 1])], 1)
        return after, (heap == 0).astype(float), heap == 0

    def over(self, state: np.ndarray) -> np.ndarray:
        return state[:, 0] == 0

    def to_move(self, state: np.ndarray) -> np.ndarray:
        return state[:, 1].astype(np.int8)

    def observe(self, state: np.ndarray) -> np.ndarray:
        return state

    def playout(self, state: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        return np.zeros(len(state))


def fixed(model: Any, states: np.ndarray, legal: np.ndarray, rng: Any) -> tuple[np.ndarray, np.ndarray]:
    """Priors and values that look random but depend on the state alone."""
    words = states.reshape(len(states), -1).astype(np.int64)
    mixed = words[:, :1] * 7919 + words[:, -1:] * 104729 + np.arange(model.num_actions + 1) * 15485863
    numbers = (mixed ^ mixed >> 7) % 1009 / 1009.0
    prior = np.where(legal, numbers[:, :-1] + 0.01, 0.0)
    return prior / prior.sum(-1, keepdims=True), 2.0 * numbers[:, -1] - 1.0


def play(game: Any, moves: list[int]) -> np.ndarray:
    state = game.start(1)
    for move in moves:
        state, _, ended = game.play(state, np.array([move]))
        assert not ended[0]
    return state


def assert_same(trees: Trees, row: int, node: NaiveNode, n: int) -> int:
    """Compares a subtree; returns the number of its nodes."""
    np.testing.assert_array_equal(trees.states[row], node.state[0])
    assert trees.value[row] == pytest.approx(node.value)
    if node.ended:
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
            count += assert_same(trees, trees.children[row, action], node.children[action], n)
    return count


@pytest.mark.parametrize("select", ["uct", "puct"])
@pytest.mark.parametrize(
    ("model", "root"),
    [
        (TICTACTOE, play(TICTACTOE, [])),
        (TICTACTOE, play(TICTACTOE, [4, 0, 8, 2])),
        (CONNECT_FOUR, play(CONNECT_FOUR, [3, 3, 2, 3, 4])),
        (Nim(), np.array([[9, 1]])),
        (Maze(), np.array([5])),
    ],
    ids=["tictactoe", "tictactoe-late", "connect-four", "nim", "maze"],
)
def test_equals_a_search_with_an_object_per_node(model: Any, root: np.ndarray, select: Any) -> None:
    rng = np.random.default_rng(0)
    trees = Trees(model, root, 300, fixed, rng, select, 1.3)
    naive = NaiveSearch(model, root, fixed, select, 1.3)
    for _ in range(300):
        trees.simulate()
        naive.simulate()
    assert assert_same(trees, 1, naive.root, model.num_actions) > 25


@pytest.mark.parametrize("leaves", [1, 4])
@pytest.mark.parametrize("select", ["uct", "puct"])
def test_a_batch_of_trees_gives_what_each_gives_alone(select: Any, leaves: int) -> None:
    rng = np.random.default_rng(1)
    roots = np.concatenate([play(CONNECT_FOUR, moves) for moves in ([], [3], [3, 3, 0, 3, 0], [0, 0, 0, 0, 0, 0, 1])])
    together = search(CONNECT_FOUR, roots, 120, fixed, rng, select=select, leaves=leaves)
    for i, root in enumerate(roots):
        alone = search(CONNECT_FOUR, root[None], 120, fixed, rng, select=select, leaves=leaves)
        for many, one in zip(together, alone, strict=True):
            np.testing.assert_array_equal(many[i], one[0])


@pytest.mark.parametrize(
    ("model", "root"), [(CONNECT_FOUR, play(CONNECT_FOUR, [3, 3, 3, 2, 4])), (Maze(), np.array([5]))]
)
def test_several_leaves_at_once_leave_no_trace_of_what_was_assumed(model: Any, root: np.ndarray) -> None:
    trees = Trees(model, root.repeat(2, 0), 400, fixed, np.random.default_rng(1), "puct", 2.0)
    for _ in range(40):
        trees.simulate(10)
    assert trees.made == 1 + 2 * 401
    assert trees.result().visits.sum(-1).tolist() == [400, 400]
    # an action that leads to an end returns its reward at each visit, no more and no less
    node, action = np.nonzero(trees.children)
    child = trees.children[node, action]
    ends = trees.open[child] == 0
    visits, returns = trees.stats[node[ends], 0, action[ends]], trees.stats[node[ends], 1, action[ends]]
    assert ends.sum() > 5
    assert visits.max() > 1
    np.testing.assert_allclose(returns, visits * trees.reward[child[ends]], atol=1e-9)
    # and about as much is found as by going one by one
    one = search(model, root, 400, fixed, np.random.default_rng(1), c=2.0)
    assert abs(trees.result().value[0] - one.value[0]) < 0.25


# who is to move has a move that wins at once, or must take the one cell that would let the other win
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


@pytest.mark.parametrize(("game", "moves", "answer"), WINS + BLOCKS)
@pytest.mark.parametrize("leaves", [1, 8])
def test_finds_wins_and_blocks(game: Any, moves: list[int], answer: int, leaves: int) -> None:
    rng = np.random.default_rng(0)
    roots = play(game, moves).repeat(5, 0)
    found = search(game, roots, 400, Playouts(2), rng, select="uct", c=1.4, leaves=leaves)
    assert (most_visited(found) == answer).all()


def test_sees_a_win_in_three_moves() -> None:
    # two stones in the middle of the lowest row with both sides free: a third makes an open three
    state = play(CONNECT_FOUR, [2, 2, 3, 3])
    found = search(CONNECT_FOUR, state.repeat(5, 0), 1500, Playouts(), np.random.default_rng(0), select="uct", c=1.0)
    assert set(most_visited(found)) <= {1, 4}
    assert (found.value > 0.6).all()


def test_values_are_those_of_the_player_to_move() -> None:
    rng = np.random.default_rng(0)
    won = play(TICTACTOE, [0, 3, 1, 4])  # 2 wins at once
    lost = play(TICTACTOE, [0, 4, 8, 2, 6, 3, 1][:5])  # 0 and 6 and 8 threaten 3 and 7: the other can take only one
    found = search(TICTACTOE, np.concatenate([won, lost]), 2000, Playouts(), rng, select="uct", c=1.0)
    assert found.value[0] > 0.8
    assert found.action_values[0, 2] == 1.0
    assert found.value[1] < -0.5


def test_one_player_adds_discounted_rewards() -> None:
    class Corridor(Maze):
        """Ten rooms: forward pays 0 but 1 at the end, the other two doors lead back to the start."""

        gamma = 0.5

        def legal(self, state: np.ndarray) -> np.ndarray:
            return np.tile([True, False, True], (len(state), 1))

        def play(self, state: np.ndarray, action: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
            after = np.where(action == 2, state + 1, 0)
            return after, (after == 4) * 8.0, after == 4

        def over(self, state: np.ndarray) -> np.ndarray:
            return state == 4

    found = search(
        Corridor(), np.array([0, 1, 2, 3, 4]), 3000, Playouts(), np.random.default_rng(0), select="uct", c=0.5
    )
    # 8 paid at the k-th step is worth 8 / 2^(k-1): 1, 2, 4 and 8, and nothing once it is over
    np.testing.assert_allclose(found.action_values[:, 2], [1.0, 2.0, 4.0, 8.0, 0.0], rtol=0.1)
    assert found.visits[4].sum() == 0
    assert found.visits[:, 1].sum() == 0


def test_over_at_the_root_is_left_out() -> None:
    rng = np.random.default_rng(0)
    state, _, ended = TICTACTOE.play(play(TICTACTOE, [0, 3, 1, 4]), np.array([2]))
    assert ended[0]
    roots = np.concatenate([state, TICTACTOE.start(1), state])
    found = search(TICTACTOE, roots, 50, fixed, rng)
    assert found.visits.sum(-1).tolist() == [0, 50, 0]
    assert found.value[[0, 2]].tolist() == [0, 0]
    alone = search(TICTACTOE, TICTACTOE.start(1), 50, fixed, rng)
    np.testing.assert_array_equal(found.visits[1], alone.visits[0])
    assert search(TICTACTOE, state, 50, fixed, rng).visits.sum() == 0


@pytest.mark.parametrize("select", ["uct", "puct"])
def test_illegal_actions_are_never_visited(select: Any) -> None:
    rng = np.random.default_rng(0)
    state = CONNECT_FOUR.start(100)
    for _ in range(28):  # columns fill up
        after, _, ended = CONNECT_FOUR.play(state, random_action(CONNECT_FOUR.legal(state), rng))
        state = after[~ended]
    legal = CONNECT_FOUR.legal(state)
    assert (~legal.all(1)).sum() >= 10
    for evaluate in (fixed, Playouts()):
        trees = Trees(CONNECT_FOUR, state, 200, evaluate, rng, select, 1.4)
        trees.add_noise(0.5, 0.3)
        for _ in range(50):
            trees.simulate(4)
        # in all nodes, not only at the roots
        nodes = np.flatnonzero(trees.open)
        forbidden = ~CONNECT_FOUR.legal(trees.states[nodes])
        assert trees.stats[nodes, 0][forbidden].sum() == 0
        assert (trees.children[nodes][forbidden] == 0).all()
        assert (trees.result().visits[~legal] == 0).all()
        assert (trees.result().prior[~legal] == 0).all()


def test_noise_is_added_at_roots_only() -> None:
    rng = np.random.default_rng(0)
    root = play(CONNECT_FOUR, [0, 0, 0, 0, 0, 0])  # one column is full
    roots = root.repeat(2000, 0)
    trees = Trees(CONNECT_FOUR, roots, 1, fixed, rng, "puct", 1.3)
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
    expected, _ = fixed(CONNECT_FOUR, trees.states[children], CONNECT_FOUR.legal(trees.states[children]), rng)
    np.testing.assert_array_equal(np.maximum(trees.stats[children, 2], 0.0), expected)
    # the noise decides what is tried first
    assert len(np.unique(trees.result().visits.argmax(-1))) == 6


def test_uct_tries_everything_once_in_random_order() -> None:
    roots = CONNECT_FOUR.start(300)
    for simulations in (6, 7):
        found = search(CONNECT_FOUR, roots, simulations, Playouts(), np.random.default_rng(0), select="uct")
        assert found.visits.max() == 1
    left_out = search(CONNECT_FOUR, roots, 6, Playouts(), np.random.default_rng(0), select="uct").visits.argmin(-1)
    assert np.bincount(left_out, minlength=7).min() > 20  # 300 / 7 = 43


def test_equal_seeds_give_equal_searches() -> None:
    runs = [
        search(
            CONNECT_FOUR, CONNECT_FOUR.start(3), 100, Playouts(), np.random.default_rng(seed), select="uct", noise=0.2
        )
        for seed in (3, 3, 4)
    ]
    np.testing.assert_array_equal(runs[0].visits, runs[1].visits)
    assert (runs[0].visits != runs[2].visits).any()


def test_wrong_settings_are_told() -> None:
    rng = np.random.default_rng(0)
    for wrong in ({"leaves": 0}, {"c": 0.0}):
        with pytest.raises(UserError, match="must be at least 1, c"):
            search(TICTACTOE, TICTACTOE.start(1), 10, fixed, rng, **wrong)
    with pytest.raises(UserError, match="simulations 0"):
        search(TICTACTOE, TICTACTOE.start(1), 0, fixed, rng)
    with pytest.raises(UserError, match="playouts 0"):
        Playouts(0)

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest

from zhixing.core.batch import Batch
from zhixing.errors import UserError
from zhixing.search.bits import count_bits, sum_of_bits
from zhixing.search.games import GAMES, Game, augment, make_game, random_action, seat_to_move

NAMES = sorted(GAMES)
# a game of connect four that fills the board without a line: one in 400 random ones does
DRAWN = [int(move) for move in "054223626023402130142661340440553311665515"]


def theirs(name: str) -> Any:
    """PettingZoo's own game. Its wrappers only guard against illegal moves, of which there are none here."""
    module = {"pettingzoo/tictactoe": "tictactoe_v3", "pettingzoo/connect_four": "connect_four_v3"}[name]
    pytest.importorskip("pettingzoo.classic")
    return importlib.import_module(f"pettingzoo.classic.{module}").raw_env()


def random_states(game: Game, num: int, moves: int, rng: np.random.Generator) -> np.ndarray:
    """States after so many random moves, of games that aren't over."""
    state = game.start(num)
    for _ in range(moves):
        after, _, ended = game.play(state, random_action(game.legal(state), rng))
        state = after[~ended]
    return state


@pytest.mark.parametrize(("name", "games"), [("pettingzoo/tictactoe", 2000), ("pettingzoo/connect_four", 1000)])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # PettingZoo's modules warn of being there
def test_plays_as_pettingzoo_move_by_move(name: str, games: int) -> None:
    game, env, rng = make_game(name), theirs(name), np.random.default_rng(0)
    state, playing = game.start(games), np.arange(games)
    actions: list[list[int]] = [[] for _ in range(games)]
    seen: list[list[tuple[Any, ...]]] = [[] for _ in range(games)]
    while len(playing):
        action = random_action(game.legal(state), rng)
        if game.num_actions == 7:
            action[playing == 0] = DRAWN[len(actions[0]) % 42]
        after, reward, ended = game.play(state, action)
        told = zip(
            game.observe(state), game.legal(state), game.to_move(state), game.over(state), reward, ended, strict=True
        )
        for index, chosen, row in zip(playing, action, told, strict=True):
            actions[index].append(int(chosen))
            seen[index].append(row)
        np.testing.assert_array_equal(game.over(after), ended)
        np.testing.assert_array_equal(game.from_obs(game.observe(after)), after)
        state, playing = after[~ended], playing[~ended]
    outcomes = set()
    for moves, rows in zip(actions, seen, strict=True):
        env.reset()
        for move, (obs, mask, seat, over, reward, ended) in zip(moves, rows, strict=True):
            agent = env.agent_selection
            assert agent == env.possible_agents[seat]
            assert not over
            its = env.observe(agent)
            np.testing.assert_array_equal(obs, its["observation"])
            np.testing.assert_array_equal(mask, its["action_mask"])
            assert obs.dtype == its["observation"].dtype
            env.step(move)
            assert env.rewards[agent] == reward
            assert sum(env.rewards.values()) == 0
            assert all(env.terminations.values()) == ended
        outcomes.add((int(seat), float(reward)))
    # both have won, and nobody: who moves last on a full board is the first player with 9 cells, the second with 42
    assert outcomes == {(0, 1.0), (1, 1.0), (0 if game.num_actions == 9 else 1, 0.0)}


@pytest.mark.parametrize(
    "line", [[(0, 0), (0, 1), (0, 2), (0, 3)], [(2, 6), (3, 6), (4, 6), (5, 6)], [(3, 0), (2, 1), (1, 2), (0, 3)]]
)
def test_connect_four_has_no_line_around_the_edge(line: list[tuple[int, int]]) -> None:
    game = make_game("pettingzoo/connect_four")
    obs = np.zeros((2, 6, 7, 2), np.int8)
    for height, column in line:
        obs[0, 5 - height, column, 0] = 1
        # moved up and to the right by as much as takes it over the edge: bits of two columns
        obs[1, 5 - (height + 3) % 6, (column + 4) % 7, 0] = 1
    assert game.over(game.from_obs(obs)).tolist() == [True, False]


@pytest.mark.parametrize("name", NAMES)
def test_playouts_have_the_chances_of_random_play(name: str) -> None:
    game, rng = make_game(name), np.random.default_rng(0)
    for moves in (0, 3, 5):
        start = random_states(game, 50, moves, rng)[:1]
        num = 20_000
        state, mover, outcome = start.repeat(num, 0), game.to_move(start)[0], np.zeros(num)
        playing = np.arange(num)
        while len(playing):
            turn = game.to_move(state)
            state, reward, ended = game.play(state, random_action(game.legal(state), rng))
            outcome[playing] = np.where(turn == mover, reward, -reward)
            state, playing = state[~ended], playing[~ended]
        drawn = game.playout(start.repeat(num, 0), rng)
        for result in (-1.0, 0.0, 1.0):
            # a share's standard deviation is at most 0.5 / √20000 = 0.0035, that of a difference 0.005
            assert abs((drawn == result).mean() - (outcome == result).mean()) < 0.02


def test_playouts_of_a_won_move_are_won() -> None:
    game = make_game("pettingzoo/connect_four")
    state = game.start(1)
    for move in (0, 0, 1, 1, 2, 2, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2):
        state, _, ended = game.play(state, np.array([move]))
    # columns 0 to 2 are full; who is to move has three in the lowest row and the next cell is free, as are 4, 5 and 6
    assert not ended[0]
    values = game.playout(state.repeat(4000, 0), np.random.default_rng(0))
    assert values.mean() > 0.25 - 3 * 0.016  # the first move wins with a chance of 1/4


@pytest.mark.parametrize("name", NAMES)
def test_symmetries_are_games_too(name: str) -> None:
    """A game played on a turned board stays a turned one: observations, masks, rewards and ends."""
    game, rng = make_game(name), np.random.default_rng(0)
    count = len(game.cell_symmetries)
    assert len({tuple(row) for row in game.cell_symmetries.tolist()}) == count == {9: 8, 7: 2}[game.num_actions]
    assert (game.cell_symmetries[0] == np.arange(len(game.cell_symmetries[0]))).all()
    for which in range(count):
        cells, actions = game.cell_symmetries[which], game.action_symmetries[which]
        state, other = game.start(200), game.start(200)
        while len(state):
            obs, its = game.observe(state), game.observe(other)
            np.testing.assert_array_equal(obs.reshape(len(state), -1, 2)[:, cells].reshape(obs.shape), its)
            np.testing.assert_array_equal(game.legal(state)[:, actions], game.legal(other))
            action = random_action(game.legal(other), rng)
            state, reward, ended = game.play(state, actions[action])
            other, its_reward, its_ended = game.play(other, action)
            np.testing.assert_array_equal(reward, its_reward)
            np.testing.assert_array_equal(ended, its_ended)
            state, other = state[~ended], other[~ended]


def test_augment_moves_what_belongs_together() -> None:
    game, rng = make_game("pettingzoo/connect_four"), np.random.default_rng(0)
    state, _, _ = game.play(game.start(64), np.zeros(64, np.int64))
    policy = np.tile(np.arange(7, dtype=np.float32), (64, 1))
    mask = np.tile(np.arange(7) < 3, (64, 1))
    batch = Batch(obs=game.observe(state), mask=mask, policy=policy, outcome=np.arange(64.0))
    turned = augment(game, batch, rng)
    mirrored = turned.obs[:, 5, 6, 1] == 1
    assert 10 < mirrored.sum() < 54
    np.testing.assert_array_equal(turned.obs[~mirrored], batch.obs[~mirrored])
    np.testing.assert_array_equal(turned.obs[mirrored], batch.obs[mirrored][:, :, ::-1])
    np.testing.assert_array_equal(turned.policy[mirrored], policy[mirrored][:, ::-1])
    np.testing.assert_array_equal(turned.mask[mirrored], mask[mirrored][:, ::-1])
    np.testing.assert_array_equal(turned.outcome, batch.outcome)


@pytest.mark.parametrize("name", NAMES)
def test_seat_to_move_is_read_off_both_views(name: str) -> None:
    game, rng = make_game(name), np.random.default_rng(0)
    for moves in range(5):
        state = random_states(game, 20, moves, rng)
        view = game.observe(state)
        other = view[..., ::-1]
        seats = np.stack([view, other] if moves % 2 == 0 else [other, view], 1)
        assert (seat_to_move(seats) == moves % 2).all()
        assert (game.to_move(state) == moves % 2).all()


def test_bits_are_counted() -> None:
    boards = np.concatenate([np.random.default_rng(0).integers(0, 1 << 49, 1000), [0, 1, (1 << 49) - 1, 1 << 48]])
    expected = [bin(board).count("1") for board in boards.tolist()]
    assert sum_of_bits(boards).tolist() == expected
    assert count_bits(boards).tolist() == expected


def test_unknown_games_are_told() -> None:
    with pytest.raises(UserError, match=r"unknown game 'pettingzoo/chess': .*connect_four"):
        make_game("pettingzoo/chess")

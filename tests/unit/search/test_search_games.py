"""Tests of the games against PettingZoo's."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest

from zhixing.core.batch import Batch
from zhixing.errors import UserError
from zhixing.search.bitboard import popcount, popcount_fallback
from zhixing.search.board_game import BoardGame, current_seat, random_action
from zhixing.search.games import BITBOARDS, augment, make_game

NAMES = sorted(BITBOARDS)
# a drawn game of connect four: one in 400 random games is
DRAWN_GAME = [int(move) for move in "054223626023402130142661340440553311665515"]


def make_pettingzoo_game(name: str) -> Any:
    """Make PettingZoo's game without its wrappers, which only check for illegal moves."""
    module = {"pettingzoo/tictactoe": "tictactoe_v3", "pettingzoo/connect_four": "connect_four_v3"}[name]
    pytest.importorskip("pettingzoo.classic")
    return importlib.import_module(f"pettingzoo.classic.{module}").raw_env()


def random_states(game: BoardGame, num: int, moves: int, rng: np.random.Generator) -> np.ndarray:
    """Return the unfinished games among `num` after `moves` random moves."""
    state = game.initial_states(num)
    for _ in range(moves):
        after, _, ended = game.play(state, random_action(game.legal_actions(state), rng))
        state = after[~ended]
    return state


@pytest.mark.parametrize(("name", "games"), [("pettingzoo/tictactoe", 2000), ("pettingzoo/connect_four", 1000)])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised by PettingZoo's modules
def test_game_equals_pettingzoo_move_by_move(name: str, games: int) -> None:
    game, env, rng = make_game(name), make_pettingzoo_game(name), np.random.default_rng(0)
    state, playing = game.initial_states(games), np.arange(games)
    actions: list[list[int]] = [[] for _ in range(games)]
    positions: list[list[tuple[Any, ...]]] = [[] for _ in range(games)]
    while len(playing):
        action = random_action(game.legal_actions(state), rng)
        if game.num_actions == 7:
            action[playing == 0] = DRAWN_GAME[len(actions[0]) % 42]
        after, reward, ended = game.play(state, action)
        position = zip(
            game.observe(state),
            game.legal_actions(state),
            game.current_player(state),
            game.is_over(state),
            reward,
            ended,
            strict=True,
        )
        for index, chosen, row in zip(playing, action, position, strict=True):
            actions[index].append(int(chosen))
            positions[index].append(row)
        np.testing.assert_array_equal(game.is_over(after), ended)
        np.testing.assert_array_equal(game.from_obs(game.observe(after)), after)
        state, playing = after[~ended], playing[~ended]
    outcomes = set()
    for moves, rows in zip(actions, positions, strict=True):
        env.reset()
        for move, (obs, mask, seat, over, reward, ended) in zip(moves, rows, strict=True):
            agent = env.agent_selection
            assert agent == env.possible_agents[seat]
            assert not over
            expected = env.observe(agent)
            np.testing.assert_array_equal(obs, expected["observation"])
            np.testing.assert_array_equal(mask, expected["action_mask"])
            assert obs.dtype == expected["observation"].dtype
            env.step(move)
            assert env.rewards[agent] == reward
            assert sum(env.rewards.values()) == 0
            assert all(env.terminations.values()) == ended
        outcomes.add((int(seat), float(reward)))
    # there were wins of both and draws: the last mover on a full board is the first player of 9 cells, the second of 42
    assert outcomes == {(0, 1.0), (1, 1.0), (0 if game.num_actions == 9 else 1, 0.0)}


@pytest.mark.parametrize(
    "line", [[(0, 0), (0, 1), (0, 2), (0, 3)], [(2, 6), (3, 6), (4, 6), (5, 6)], [(3, 0), (2, 1), (1, 2), (0, 3)]]
)
def test_connect_four_lines_do_not_wrap_around(line: list[tuple[int, int]]) -> None:
    game = make_game("pettingzoo/connect_four")
    obs = np.zeros((2, 6, 7, 2), np.int8)
    for height, column in line:
        obs[0, 5 - height, column, 0] = 1
        # shifted up and right across the edge, so its bits are in two columns
        obs[1, 5 - (height + 3) % 6, (column + 4) % 7, 0] = 1
    assert game.is_over(game.from_obs(obs)).tolist() == [True, False]


@pytest.mark.parametrize("name", NAMES)
def test_playouts_have_the_distribution_of_random_play(name: str) -> None:
    game, rng = make_game(name), np.random.default_rng(0)
    for moves in (0, 3, 5):
        start = random_states(game, 50, moves, rng)[:1]
        num = 20_000
        state, player, outcome = start.repeat(num, 0), game.current_player(start)[0], np.zeros(num)
        playing = np.arange(num)
        while len(playing):
            turn = game.current_player(state)
            state, reward, ended = game.play(state, random_action(game.legal_actions(state), rng))
            outcome[playing] = np.where(turn == player, reward, -reward)
            state, playing = state[~ended], playing[~ended]
        playouts = game.playout(start.repeat(num, 0), rng)
        for result in (-1.0, 0.0, 1.0):
            # the standard deviation of a fraction is at most 0.5 / √20000 = 0.0035, of a difference 0.005
            assert abs((playouts == result).mean() - (outcome == result).mean()) < 0.02


def test_playouts_find_winning_moves() -> None:
    game = make_game("pettingzoo/connect_four")
    state = game.initial_states(1)
    for move in (0, 0, 1, 1, 2, 2, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2):
        state, _, ended = game.play(state, np.array([move]))
    # columns 0 to 2 are full; the player to move has three in the lowest row, and columns 3 to 6 are free
    assert not ended[0]
    values = game.playout(state.repeat(4000, 0), np.random.default_rng(0))
    assert values.mean() > 0.25 - 3 * 0.016  # a random move wins with probability 1/4


@pytest.mark.parametrize("name", NAMES)
def test_symmetries_preserve_the_game(name: str) -> None:
    """A game on a transformed board has transformed observations and masks, and the same rewards and ends."""
    game, rng = make_game(name), np.random.default_rng(0)
    count = len(game.cell_symmetries)
    assert len({tuple(row) for row in game.cell_symmetries.tolist()}) == count == {9: 8, 7: 2}[game.num_actions]
    assert (game.cell_symmetries[0] == np.arange(len(game.cell_symmetries[0]))).all()
    for which in range(count):
        cells, actions = game.cell_symmetries[which], game.action_symmetries[which]
        state, transformed = game.initial_states(200), game.initial_states(200)
        while len(state):
            obs, transformed_obs = game.observe(state), game.observe(transformed)
            np.testing.assert_array_equal(obs.reshape(len(state), -1, 2)[:, cells].reshape(obs.shape), transformed_obs)
            np.testing.assert_array_equal(game.legal_actions(state)[:, actions], game.legal_actions(transformed))
            action = random_action(game.legal_actions(transformed), rng)
            state, reward, ended = game.play(state, actions[action])
            transformed, transformed_reward, transformed_ended = game.play(transformed, action)
            np.testing.assert_array_equal(reward, transformed_reward)
            np.testing.assert_array_equal(ended, transformed_ended)
            state, transformed = state[~ended], transformed[~ended]


def test_augment_transforms_all_fields_alike() -> None:
    game, rng = make_game("pettingzoo/connect_four"), np.random.default_rng(0)
    state, _, _ = game.play(game.initial_states(64), np.zeros(64, np.int64))
    policy = np.tile(np.arange(7, dtype=np.float32), (64, 1))
    mask = np.tile(np.arange(7) < 3, (64, 1))
    batch = Batch(obs=game.observe(state), mask=mask, policy=policy, outcome=np.arange(64.0))
    augmented = augment(game, batch, rng)
    mirrored = augmented.obs[:, 5, 6, 1] == 1
    assert 10 < mirrored.sum() < 54
    np.testing.assert_array_equal(augmented.obs[~mirrored], batch.obs[~mirrored])
    np.testing.assert_array_equal(augmented.obs[mirrored], batch.obs[mirrored][:, :, ::-1])
    np.testing.assert_array_equal(augmented.policy[mirrored], policy[mirrored][:, ::-1])
    np.testing.assert_array_equal(augmented.mask[mirrored], mask[mirrored][:, ::-1])
    np.testing.assert_array_equal(augmented.outcome, batch.outcome)


@pytest.mark.parametrize("name", NAMES)
def test_current_seat_from_both_observations(name: str) -> None:
    game, rng = make_game(name), np.random.default_rng(0)
    for moves in range(5):
        state = random_states(game, 20, moves, rng)
        obs = game.observe(state)
        waiting = obs[..., ::-1]
        seats = np.stack([obs, waiting] if moves % 2 == 0 else [waiting, obs], 1)
        assert (current_seat(seats) == moves % 2).all()
        assert (game.current_player(state) == moves % 2).all()


def test_popcount() -> None:
    boards = np.concatenate([np.random.default_rng(0).integers(0, 1 << 49, 1000), [0, 1, (1 << 49) - 1, 1 << 48]])
    expected = [bin(board).count("1") for board in boards.tolist()]
    assert popcount_fallback(boards).tolist() == expected
    assert popcount(boards).tolist() == expected


def test_unknown_game_is_rejected() -> None:
    with pytest.raises(UserError, match=r"unknown game 'pettingzoo/ches': did you mean 'pettingzoo/chess'"):
        make_game("pettingzoo/ches")

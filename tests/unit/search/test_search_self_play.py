"""Tests of self-play."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from zhixing.buffers import Buffer
from zhixing.core.tree import Field
from zhixing.errors import UserError
from zhixing.search.board_net import BoardNet
from zhixing.search.games import augment, make_game
from zhixing.search.match import play_match
from zhixing.search.perfect import PerfectPlayer
from zhixing.search.players import puct_player
from zhixing.search.self_play import SelfPlay, to_transitions

TICTACTOE, CONNECT_FOUR = make_game("pettingzoo/tictactoe"), make_game("pettingzoo/connect_four")


def make_net(seed: int = 0, channels: int = 8) -> BoardNet:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return BoardNet(TICTACTOE.obs_shape, TICTACTOE.num_actions, blocks=1, channels=channels)


def test_positions_of_complete_games_from_the_view_of_the_player_to_move() -> None:
    play = SelfPlay(TICTACTOE, make_net(), 6, 12, seed=0)
    num_games, num_positions = 0, 0
    for _ in range(8):
        finished = play.play(3)
        batch = finished.batch
        assert len(batch) == finished.lengths.sum()
        num_games += len(finished.lengths)
        num_positions += len(batch)
        start = 0
        for length, first in zip(finished.lengths, finished.outcomes, strict=True):
            game = batch[start : start + length]
            start += length
            # an empty board, then one more mark per move
            assert game.obs.sum((1, 2, 3)).tolist() == list(range(length))
            np.testing.assert_array_equal(game.mask, game.obs.reshape(length, 9, 2).sum(-1) == 0)
            np.testing.assert_allclose(game.policy.sum(-1), 1.0, atol=1e-6)
            assert (game.policy[~game.mask] == 0).all()
            # the last mover has won or drawn, and the players alternate
            assert game.outcome[-1] in (0.0, 1.0)
            np.testing.assert_array_equal(game.outcome, first * (-1.0) ** np.arange(length))
            # each position is the previous one with swapped planes and a new mark
            for now, after, policy in zip(game.obs[:-1], game.obs[1:], game.policy, strict=False):
                added = after[..., 1] - now[..., 0]
                assert added.sum() == 1
                assert policy[added.argmax()] > 0
                np.testing.assert_array_equal(after[..., 0], now[..., 1])
    assert num_games >= 12
    assert num_positions + play.moves.sum() == 8 * 3 * 6


def test_resume_is_exact() -> None:
    net = make_net()
    original = SelfPlay(CONNECT_FOUR, BoardNet((6, 7, 2), 7, 1, 8), 5, 8, seed=3, fast_simulations=4, full_share=0.5)
    resumed = SelfPlay(CONNECT_FOUR, original.evaluate.net, 5, 8, seed=9, fast_simulations=4, full_share=0.5)
    original.play(11)
    state = original.state_dict()
    expected = original.play(20)
    resumed.load_state_dict(state)
    actual = resumed.play(20)
    assert len(expected.batch) > 20
    for name in expected.batch.fields:
        np.testing.assert_array_equal(getattr(actual.batch, name), getattr(expected.batch, name))
    np.testing.assert_array_equal(actual.lengths, expected.lengths)
    with pytest.raises(UserError, match=r"the saved self-play has state of shape \(5, 2\), this one \(6, 2\)"):
        SelfPlay(CONNECT_FOUR, net, 6, 8, seed=0).load_state_dict(state)


def test_games_depend_on_the_seed() -> None:
    runs = [SelfPlay(TICTACTOE, make_net(), 4, 10, seed=seed).play(12).batch for seed in (1, 1, 2)]
    np.testing.assert_array_equal(runs[0].obs, runs[1].obs)
    assert runs[0].obs.shape != runs[2].obs.shape or (runs[0].obs != runs[2].obs).any()


def test_only_the_first_moves_are_sampled() -> None:
    """Without noise and sampling all games are equal; one sampled move makes them differ."""
    greedy = SelfPlay(TICTACTOE, make_net(), 8, 20, seed=0, noise=0.0, explore_moves=0).play(9)
    assert len(set(map(bytes, greedy.batch.obs.reshape(8, -1)))) == 1
    sampled = SelfPlay(TICTACTOE, make_net(), 8, 20, seed=0, noise=0.0, explore_moves=1)
    sampled.play(1)
    first = sampled.state
    assert len(np.unique(first, axis=0)) > 1
    sampled.play(1)
    for row in np.unique(first, axis=0):  # equal first moves have equal replies
        assert len(np.unique(sampled.state[(first == row).all(1)], axis=0)) == 1


def test_only_full_searches_are_recorded() -> None:
    play = SelfPlay(TICTACTOE, make_net(), 20, 16, seed=0, fast_simulations=2, full_share=0.3)
    finished = play.play(60)
    fraction = len(finished.batch) / finished.lengths.sum()
    assert 0.1 < fraction < 0.55  # 60 samples with probability 0.3: standard deviation 0.06
    # 16 visits give multiples of 1/16; two visits would give 0, 1/2 or 1
    assert (np.unique(finished.batch.policy * 16) % 1 == 0).all()
    assert (((finished.batch.policy > 0).sum(-1)) > 2).mean() > 0.5


def test_learns_tictactoe() -> None:
    """A small training loop: after 40 rounds, a search of 12 simulations rarely loses against perfect play."""
    torch.manual_seed(0)
    net, rng = make_net(channels=24), np.random.default_rng(0)
    optimizer = torch.optim.Adam(net.parameters(), 3e-3, weight_decay=1e-4)
    play = SelfPlay(TICTACTOE, net, 64, 24, seed=0, explore_moves=5)
    flag = Field((), np.dtype(bool))
    spec = {
        "obs": Field((3, 3, 2), np.dtype(np.int8)),
        "mask": Field((9,), np.dtype(bool)),
        "policy": Field((9,), np.dtype(np.float32)),
        "value": Field((), np.dtype(np.float32)),
        "reward": Field((), np.dtype(np.float32)),
        "terminated": flag,
        "truncated": flag,
    }
    buffer = Buffer(spec, 8000)

    def count_losses() -> int:
        player = puct_player(TICTACTOE, net, 12)
        return play_match(TICTACTOE, player, PerfectPlayer(TICTACTOE), 100, np.random.default_rng(1)).losses

    before = count_losses()
    for _ in range(40):
        finished = play.play(4)
        if len(finished.batch):
            buffer.add(to_transitions(finished.batch).map(lambda leaf: leaf[:, None]))
        if len(buffer) < 500:
            continue
        for _ in range(8):
            batch = augment(TICTACTOE, buffer.sample(128, rng).numpy(), rng).to("cpu")
            logits, value = net(batch.obs, batch.mask)
            loss = F.mse_loss(value, batch.reward) - (batch.policy * logits.log_softmax(-1)).sum(-1).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    after = count_losses()
    assert before > 20
    assert after <= 5

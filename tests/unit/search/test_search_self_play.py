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
from zhixing.search.players import network_player
from zhixing.search.self_play import SelfPlay, as_steps

TICTACTOE, CONNECT_FOUR = make_game("pettingzoo/tictactoe"), make_game("pettingzoo/connect_four")


def new_net(seed: int = 0, channels: int = 8) -> BoardNet:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return BoardNet(TICTACTOE.obs_shape, TICTACTOE.num_actions, blocks=1, channels=channels)


def test_gives_whole_games_from_their_players_eyes() -> None:
    play = SelfPlay(TICTACTOE, new_net(), 6, 12, seed=0)
    lengths, positions = 0, 0
    for _ in range(8):
        played = play.play(3)
        batch = played.batch
        assert len(batch) == played.lengths.sum()
        lengths += len(played.lengths)
        positions += len(batch)
        begin = 0
        for length, first in zip(played.lengths, played.outcomes, strict=True):
            game = batch[begin : begin + length]
            begin += length
            # an empty board, then one mark more each time
            assert game.obs.sum((1, 2, 3)).tolist() == list(range(length))
            np.testing.assert_array_equal(game.mask, game.obs.reshape(length, 9, 2).sum(-1) == 0)
            np.testing.assert_allclose(game.policy.sum(-1), 1.0, atol=1e-6)
            assert (game.policy[~game.mask] == 0).all()
            # who made the last move has won or drawn, and before that the players take turns
            assert game.outcome[-1] in (0.0, 1.0)
            np.testing.assert_array_equal(game.outcome, first * (-1.0) ** np.arange(length))
            # each position is the one before with the players' planes exchanged and a mark added
            for now, after, policy in zip(game.obs[:-1], game.obs[1:], game.policy, strict=False):
                added = after[..., 1] - now[..., 0]
                assert added.sum() == 1
                assert policy[added.argmax()] > 0
                np.testing.assert_array_equal(after[..., 0], now[..., 1])
    assert lengths >= 12
    assert positions + play.moves.sum() == 8 * 3 * 6


def test_goes_on_exactly_where_it_was_saved() -> None:
    net = new_net()
    one = SelfPlay(CONNECT_FOUR, BoardNet((6, 7, 2), 7, 1, 8), 5, 8, seed=3, fast_simulations=4, full_share=0.5)
    other = SelfPlay(CONNECT_FOUR, one.evaluate.net, 5, 8, seed=9, fast_simulations=4, full_share=0.5)
    one.play(11)
    state = one.state_dict()
    expected = one.play(20)
    other.load_state_dict(state)
    found = other.play(20)
    assert len(expected.batch) > 20
    for name in expected.batch.fields:
        np.testing.assert_array_equal(getattr(found.batch, name), getattr(expected.batch, name))
    np.testing.assert_array_equal(found.lengths, expected.lengths)
    with pytest.raises(UserError, match=r"the saved self-play has state of shape \(5, 2\), this one \(6, 2\)"):
        SelfPlay(CONNECT_FOUR, net, 6, 8, seed=0).load_state_dict(state)


def test_seeds_repeat_and_differ() -> None:
    runs = [SelfPlay(TICTACTOE, new_net(), 4, 10, seed=seed).play(12).batch for seed in (1, 1, 2)]
    np.testing.assert_array_equal(runs[0].obs, runs[1].obs)
    assert runs[0].obs.shape != runs[2].obs.shape or (runs[0].obs != runs[2].obs).any()


def test_explores_only_at_the_start() -> None:
    """Without noise and exploration all games are the same one; with one explored move they part at once."""
    still = SelfPlay(TICTACTOE, new_net(), 8, 20, seed=0, noise=0.0, explore_moves=0).play(9)
    assert len(set(map(bytes, still.batch.obs.reshape(8, -1)))) == 1
    moved = SelfPlay(TICTACTOE, new_net(), 8, 20, seed=0, noise=0.0, explore_moves=1)
    moved.play(1)
    first = moved.state
    assert len(np.unique(first, axis=0)) > 1
    moved.play(1)
    for row in np.unique(first, axis=0):  # the same first move, the same answer
        assert len(np.unique(moved.state[(first == row).all(1)], axis=0)) == 1


def test_keeps_only_what_was_searched_in_full() -> None:
    play = SelfPlay(TICTACTOE, new_net(), 20, 16, seed=0, fast_simulations=2, full_share=0.3)
    played = play.play(60)
    share = len(played.batch) / played.lengths.sum()
    assert 0.1 < share < 0.55  # 60 draws of 0.3: standard deviation 0.06
    # 16 visits are shares of 1/16; two visits would be 0, 1/2 or 1 at the most
    assert (np.unique(played.batch.policy * 16) % 1 == 0).all()
    assert (((played.batch.policy > 0).sum(-1)) > 2).mean() > 0.5


def test_learns_tictactoe() -> None:
    """The whole loop in small: after a few dozen rounds a search of 30 draws most games against perfect play."""
    torch.manual_seed(0)
    net, rng = new_net(channels=24), np.random.default_rng(0)
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

    def losses() -> int:
        player = network_player(TICTACTOE, net, 12)
        return play_match(TICTACTOE, player, PerfectPlayer(TICTACTOE), 100, np.random.default_rng(1)).losses

    before = losses()
    for _ in range(40):
        played = play.play(4)
        if len(played.batch):
            buffer.add(as_steps(played.batch).map(lambda leaf: leaf[:, None]))
        if len(buffer) < 500:
            continue
        for _ in range(8):
            batch = augment(TICTACTOE, buffer.sample(128, rng).numpy(), rng).to("cpu")
            logits, value = net(batch.obs, batch.mask)
            loss = F.mse_loss(value, batch.reward) - (batch.policy * logits.log_softmax(-1)).sum(-1).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    after = losses()
    assert before > 20
    assert after <= 5

"""Tests of mcts, alphazero and matches between runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from probe import probe

import zhixing as zx
from zhixing.algorithms.alphazero import losses
from zhixing.cli import main
from zhixing.core.batch import Batch
from zhixing.search import PerfectPlayer, RandomPlayer, SearchPlayer, make_game, play_match
from zhixing.training.matches import MatchEvaluator, PolicyPlayer, make_opponent

TICTACTOE = "pettingzoo/tictactoe"


def test_losses_match_hand_computed_values() -> None:
    logp = torch.log(torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.1, 0.8]]))
    policy = torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.5, 0.5]])
    policy_loss, value_loss = losses(logp, torch.tensor([0.5, -1.0]), policy, torch.tensor([1.0, 1.0]))
    # (ln 2 + (ln 10 + ln 1.25) / 2) / 2 and (0.25 + 4) / 2
    assert policy_loss.item() == pytest.approx((0.693147 + (2.302585 + 0.223144) / 2) / 2, abs=1e-6)
    assert value_loss.item() == pytest.approx(2.125)


@pytest.mark.parametrize(("search_value", "target"), [(0.0, 0.8), (0.5, 0.6), (1.0, 0.4)])
def test_value_targets_mix_outcome_and_search(
    search_value: float, target: float, short_config: Callable, tmp_path: Path
) -> None:
    session = zx.Session(
        short_config("alphazero", search_value=search_value, l2_coef=0.0, lr=0.02), tmp_path / "run", quiet=True
    )
    game = make_game(TICTACTOE)
    state = game.initial_states(8)
    uniform = np.full((8, 9), 1 / 9, np.float32)
    batch = Batch(
        obs=game.observe(state),
        mask=game.legal_actions(state),
        policy=uniform,
        value=np.full(8, 0.4, np.float32),
        reward=np.full(8, 0.8, np.float32),
    ).to("cpu")
    # a new network has value 0 and a uniform policy
    metrics = probe(session.learner, batch, "gradient_step").metrics
    assert metrics["value_loss"].item() == pytest.approx(target**2, abs=1e-6)
    assert metrics["policy_loss"].item() == pytest.approx(np.log(9), abs=1e-5)
    assert metrics["entropy"].item() == pytest.approx(np.log(9), abs=1e-5)
    for _ in range(200):
        session.learner.update(batch)
    with torch.no_grad():
        assert session.learner.net(batch.obs, batch.mask)[1].mean().item() == pytest.approx(target, abs=0.05)
    session.close()


def test_l2_coef_shrinks_the_weights(short_config: Callable, tmp_path: Path) -> None:
    norms = []
    for decay in (0.0, 1.0):
        cfg = short_config("alphazero", l2_coef=decay, env_steps=200, lr_schedule="constant")
        session = zx.Session(cfg, tmp_path / str(decay), quiet=True)
        session.run()
        norms.append(sum(float(p.detach().square().sum()) for p in session.learner.net.parameters()))
    assert norms[1] < 0.9 * norms[0]


def test_outcomes_are_discounted(short_config: Callable, tmp_path: Path) -> None:
    cfg = short_config("alphazero", gamma=0.5)
    session = zx.Session(cfg, tmp_path / "run", quiet=True)
    values = {abs(float(v)) for _ in range(3) for v in session.learner.self_play().collect(9).batch.reward.reshape(-1)}
    assert values <= {0.0} | {0.5**n for n in range(9)}
    assert 0.5 in values
    session.close()


@pytest.fixture
def agent_run(short_config: Callable, tmp_path: Path) -> Path:
    zx.Session(short_config("alphazero", env_steps=160), tmp_path / "az", quiet=True).run()
    return tmp_path / "az"


def test_opponents_by_name(agent_run: Path, short_config: Callable, tmp_path: Path) -> None:
    game = make_game(TICTACTOE)
    assert isinstance(make_opponent(game, "random"), RandomPlayer)
    assert isinstance(make_opponent(game, "perfect"), PerfectPlayer)
    for name, simulations in (("mcts", 100), ("mcts:25", 25), (str(agent_run), 4)):
        player = make_opponent(game, name)
        assert isinstance(player, SearchPlayer)
        assert player.simulations == simulations
    for name in ("nobody", "mcts:0", "mcts:x"):
        with pytest.raises(zx.UserError, match="random, perfect, mcts, mcts:SIMULATIONS or a run folder"):
            make_opponent(game, name)
    with pytest.raises(zx.UserError, match="was trained on pettingzoo/tictactoe"):
        make_opponent(make_game("pettingzoo/connect_four"), str(agent_run))
    with pytest.raises(zx.UserError, match="too many positions"):
        make_opponent(make_game("pettingzoo/connect_four"), "perfect")


def test_any_policy_can_play_matches(tmp_path: Path) -> None:
    """A policy gets the same observations and masks of both seats as in the environment."""
    short = {"env_steps": 64, "rollout_steps": 16, "minibatch_size": 32, "num_envs": 2, "eval_episodes": 2}
    out = tmp_path / "ippo"
    zx.train("ippo", env=TICTACTOE, out=out, quiet=True, tensorboard=False, net__recurrent="none", **short)
    summary = zx.evaluate(out, 20, against="random").summary()
    assert summary["win_rate"] + summary["drawn"] + summary["lost"] == pytest.approx(1.0)
    assert summary["mean_return"] == pytest.approx(summary["win_rate"] - summary["lost"])
    game = make_game(TICTACTOE)
    player = PolicyPlayer(game, zx.load(out).policy)
    assert play_match(game, player, PerfectPlayer(game), 10, np.random.default_rng(0)).episodes == 10
    # same observations as in the environment
    env = zx.envs.make_vector(TICTACTOE, 1, backend="serial")
    obs, info = env.reset(seed=0)
    inputs: list[tuple] = []
    player.policy.act = lambda obs, hidden, mask, *rest: (
        inputs.append((obs, mask))
        or zx.Decision(  # type: ignore[method-assign]
            torch.zeros(1, 2, dtype=torch.int64)
        )
    )
    state = game.initial_states(1)
    for action in (4, 0, 8):
        player.choose(state, np.random.default_rng(0))
        np.testing.assert_array_equal(inputs[-1][0].numpy(), obs)
        np.testing.assert_array_equal(inputs[-1][1].numpy(), info["action_mask"])
        state, _, _ = game.play(state, np.array([action]))
        obs, _, _, _, info = env.step(np.array([[action, action]]))
    env.close()


def test_matches_depend_on_the_seed_and_use_both_seats(agent_run: Path) -> None:
    policy = zx.load(agent_run).policy
    matches = MatchEvaluator(make_game(TICTACTOE), policy, "random")
    first, repeated, different = (matches.evaluate(11, seed).summary() for seed in (0, 0, 1))
    assert first == repeated
    assert first != different
    moved_first = [e for e in matches.evaluate(11, 0).episodes if "first_won" in e.info]
    assert len(moved_first) == 6
    assert {"first_won", "second_won", "win_rate", "drawn", "lost"} <= first.keys()


def test_eval_command_against_an_opponent(
    agent_run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "sys.argv", ["zhixing", "eval", str(agent_run), "--against", "perfect", "--episodes", "10", "--json"]
    )
    main()
    assert '"lost"' in capsys.readouterr().out


def test_against_needs_a_game(short_config: Callable, tmp_path: Path) -> None:
    zx.Session(short_config("ppo"), tmp_path / "run", quiet=True).run()
    with pytest.raises(zx.UserError, match="CartPole-v1 is not a board game"):
        zx.evaluate(tmp_path / "run", 2, against="random")


def test_mcts_with_default_settings_never_loses_tictactoe(tmp_path: Path) -> None:
    zx.train("mcts", env=TICTACTOE, out=tmp_path / "run", quiet=True, eval_episodes=1)
    assert zx.evaluate(tmp_path / "run", 10, against="perfect").summary()["lost"] == 0.0


def test_mcts_balances_a_pole(tmp_path: Path) -> None:
    """20 simulations of 20 steps keep the pole up; a random policy drops it after about 22 steps."""
    short = {"env_steps": 20, "simulations": 20, "playout_steps": 20, "eval_episodes": 1, "eval_every": 0}
    result = zx.train(
        "mcts", env={"name": "CartPole-v1", "max_episode_steps": 60}, out=tmp_path / "run", quiet=True, **short
    )
    assert result["final_return"] >= 55
    assert result["updates"] == 0


def test_mcts_with_a_guide(agent_run: Path, tmp_path: Path) -> None:
    zx.train("ppo", env="CartPole-v1", out=tmp_path / "ppo", quiet=True, env_steps=512, eval_episodes=1)
    short = {"env_steps": 20, "simulations": 8, "eval_episodes": 1, "eval_every": 0, "quiet": True}
    zx.train("mcts", env="CartPole-v1", guide=str(tmp_path / "ppo"), out=tmp_path / "guided", **short)
    zx.train("mcts", env=TICTACTOE, guide=str(agent_run), out=tmp_path / "game", **short)
    with pytest.raises(zx.UserError, match="differ from those of CartPole-v1"):
        zx.train("mcts", env="CartPole-v1", guide=str(agent_run), out=tmp_path / "wrong", **short)
    zx.train("dqn", env="CartPole-v1", out=tmp_path / "dqn", quiet=True, env_steps=200, eval_episodes=1)
    with pytest.raises(zx.UserError, match="needs an actor-critic network"):
        zx.train("mcts", env="CartPole-v1", guide=str(tmp_path / "dqn"), out=tmp_path / "wrong", **short)


@pytest.mark.parametrize(
    ("name", "env", "settings", "message"),
    [
        ("mcts", "CartPole-v1", {"vector__backend": "native", "num_envs": 2}, "vector.backend=native"),
        ("mcts", "CartPole-v1", {"opponent": "random"}, "needs a game"),
        ("mcts", "Pendulum-v1", {}, "Discrete"),
        ("mcts", "toy/team-match", {}, "needs a game"),
        ("alphazero", "CartPole-v1", {}, "needs a game"),
        ("alphazero", TICTACTOE, {"vector__backend": "process"}, "in one process"),
        ("alphazero", TICTACTOE, {"opponent": "nobody"}, "unknown opponent 'nobody'"),
    ],
)
def test_unsearchable_envs_are_rejected(name: str, env: str, settings: dict, message: str, tmp_path: Path) -> None:
    with pytest.raises(zx.UserError, match=message):
        zx.train(name, env=env, out=tmp_path / "run", quiet=True, **settings)
    assert not (tmp_path / "run").exists()


def test_mcts_rejects_init_from(agent_run: Path, tmp_path: Path) -> None:
    with pytest.raises(zx.UserError, match="no weights to load"):
        zx.train("mcts", env=TICTACTOE, init_from=str(agent_run), out=tmp_path / "run", quiet=True)


def test_search_policy_must_be_bound_to_its_env(short_config: Callable, tmp_path: Path) -> None:
    zx.train("mcts", env="toy/match", out=tmp_path / "run", quiet=True, env_steps=10, simulations=4, eval_episodes=1)
    agent = zx.load(tmp_path / "run")
    env = zx.envs.make_vector("toy/match", 2, backend="serial")
    obs, _ = env.reset(seed=0)
    with pytest.raises(zx.UserError, match=r"it acts in 2 and is bound to 0; call policy.bind_env\(env\)"):
        agent.act(obs)
    agent.policy.bind_env(env)
    assert agent.act(obs).shape == (2,)
    env.close()

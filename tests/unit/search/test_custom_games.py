"""Users' games, and PettingZoo's games that are played by copies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import cli_exit_code

import zhixing as zx
from zhixing.envs import make_vector
from zhixing.envs.adapters import pettingzoo_envs
from zhixing.errors import UserError
from zhixing.search import BoardGame, RandomPlayer, make_game, mcts_player, play_match, random_action
from zhixing.search.games import GAMES, UNSEARCHABLE
from zhixing.search.pettingzoo_game import PettingZooGame, copy_env

SHORT: dict[str, Any] = {
    "tensorboard": False,
    "quiet": True,
    "eval_episodes": 2,
    "eval_every": 0,
    "vector__backend": "serial",
}


class Nim(BoardGame):
    """Take 1 or 2 of seven stones; the last one wins. A state is [stones, player]."""

    num_actions, obs_shape, max_moves = 2, (1, 8, 1), 7

    def initial_states(self, num: int) -> np.ndarray:
        return np.tile([7, 0], (num, 1))

    def legal_actions(self, state: np.ndarray) -> np.ndarray:
        return np.arange(1, 3) <= state[:, :1]

    def play(self, state: np.ndarray, action: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        after = np.stack([state[:, 0] - action - 1, 1 - state[:, 1]], 1)
        over = after[:, 0] == 0
        return after, over.astype(np.float32), over

    def is_over(self, state: np.ndarray) -> np.ndarray:
        return state[:, 0] == 0

    def current_player(self, state: np.ndarray) -> np.ndarray:
        return state[:, 1]

    def observe(self, state: np.ndarray) -> np.ndarray:
        """The sign of the piece is that of the player to move, so the observation determines the state."""
        piece = (np.arange(8) == state[:, :1]).astype(np.int8)
        return (piece * (1 - 2 * state[:, 1:]).astype(np.int8))[:, None, :, None]

    def from_obs(self, obs: np.ndarray) -> np.ndarray:
        row = obs[:, 0, :, 0]
        return np.stack([np.abs(row).argmax(1), (row.sum(1) < 0).astype(int)], 1)


NAME = f"{__name__}:Nim"


def test_playouts_have_the_distribution_of_random_play() -> None:
    """With two stones left, taking both wins and taking one loses: the mean is 0."""
    game, rng = make_game(NAME), np.random.default_rng(0)
    state = np.array([[2, 1]]).repeat(4000, 0)
    assert abs(game.playout(state, rng).mean()) < 3 / np.sqrt(4000)
    assert (game.playout(np.array([[1, 0], [0, 1]]), rng) == [1, 0]).all()


def test_search_finds_the_winning_move() -> None:
    """Leaving a multiple of three wins, so take 1 of 7."""
    game, rng = make_game(NAME), np.random.default_rng(0)
    player = mcts_player(game, 100)
    assert player.choose(game.initial_states(1), rng)[0] == 0
    assert play_match(game, player, RandomPlayer(game), 40, rng).score > 0.8


def test_game_is_an_environment_of_two_agents() -> None:
    env = make_vector(NAME, 2)
    assert (env.spaces.num_agents, env.spaces.mask, env.spaces.reward_kind) == (2, 2, "opposed")
    obs, info = env.reset(seed=0)
    assert obs.shape == (2, 2, 1, 8, 2)
    assert info["action_mask"][0].tolist() == [[True, True], [True, False]]  # the second agent waits
    for move in range(1, 5):  # both play 2, 2, 2, 1
        taken = 1 if move < 4 else 0
        obs, reward, terminated, _, info = env.step(np.full((2, 2), taken))
        assert terminated.all() == (move == 4)
    assert reward[0].tolist() == [-1.0, 1.0]  # the second agent took the last stone
    assert info["final_info"][0]["turn"] == 0
    env.close()


@pytest.mark.parametrize("name", ["alphazero", "mcts", "ippo"])
def test_algorithms_run_in_a_custom_game(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings: dict[str, Any] = {"env_steps": 64, "num_envs": 4}
    settings |= {"rollout_steps": 8, "minibatch_size": 16} if name == "ippo" else {"simulations": 4}
    zx.train(name, env=Nim, out=tmp_path / "run", **settings, **SHORT)
    summary = zx.evaluate(tmp_path / "run", 10, against="random").summary()
    assert summary["win_rate"] + summary["lost"] == pytest.approx(1.0)
    agent = zx.load(tmp_path / "run")
    env = make_vector(NAME, 1)
    obs, info = env.reset(seed=0)
    assert agent.act(obs[0], info["action_mask"][0]).shape == (2,)
    if name != "ippo":
        return
    assert cli_exit_code(monkeypatch, "eval", str(tmp_path / "run"), "--against", "mcts:10", "--episodes", "4") == 0


def test_self_play_resumes_exactly(tmp_path: Path) -> None:
    settings = {"simulations": 4, "num_envs": 4, "updates_per_step": 0.1, "batch_size": 16, "lr_schedule": "constant"}
    zx.train("alphazero", env=Nim, out=tmp_path / "whole", env_steps=128, **settings, **SHORT)
    zx.train("alphazero", env=Nim, out=tmp_path / "parts", env_steps=64, **settings, **SHORT)
    zx.Session.resume(tmp_path / "parts", env_steps=128, quiet=True).run()
    whole, parts = (zx.load(tmp_path / run).policy.state_dict() for run in ("whole", "parts"))
    assert all(whole[key].equal(parts[key]) for key in whole)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"num_actions": 0}, "num_actions is 0; set it to a positive number"),
    ({"obs_shape": (8,)}, r"obs_shape is \(8,\); set it to \(height, width, planes\)"),
    ({"max_moves": 2}, "wasn't over after max_moves=2"),
    ({"action_symmetries": np.array([[0, 0]])}, "it must hold 1 permutations of 2 numbers"),
    ({"initial_states": lambda self, num: np.zeros((num, 2))}, "isn't an integer array"),
    ({"legal_actions": lambda self, state: np.zeros((len(state), 2), bool)}, "allows no action"),
    ({"current_player": lambda self, state: state[:, 0] * 0}, "players must alternate"),
    ({"observe": lambda self, state: state}, r"observe\(state\) is an array \(16, 2\)"),
    ({"from_obs": lambda self, obs: np.zeros((len(obs), 2), int)}, r"from_obs\(observe\(state\)\) isn't state"),
    ({"is_over": lambda self, state: state[:, 0] == 5}, "and the ends of play"),
]


@pytest.mark.parametrize(("members", "message"), WRONG)
def test_wrong_games_are_rejected(members: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for member, value in members.items():
        monkeypatch.setattr(Nim, member, value)
    with pytest.raises(UserError, match=message):
        make_game(NAME)


def test_change_of_states_in_place_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    def play(self: Nim, state: np.ndarray, action: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        state[:, 0] -= action + 1
        return state, np.zeros(len(state)), state[:, 0] == 0

    monkeypatch.setattr(Nim, "play", play)
    with pytest.raises(UserError, match="changed the states in place"):
        make_game(NAME)


@pytest.mark.parametrize("name", ["CartPole-v1", "toy/team-match", "sample_games:missing"])
def test_environments_that_are_no_games_are_rejected(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError):
        zx.train("alphazero", env=name, out=tmp_path / "run", **SHORT)


# --- PettingZoo ---


@pytest.mark.parametrize("short", pettingzoo_envs.GAMES)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_every_classic_game_is_searched_or_rejected_with_a_reason(short: str) -> None:
    name = f"pettingzoo/{short}"
    if name in UNSEARCHABLE:
        with pytest.raises(UserError, match=f"{name} can't be searched: its players"):
            make_game(name)
        return
    assert name in GAMES
    pytest.importorskip("pettingzoo.classic")
    game, rng = make_game(name, {"board_size": 5} if short == "go" else {}), np.random.default_rng(0)
    move = mcts_player(game, 3).choose(game.initial_states(2), rng)
    assert game.legal_actions(game.initial_states(2))[np.arange(2), move].all()


@pytest.mark.parametrize(("name", "options", "moves"), [("chess", {}, 40), ("go", {"board_size": 5}, 60)])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_game_of_copies_equals_pettingzoo(name: str, options: dict[str, Any], moves: int) -> None:
    pytest.importorskip("pettingzoo.classic")
    game, rng = make_game(f"pettingzoo/{name}", options), np.random.default_rng(0)
    assert isinstance(game, PettingZooGame)
    env = pettingzoo_envs.import_newest(f"pettingzoo/{name}").raw_env(**options)
    env.reset(seed=0)
    state = game.initial_states(1)
    for _ in range(moves):
        agent = env.agent_selection
        expected = env.observe(agent)
        np.testing.assert_array_equal(game.observe(state)[0], expected["observation"])
        np.testing.assert_array_equal(game.legal_actions(state)[0], expected["action_mask"])
        action = random_action(game.legal_actions(state), rng)
        copied = copy_env(env)
        env.step(int(action[0]))
        copied.step(int(action[0]))  # a copy continues identically
        np.testing.assert_array_equal(copied.observe(agent)["observation"], env.observe(agent)["observation"])
        state, reward, over = game.play(state, action)
        assert reward[0] == env.rewards[agent]
        assert over[0] == any(env.terminations.values())
        if over[0]:
            break


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_states_are_found_again_after_they_were_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pettingzoo.classic")
    monkeypatch.setattr("zhixing.search.pettingzoo_game.MAX_KEPT", 3)
    game, rng = make_game("pettingzoo/go", {"board_size": 5}), np.random.default_rng(0)
    states = [game.initial_states(1)]
    for _ in range(8):
        states.append(game.play(states[-1], random_action(game.legal_actions(states[-1]), rng))[0])
    observed = [game.observe(state) for state in states]
    for state, obs in zip(states, observed, strict=True):
        np.testing.assert_array_equal(game.observe(state), obs)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_alphazero_trains_on_copies_of_pettingzoo(tmp_path: Path) -> None:
    pytest.importorskip("pettingzoo.classic")
    zx.train(
        "alphazero", env="pettingzoo/go", env__board_size=5, out=tmp_path / "run", env_steps=120, num_envs=2,
        simulations=2, rollout_steps=60, batch_size=8, net__blocks=1, net__channels=4, **SHORT,
    )  # fmt: skip
    assert zx.evaluate(tmp_path / "run", 2, against="random").summary()["mean_length"] > 0
    with pytest.raises(UserError, match="can't compute states from observations"):
        zx.load(tmp_path / "run").act(np.zeros((2, 5, 5, 17), bool), np.ones((2, 26), bool))

"""Several policies in one environment: learners against fixed opponents, two algorithms in one run, and a league."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import zhixing as zx

PPO = {
    "algorithm": "ppo",
    "lr": 3e-3,
    "rollout_steps": 32,
    "minibatch_size": 256,
    "epochs": 4,
    "gamma": 0.95,
    "entropy_coef": 0.01,
    "net": {"activation": "relu", "hidden_sizes": [128, 128]},
}
DQN = {
    "algorithm": "dqn",
    "lr": 1e-3,
    "gamma": 0.95,
    "train_every": 4,
    "updates_per_step": 0.1,
    "learning_starts": 1_000,
    "epsilon_fraction": 0.3,
    "target_update_interval": 100,
}
SHORT = {"num_envs": 32, "eval_every": 0, "tensorboard": False, "vector__backend": "serial", "num_threads": 1}


def train(out: Path, env: str = "pettingzoo/tictactoe", **settings: Any) -> Path:
    zx.train("multi_policy", env=env, out=out, quiet=True, **(SHORT | settings))
    return out


@pytest.mark.parametrize(("learner", "env_steps", "win_rate"), [(PPO, 20_000, 0.93), (DQN, 20_000, 0.85)])
def test_learner_beats_random_play(learner: dict, env_steps: int, win_rate: float, tmp_path: Path) -> None:
    """Random play wins 58 % of its games as the first player."""
    agents = {"player_1": "learner", "player_2": "random"}
    run = train(tmp_path / "run", policies={"learner": learner}, agents=agents, env_steps=env_steps)
    summary = zx.evaluate(run, 200).summary()
    assert summary["win_rate"] > win_rate
    assert summary["mean_return"] == summary["learner/return"] == -summary["random/return"]


def test_learner_beats_a_frozen_run_as_the_second_player(tmp_path: Path) -> None:
    first = train(tmp_path / "a", policies={"a": PPO}, agents={"player_1": "a", "player_2": "random"}, env_steps=8_000)
    policies = {"b": PPO, "frozen": {"run": str(first)}}
    second = train(tmp_path / "b", policies=policies, agents={"player_1": "frozen", "player_2": "b"}, env_steps=20_000)
    before, after = zx.load(first).policy.policies["a"], zx.load(second).policy.policies["frozen"]
    assert all(value.equal(after.state_dict()[name]) for name, value in before.state_dict().items())
    assert zx.evaluate(second, 200).summary()["win_rate"] > 0.7  # at first, it wins a fifth of the games


def test_two_algorithms_learn_in_one_run(tmp_path: Path) -> None:
    """The best return of each agent is 10, random actions get 2.5."""
    policies = {"runner": PPO | {"gamma": 0.0}, "guard": DQN | {"gamma": 0.0}}
    agents = {"runner_*": "runner", "guard_*": "guard"}
    run = train(tmp_path / "run", "dummy_envs:TwoGroups", policies=policies, agents=agents, env_steps=12_000)
    summary = zx.evaluate(run, 20).summary()
    assert summary["runner/return"] > 9.0
    assert summary["guard/return"] > 9.0


def test_team_algorithm_learns_next_to_a_single_agent_algorithm(tmp_path: Path) -> None:
    team = {"algorithm": "mappo", "gamma": 0.0, "lr": 3e-3, "rollout_steps": 32, "minibatch_size": 256, "epochs": 4}
    agents = {"runner_*": "team", "guard_*": "guard"}
    policies = {"team": team, "guard": PPO | {"gamma": 0.0}}
    run = train(tmp_path / "run", "dummy_envs:TwoGroups", policies=policies, agents=agents, env_steps=12_000)
    summary = zx.evaluate(run, 20).summary()
    assert summary["team/return"] > 9.0
    assert summary["guard/return"] > 9.0


def test_agents_with_other_kinds_of_spaces_learn(tmp_path: Path) -> None:
    """The best return of both is 10. Random actions get about 3.3 as the eye, and less than 0 as the hand."""
    ppo = {"algorithm": "ppo", "gamma": 0.0, "lr": 3e-3, "rollout_steps": 32, "minibatch_size": 128, "epochs": 4}
    policies, agents = {"eye": ppo, "hand": ppo}, {"eye": "eye", "hand": "hand"}
    settings = {"policies": policies, "agents": agents, "num_envs": 16, "env_steps": 12_000}
    run = train(tmp_path / "run", "dummy_envs:make_mixed", **settings)
    summary = zx.evaluate(run, 20).summary()
    assert summary["eye/return"] > 9.5
    assert summary["hand/return"] > 6.0


@pytest.mark.parametrize("sampling", ["uniform", "prioritized"])
def test_league_teaches_to_beat_an_opponent_that_it_never_met(sampling: str, tmp_path: Path) -> None:
    policies = {"learner": PPO, "past": {"league": "learner", "every": 4_000, "size": 4, "sampling": sampling}}
    run = train(
        tmp_path / "run",
        policies=policies,
        agents={"player_1": "learner", "player_2": "past"},
        eval_agents={"player_2": "random"},
        rotate=True,
        env_steps=30_000,
    )
    assert zx.evaluate(run, 300).summary()["win_rate"] > 0.75  # of an equal opponent's games, 43 % are won
    # the games of `--against` have random opening moves
    assert zx.evaluate(run, 200, against="random").summary()["win_rate"] > 0.7

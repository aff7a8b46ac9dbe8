"""Masked actions: agents never take an invalid action, for which the environment raises, and learn the valid ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import zhixing as zx
from zhixing.algorithms.sac import SoftActorCritic
from zhixing.training.collect_data import collect_from_actor

# dummy_envs:MaskedEnv: the best return is 10, random actions get 5; with two agents, one of which acts for only five of
# the ten steps, the best mean return is 7.5


def test_no_invalid_action_in_100_000_steps(tmp_path: Path) -> None:
    settings = {"env_steps": 100_000, "num_envs": 32, "vector__backend": "serial", "rollout_steps": 64}
    settings |= {"minibatch_size": 512, "epochs": 2, "lr": 1e-3, "eval_every": 0, "tensorboard": False}
    cfg = zx.config.load(algorithm="ppo", env="dummy_envs:MaskedEnv", num_threads=1, **settings)
    result = zx.Session(cfg, tmp_path / "run", quiet=True).run()
    assert result["env_steps"] >= 100_000
    assert result["final_return"] > 9.5


@pytest.mark.parametrize("name", ["qmix", "mappo"])
def test_no_agent_of_several_takes_an_invalid_action(name: str, tmp_path: Path) -> None:
    settings = {"env_steps": 20_000, "num_envs": 16, "vector__backend": "serial", "eval_every": 0}
    if name == "qmix":
        settings |= {"updates_per_step": 0.03, "train_every": 10, "lr": 2e-3, "net__recurrent": "none"}
    cfg = zx.config.load(
        algorithm=name, env="dummy_envs:MaskedEnv", env__agents=2, num_threads=1, tensorboard=False, **settings
    )
    result = zx.Session(cfg, tmp_path / "run", quiet=True).run()
    assert result["final_return"] > 6.5


FEW_VALID = {"name": "dummy_envs:MaskedEnv", "actions": 12}  # one to three are valid; random actions get 6.1 of 10


def train(name: str, out: Path, **settings: Any) -> tuple[dict[str, Any], zx.Learner]:
    model = zx.algorithms.get(name).settings
    if model.scheme in ("off_policy", "offline"):
        settings = {"net__hidden_sizes": [64, 64], "batch_size": 64, "lr": 1e-3, **settings}
    if model.scheme == "off_policy":
        settings = {"train_every": 4, "updates_per_step": 0.25, "learning_starts": 500, **settings}
    settings = {"env_steps": 20_000, "vector__backend": "serial", "num_threads": 1, "tensorboard": False} | settings
    session = zx.Session(zx.config.load(algorithm=name, env=FEW_VALID, seed=1, **settings), out, quiet=True)
    return session.run(), session.learner


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A dataset of 3,000 random steps."""
    env = zx.envs.make_vector("dummy_envs:MaskedEnv", 2, backend="serial", options={"actions": 12})
    policy = zx.algorithms.get("ppo").make(zx.config.load(algorithm="ppo", env=FEW_VALID), env.spaces).policy
    out = str(tmp_path_factory.mktemp("random") / "data")
    actor, options = zx.Actor(policy, env), {"actions": 12}
    collect_from_actor(actor, out, 3_000, env="dummy_envs:MaskedEnv", options=options, note="", phase=zx.Phase.RANDOM)
    env.close()
    return out


@pytest.mark.parametrize("name", ["sac", "redq", "cql"])
def test_learned_alpha_stays_small_if_most_actions_are_invalid(name: str, data: str, tmp_path: Path) -> None:
    """With a target entropy that the valid actions can't reach, it would grow without bound."""
    settings: dict[str, Any] = {"env_steps": 4_000, "updates_per_step": 0.5, "policy_delay": 1, "eval_every": 0}
    if name == "redq":
        settings["critics"] = 4
    if name == "cql":
        settings |= {"dataset": data, "offline_updates": 1_500, "penalty": 0.5}
    result, learner = train(name, tmp_path / "run", lr=2e-3, **settings)
    assert result["final_return"] > 9.5
    assert isinstance(learner, SoftActorCritic)
    assert float(learner.alpha) < 1.0


@pytest.mark.parametrize("name", ["awac", "iql"])
def test_offline_algorithms_learn_few_valid_actions(name: str, data: str, tmp_path: Path) -> None:
    settings = {"dataset": data, "offline_updates": 4_000, "eval_every": 500, "stop_return": 9.5}
    assert train(name, tmp_path / "run", **settings)[0]["reached"]


ALGORITHMS = ("ppo", "a2c", "a3c", "ac", "pg", "ppg", "trpo", "impala")
ALGORITHMS += ("dqn", "c51", "qrdqn", "munchausen_dqn", "rainbow", "pqn")


@pytest.mark.parametrize("name", ALGORITHMS)
def test_few_valid_actions_are_learned(name: str, tmp_path: Path) -> None:
    faster = {"impala": {"lr": 2e-3}, "pqn": {"lr": 2e-3, "rollout_steps": 8, "epochs": 4}}
    settings: dict[str, Any] = faster.get(name, {})
    assert train(name, tmp_path / "run", stop_return=9.5, eval_every=1_000, **settings)[0]["reached"]

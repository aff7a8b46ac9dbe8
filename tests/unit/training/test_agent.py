"""Loaded agents: actions in the environment's space, batches, hidden state and invalid observations."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zhixing as zx
from zhixing.errors import UserError


@pytest.fixture
def trained(short_config: Callable, tmp_path: Path) -> Callable[..., zx.Agent]:
    """The agent of a very short run."""

    def train(algorithm: str, env: str, **settings: Any) -> zx.Agent:
        short = {"env_steps": 128, "learning_starts": 64} if algorithm == "dqn" else {"env_steps": 64}
        zx.Session(short_config(algorithm, env, **(short | settings)), tmp_path / "run", quiet=True).run()
        return zx.load(tmp_path / "run")

    return train


def dict_obs(rows: int | None = None) -> dict[str, Any]:
    """Return an observation of dummy_envs:DictObsEnv, or a batch of `rows`."""
    lead = () if rows is None else (rows,)
    nested = {"image": np.zeros((*lead, 12, 12, 1), np.uint8), "bits": np.zeros((*lead, 2), np.int64)}
    return {"cue": np.ones(lead, np.int64), "noise": np.zeros((*lead, 2)), "nested": nested}


def test_batch_gives_the_actions_of_its_rows(trained: Callable) -> None:
    agent = trained("ppo", "CartPole-v1")
    rows = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)
    actions = agent.act(rows)
    assert actions.shape == (5,)
    assert [int(agent.act(row)) for row in rows] == actions.tolist()
    assert int(agent.act(rows[0].tolist())) == actions[0]  # a list is accepted
    assert agent.act(rows[0]).shape == ()


def test_continuous_actions_are_scaled_to_the_environment(trained: Callable) -> None:
    agent = trained(
        "ppo", "dummy_envs:DictObsEnv", env__kind="continuous", net__cnn="simple", num_threads=1, log_std_init=1.0
    )
    actions = np.stack([agent.act(dict_obs(), explore=True) for _ in range(60)])
    assert actions.shape == (60, 1)
    assert actions.min() >= -2.0
    assert actions.max() <= 4.0
    assert actions.max() > 1.1  # actions of the policy are in [-1, 1]
    assert actions.dtype == np.float32


def test_discrete_actions_start_at_the_environments_start(trained: Callable) -> None:
    agent = trained("ppo", "dummy_envs:DictObsEnv", net__cnn="simple", num_threads=1)
    actions = {int(agent.act(dict_obs(), explore=True)) for _ in range(60)}
    assert actions == {1, 2, 3}
    assert agent.act(dict_obs(4)).shape == (4,)


def test_explore_uses_the_final_exploration(trained: Callable) -> None:
    agent = trained("dqn", "toy/match", epsilon_end=0.5)
    obs = np.eye(4, dtype=np.float32)[0]
    assert len({int(agent.act(obs)) for _ in range(30)}) == 1
    actions = [int(agent.act(obs, explore=True)) for _ in range(300)]
    greedy = int(agent.act(obs))
    assert np.mean([action == greedy for action in actions]) == pytest.approx(0.5 + 0.5 / 4, abs=0.1)


def test_masked_actions_are_never_chosen(trained: Callable) -> None:
    agent = trained("ppo", "dummy_envs:MaskedEnv")
    obs = np.ones(4, np.float32)
    for allowed in range(4):
        mask = np.arange(4) == allowed
        assert int(agent.act(obs, mask)) == allowed
        assert agent.act(np.stack([obs, obs]), np.stack([mask, mask]), explore=True).tolist() == [allowed] * 2


@pytest.mark.parametrize("kind", ["gru", "lstm"])
def test_hidden_state_lasts_until_reset(kind: str, trained: Callable) -> None:
    agent = trained("ppo", "dummy_envs:TerminatingEnv", net__recurrent=kind, env__continuous=True, lr=0.05)
    obs = np.ones(5, np.float32)
    first, second = agent.act(obs).item(), agent.act(obs).item()
    assert first != second
    agent.reset()
    assert agent.act(obs).item() == first


def test_changed_batch_size_without_reset_is_rejected(trained: Callable) -> None:
    agent = trained("ppo", "toy/match", net__recurrent="gru")
    agent.act(np.zeros((3, 4), np.float32))
    with pytest.raises(UserError, match=r"that of 3 episodes, but 2 observations were given; call reset\(\)"):
        agent.act(np.zeros((2, 4), np.float32))


@pytest.mark.parametrize(
    "wrong",
    [
        {"cue": 1},
        {**dict_obs(), "noise": np.zeros(3)},
        {**dict_obs(), "noise": "loud"},
        {**dict_obs(), "nested": 3},
        {**dict_obs(), "nested": {"image": [[300]], "bits": [0, 0]}},
        3,
        None,
    ],
    ids=["missing key", "shape", "string", "no nested dict", "not a byte", "number", "None"],
)
def test_invalid_observation_is_rejected(wrong: Any, trained: Callable) -> None:
    agent = trained("ppo", "dummy_envs:DictObsEnv", net__cnn="simple", num_threads=1)
    with pytest.raises(UserError, match="observation"):
        agent.act(wrong)


def test_agent_includes_the_normalizers(trained: Callable) -> None:
    agent = trained("ppo", "dummy_envs:TerminatingEnv", normalize_obs=True)
    assert agent.policy.net.encoder.norm.count == 64
    assert not agent.policy.training

"""What a person deploys: it acts in the task's own terms, alone or for many, with its memory."""

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


def many(rows: int | None = None) -> dict[str, Any]:
    """An observation of dummy_envs:DictObsEnv, or several."""
    lead = () if rows is None else (rows,)
    nested = {"image": np.zeros((*lead, 12, 12, 1), np.uint8), "bits": np.zeros((*lead, 2), np.int64)}
    return {"cue": np.ones(lead, np.int64), "noise": np.zeros((*lead, 2)), "nested": nested}


def test_one_observation_or_many(trained: Callable) -> None:
    agent = trained("ppo", "CartPole-v1")
    rows = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)
    together = agent.act(rows)
    assert together.shape == (5,)
    assert [int(agent.act(row)) for row in rows] == together.tolist()
    assert int(agent.act(rows[0].tolist())) == together[0]  # a list will do
    assert agent.act(rows[0]).shape == ()


def test_actions_are_in_the_tasks_own_terms(trained: Callable) -> None:
    agent = trained(
        "ppo", "dummy_envs:DictObsEnv", env__kind="continuous", net__cnn="simple", num_threads=1, log_std_init=1.0
    )
    drawn = np.stack([agent.act(many(), explore=True) for _ in range(60)])
    assert drawn.shape == (60, 1)
    assert drawn.min() >= -2.0
    assert drawn.max() <= 4.0
    assert drawn.max() > 1.1  # beyond the policy's own scale
    assert drawn.dtype == np.float32


def test_choices_start_where_the_tasks_do(trained: Callable) -> None:
    agent = trained("ppo", "dummy_envs:DictObsEnv", net__cnn="simple", num_threads=1)
    drawn = {int(agent.act(many(), explore=True)) for _ in range(60)}
    assert drawn == {1, 2, 3}
    assert agent.act(many(4)).shape == (4,)


def test_the_best_action_repeats_and_exploring_does_not(trained: Callable) -> None:
    agent = trained("dqn", "toy/match", epsilon_end=0.5)
    obs = np.eye(4, dtype=np.float32)[0]
    assert len({int(agent.act(obs)) for _ in range(30)}) == 1
    # what exploration is left after training: epsilon 0.5
    drawn = [int(agent.act(obs, explore=True)) for _ in range(300)]
    best = int(agent.act(obs))
    assert np.mean([a == best for a in drawn]) == pytest.approx(0.5 + 0.5 / 4, abs=0.1)


def test_masks_forbid(trained: Callable) -> None:
    agent = trained("ppo", "dummy_envs:MaskedEnv")
    obs = np.ones(4, np.float32)
    for allowed in range(4):
        mask = np.arange(4) == allowed
        assert int(agent.act(obs, mask)) == allowed
        assert agent.act(np.stack([obs, obs]), np.stack([mask, mask]), explore=True).tolist() == [allowed] * 2


@pytest.mark.parametrize("kind", ["gru", "lstm"])
def test_memory_lasts_until_reset(kind: str, trained: Callable) -> None:
    agent = trained("ppo", "dummy_envs:TerminatingEnv", net__recurrent=kind, env__continuous=True, lr=0.05)
    obs = np.ones(5, np.float32)
    first, second = agent.act(obs).item(), agent.act(obs).item()
    assert first != second
    agent.reset()
    assert agent.act(obs).item() == first


def test_another_number_of_observations_without_reset_is_told(trained: Callable) -> None:
    agent = trained("ppo", "toy/match", net__recurrent="gru")
    agent.act(np.zeros((3, 4), np.float32))
    with pytest.raises(UserError, match="reset"):
        agent.act(np.zeros((2, 4), np.float32))


@pytest.mark.parametrize(
    "wrong",
    [
        {"cue": 1},
        {**many(), "noise": np.zeros(3)},
        {**many(), "noise": "loud"},
        {**many(), "nested": 3},
        {**many(), "nested": {"image": [[300]], "bits": [0, 0]}},
        3,
        None,
    ],
    ids=["part missing", "shape", "text", "no dict inside", "not a byte", "number", "nothing"],
)
def test_observations_that_do_not_fit_are_told(wrong: Any, trained: Callable) -> None:
    agent = trained("ppo", "dummy_envs:DictObsEnv", net__cnn="simple", num_threads=1)
    with pytest.raises(UserError, match="observation"):
        agent.act(wrong)


def test_normalisers_are_part_of_the_agent(trained: Callable) -> None:
    agent = trained("ppo", "dummy_envs:TerminatingEnv", normalize_obs=True)
    assert agent.policy.net.encoder.norm.count == 64
    assert not agent.policy.training

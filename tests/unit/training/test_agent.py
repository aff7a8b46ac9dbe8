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
    actions = np.stack([agent.act(dict_obs(), stochastic=True) for _ in range(60)])
    assert actions.shape == (60, 1)
    assert actions.min() >= -2.0
    assert actions.max() <= 4.0
    assert actions.max() > 1.1  # actions of the policy are in [-1, 1]
    assert actions.dtype == np.float32


def test_discrete_actions_start_at_the_environments_start(trained: Callable) -> None:
    agent = trained("ppo", "dummy_envs:DictObsEnv", net__cnn="simple", num_threads=1)
    actions = {int(agent.act(dict_obs(), stochastic=True)) for _ in range(60)}
    assert actions == {1, 2, 3}
    assert agent.act(dict_obs(4)).shape == (4,)


def test_stochastic_uses_the_final_exploration(trained: Callable) -> None:
    agent = trained("dqn", "toy/match", epsilon_end=0.5)
    obs = np.eye(4, dtype=np.float32)[0]
    assert len({int(agent.act(obs)) for _ in range(30)}) == 1
    actions = [int(agent.act(obs, stochastic=True)) for _ in range(300)]
    greedy = int(agent.act(obs))
    assert np.mean([action == greedy for action in actions]) == pytest.approx(0.5 + 0.5 / 4, abs=0.1)


def test_masked_actions_are_never_chosen(trained: Callable) -> None:
    agent = trained("ppo", "dummy_envs:MaskedEnv")
    obs = np.ones(4, np.float32)
    for allowed in range(4):
        mask = np.arange(4) == allowed
        assert int(agent.act(obs, mask)) == allowed
        assert agent.act(np.stack([obs, obs]), np.stack([mask, mask]), stochastic=True).tolist() == [allowed] * 2


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


def test_hidden_state_can_be_explicit(trained: Callable) -> None:
    agent = trained("ppo", "dummy_envs:TerminatingEnv", net__recurrent="gru", env__continuous=True, lr=0.05)
    obs = np.ones((2, 5), np.float32)
    kept = [agent.act(obs) for _ in range(2)]
    hidden = agent.initial_hidden(2)
    for expected in kept:
        action, hidden = agent.act(obs, hidden=hidden)
        assert np.array_equal(action, expected)
    agent.act(obs)  # the third of those that it keeps
    agent.reset(ended=[True, False])
    third = agent.act(obs)
    assert third[0] == kept[0][0]
    assert third[1] not in (kept[0][1], kept[1][1])
    with pytest.raises(UserError, match="that of 3 episodes, but 2 observations were given"):
        agent.act(obs, hidden=agent.initial_hidden(3))


def test_agents_load_where_their_environment_is_missing(trained: Callable, tmp_path: Path) -> None:
    expected = trained("ppo", "dummy_envs:TerminatingEnv").act(np.ones(5, np.float32))
    config = tmp_path / "run" / "config.yaml"
    config.write_text(config.read_text().replace("dummy_envs:TerminatingEnv", "nowhere.installed:Env"))
    assert zx.load(tmp_path / "run").act(np.ones(5, np.float32)) == expected
    (tmp_path / "run" / "spaces.json").unlink()  # as in a run of a version before spaces.json
    with pytest.raises(UserError, match="it names code to import"):
        zx.load(tmp_path / "run")
    with pytest.raises(UserError, match=r"no module 'nowhere'"):
        zx.load(tmp_path / "run", trust=True)


def test_agents_trained_without_an_environment_load(random_dataset: Callable, tmp_path: Path) -> None:
    data = random_dataset("toy/match")
    short = {"offline_updates": 5, "batch_size": 8, "tensorboard": False, "quiet": True}
    zx.train("bc", "none", dataset=data, out=tmp_path / "run", **short)
    assert int(zx.load(tmp_path / "run").act(np.zeros(4, np.float32))) in range(4)
    (tmp_path / "run" / "spaces.json").unlink()
    with pytest.raises(UserError, match="--env none by a version that saved no spaces"):
        zx.load(tmp_path / "run")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"frames": null, "obs": 1}', '{"obs": {"type": "Box"}}'])
def test_damaged_spaces_are_rejected(text: str, trained: Callable, tmp_path: Path) -> None:
    trained("ppo", "toy/match")
    (tmp_path / "run" / "spaces.json").write_text(text)
    with pytest.raises(UserError, match=r"spaces\.json is damaged"):
        zx.load(tmp_path / "run")


def test_mario_agent_acts_on_screens_without_an_emulator() -> None:
    agent = zx.load("mario-1-1")
    screens = [np.random.default_rng(i).integers(0, 256, (240, 256, 3), dtype=np.uint8) for i in range(4)]
    obs = agent.preprocess(screens)
    assert obs.shape == (4, 84, 84)
    assert all(np.array_equal(obs[0], frame) for frame in obs)  # the first is repeated
    assert int(agent.act(obs)) in range(7)
    dark = agent.preprocess(np.zeros((240, 256, 3), np.uint8))
    assert np.array_equal(dark[:3], obs[1:])
    assert not dark[3].any()
    agent.reset()
    assert not agent.preprocess([np.zeros((240, 256, 3), np.uint8)]).any()
    for wrong in (np.zeros((240, 256, 3)), [], "screen", [np.zeros((2, 2), np.uint8), np.zeros((3, 2), np.uint8)]):
        with pytest.raises(UserError, match="screen"):
            agent.preprocess(wrong)
    with pytest.raises(UserError, match="takes no screens"):
        zx.load("cartpole").preprocess(dark[0])


def test_device_of_an_agent() -> None:
    agent = zx.load("pendulum", device="auto")
    assert agent.device == next(agent.policy.parameters()).device
    with pytest.raises(UserError, match="device='warp' can't be used here"):
        zx.load("pendulum", device="warp")

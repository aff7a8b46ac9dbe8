"""Agents of Stable-Baselines3 and CleanRL: their actions, and what can be done with them."""

from __future__ import annotations

import json
import pickle
import zipfile
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import Command
from torch import nn

import zhixing as zx
from zhixing.errors import UserError

FIXTURES = Path(__file__).parents[2] / "fixtures"
FOREIGN = FIXTURES / "foreign"
EXPECTED = json.loads((FOREIGN / "expected.json").read_text())
OBS = np.random.default_rng(0).uniform(-1, 1, (1000, 4)).astype(np.float32)


@pytest.mark.parametrize("name", EXPECTED)
def test_agents_of_stable_baselines3_keep_their_actions(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    size = 4 if EXPECTED[name]["env"] == "CartPole-v1" else 3
    obs = np.random.default_rng(0).uniform(-1, 1, (1000, size)).astype(np.float32)[:20]
    agent = zx.import_agent(FOREIGN / f"{name}.zip")
    assert agent.cfg.algorithm == name
    np.testing.assert_allclose(agent.act(obs), EXPECTED[name]["actions"], atol=1e-5)
    assert not Path("executed").exists()  # the pickles in the file would create it


@pytest.mark.parametrize("name", EXPECTED)
def test_actions_equal_those_of_stable_baselines3_itself(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("stable_baselines3")
    monkeypatch.syspath_prepend(str(FIXTURES))
    import make_foreign

    model = make_foreign.make_model(name, EXPECTED[name]["env"])
    model.save(tmp_path / "model.zip")
    obs = make_foreign.observations(model.observation_space.shape)
    expected = model.predict(obs, deterministic=True)[0]
    np.testing.assert_allclose(zx.import_agent(tmp_path / "model.zip").act(obs), expected, atol=1e-5)


def test_imported_agent_is_evaluated_filmed_and_trained_further(run_cli: Command) -> None:
    run = {"num_envs": 2, "rollout_steps": 16, "minibatch_size": 16, "epochs": 1, "tensorboard": False}
    zx.import_agent(FOREIGN / "ppo.zip", env="CartPole-v1", out="run", **run)
    assert len(zx.evaluate("run", episodes=3).episodes) == 3
    assert run_cli("video", "run", "-o", "film.mp4")[0] == 0
    assert np.array_equal(zx.load("run").act(OBS), zx.import_agent(FOREIGN / "ppo.zip").act(OBS))
    words = ["--config", "run/config.yaml", "--init-from", "run", "--out", "further", "env_steps=32", "lr=1e-9"]
    code, _, error = run_cli("train", "ppo", *words, "eval_every=0", "eval_episodes=1")
    assert code == 0, error
    for key, value in zx.load("run").policy.state_dict().items():  # it started from these weights
        assert torch.allclose(value, zx.load("further").policy.state_dict()[key], atol=1e-6)


def cleanrl_net(*sizes: int, activation: type[nn.Module] = nn.Tanh) -> nn.Sequential:
    layers = [part for n, m in pairwise(sizes) for part in (nn.Linear(n, m), activation())]
    return nn.Sequential(*layers[:-1])


def test_agents_of_cleanrl_keep_their_actions(tmp_path: Path) -> None:
    torch.manual_seed(0)
    file, obs = tmp_path / "agent.cleanrl_model", torch.from_numpy(OBS)
    network = nn.Module()
    network.network = cleanrl_net(4, 8, 6, 2, activation=nn.ReLU)
    torch.save(network.state_dict(), file)
    actions = zx.import_agent(file, env="CartPole-v1").act(OBS)
    assert np.array_equal(actions, network.network(obs).argmax(-1).numpy())

    agent = nn.Module()  # of ppo_continuous_action.py
    agent.critic, agent.actor_mean = cleanrl_net(3, 8, 8, 1), cleanrl_net(3, 8, 8, 1)
    agent.actor_logstd = nn.Parameter(torch.zeros(1, 1))
    torch.save(agent.state_dict(), file)
    expected = agent.actor_mean(obs[:, :3]).clamp(-2, 2).detach().numpy()  # Pendulum's torque is in [-2, 2]
    imported = zx.import_agent(file, env="Pendulum-v1")
    np.testing.assert_allclose(imported.act(OBS[:, :3]), expected, atol=1e-5)

    actor, critics = nn.Module(), [nn.Module(), nn.Module()]
    actor.fc1, actor.fc2, actor.fc_mu = nn.Linear(3, 8), nn.Linear(8, 8), nn.Linear(8, 1)
    for critic in critics:
        critic.fc1, critic.fc2, critic.fc3 = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 1)
    torch.save(tuple(part.state_dict() for part in (actor, *critics)), file)
    hidden = actor.fc2(actor.fc1(obs[:, :3]).relu()).relu()
    imported = zx.import_agent(file, env="Pendulum-v1")
    assert imported.cfg.algorithm == "td3"
    expected = 2 * actor.fc_mu(hidden).tanh().detach().numpy()
    np.testing.assert_allclose(imported.act(OBS[:, :3]), expected, atol=1e-5)


class Trap:
    def __reduce__(self) -> tuple:
        return (Path.touch, (Path("executed"),))


def test_files_that_cannot_be_imported_are_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save(nn.Linear(2, 2).state_dict(), "linear.pt")
    torch.save({"network.0.weight": Trap()}, "trap.pt")
    Path("trap.pkl").write_bytes(pickle.dumps(Trap()))
    with zipfile.ZipFile("empty.zip", "w") as archive:
        archive.writestr("data", "{}")
    for file, message in {
        "missing.zip": "there is no file missing.zip",
        "linear.pt": "are not those of ppo, dqn, td3 or ddpg of CleanRL",
        "trap.pt": "damaged, or no agent",
        "trap.pkl": "damaged, or no agent",
        "empty.zip": "damaged, or no agent",
    }.items():
        with pytest.raises(UserError, match=message):
            zx.import_agent(file, env="CartPole-v1")
    assert not Path("executed").exists()
    with pytest.raises(UserError, match=r"don't fit Box.*a tensor has shape \[6, 4\], expected \[6, 6\]"):
        zx.import_agent(FOREIGN / "dqn.zip", env="Acrobot-v1")

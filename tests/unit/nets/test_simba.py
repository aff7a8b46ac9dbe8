"""SimBa networks: blocks worked out by hand, ensembles, normalization of observations, and every kind of learner."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box
from torch import nn

import zhixing as zx
from zhixing.config import NetConfig
from zhixing.errors import UserError
from zhixing.nets.simba import EnsembleSimBa, SimBa
from zhixing.nets.torso import SimBaTorso, make_torso

OBS = Box(-9.0, 9.0, (3,), np.float32)


def set_parameters(net: nn.Module, values: dict[str, Any]) -> None:
    parameters = dict(net.named_parameters())
    with torch.no_grad():
        for name, value in values.items():
            parameters[name].copy_(torch.tensor(value))


def test_block_by_hand() -> None:
    net = SimBa(1, [2], "relu", outputs=1)
    inner = [[0.0, 0.0] for _ in range(8)]
    inner[0], inner[1] = [1.0, 0.0], [0.0, 3.0]
    outer = [[0.0] * 8 for _ in range(2)]
    outer[0][0], outer[0][1], outer[1][1] = 5.0, 1.0, 2.0
    set_parameters(net, {"linears.0.weight": [[1.0], [3.0]], "linears.0.bias": [0.0, 0.0]})
    set_parameters(net, {"linears.1.weight": inner, "linears.2.weight": outer})
    set_parameters(net, {"linears.3.weight": [[5.0, 7.0]], "linears.3.bias": [0.5]})
    # input 2: embedding [2, 6], layer norm [-1, 1], inner units [-1, 3, 0...], after relu [0, 3, 0...]
    # second layer [1 * 3, 2 * 3] = [3, 6], residual [5, 12], layer norm [-1, 1]: 0.5 - 5 + 7
    assert net(torch.tensor([[2.0]])).item() == pytest.approx(2.5, abs=1e-4)


@pytest.mark.parametrize("activation", ["relu", "tanh"])
def test_ensemble_equals_its_networks(activation: Any) -> None:
    networks = [SimBa(5, [8, 8], activation, outputs=2) for _ in range(3)]
    for network in networks:
        for parameter in network.parameters():
            nn.init.normal_(parameter)
    ensemble, x = EnsembleSimBa(networks), torch.randn(7, 5)
    expected = torch.stack([network(x) for network in networks])
    torch.testing.assert_close(ensemble(x), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ensemble.forward_first(x), expected[0], rtol=1e-4, atol=1e-4)
    different = torch.randn(3, 7, 5)  # other inputs for each network
    expected = torch.stack([network(rows) for network, rows in zip(networks, different, strict=True)])
    torch.testing.assert_close(ensemble(different), expected, rtol=1e-4, atol=1e-4)


def test_initial_gradients_reach_every_parameter() -> None:
    ensemble = EnsembleSimBa([SimBa(4, [8], "relu", outputs=1) for _ in range(2)])
    ensemble(torch.randn(9, 4)).square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in ensemble.parameters())


@pytest.mark.parametrize("sizes", [[], [64, 32]])
def test_blocks_of_different_widths_are_rejected(sizes: list[int]) -> None:
    with pytest.raises(UserError, match=r"needs residual blocks of one width, not hidden_sizes=\["):
        make_torso(OBS, NetConfig(kind="simba", hidden_sizes=sizes))


def test_observations_are_normalized_unless_switched_off() -> None:
    for name in ("sac", "td3", "ppo", "dqn"):
        load = {"algorithm": name, "env": "Acrobot-v1", "preset": False}
        assert zx.config.load(**load, net="simba").normalize_obs is True  # type: ignore[attr-defined]
        assert zx.config.load(**load, net__kind="simba", normalize_obs=False).normalize_obs is False  # type: ignore[attr-defined]
    assert zx.config.load(algorithm="sac", env="Acrobot-v1").normalize_obs is False  # type: ignore[attr-defined]


def test_running_statistics_normalize_the_inputs_of_the_torso() -> None:
    torso = make_torso(OBS, NetConfig(kind="simba"), normalize=True)
    assert isinstance(torso, SimBaTorso)
    torso.encoder.update_norm(torch.tensor([[1.0, 0.0, 0.0], [3.0, 4.0, 0.0]]))
    plain = make_torso(OBS, NetConfig(kind="simba"))
    plain.load_state_dict(torso.state_dict(), strict=False)
    # means 2, 2, 0; stds 1, 2, 0 (an input that never changes stays 0)
    torch.testing.assert_close(torso(torch.tensor([[3.0, 0.0, 0.0]])), plain(torch.tensor([[1.0, -1.0, 0.0]])))


def test_critics_may_have_another_width_than_the_actor() -> None:
    cfg = zx.config.load(algorithm="sac", env="Pendulum-v1", net="simba", critic_hidden_sizes=[24, 24])
    spaces = zx.Spaces(OBS, Box(-1.0, 1.0, (1,), np.float32))
    learner: Any = zx.algorithms.get("sac").make(cfg, spaces)
    assert learner.critics.towers.weights[0].shape == (2, 4, 24)
    assert learner.actor.layers.linears[0].weight.shape == (cfg.net.hidden_sizes[0], 3)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "env", "settings"),
    [
        ("sac", "Pendulum-v1", {"critic_hidden_sizes": [24, 24]}),
        ("td3", "Pendulum-v1", {}),
        ("ppo", "CartPole-v1", {"shared_network": True}),
        ("ppo", "CartPole-v1", {"net__recurrent": "gru"}),
        ("dqn", "CartPole-v1", {}),
        ("maddpg", "toy/team-reach", {}),
        ("mappo", "toy/team-match", {}),
    ],
)
def test_learners_train_and_load_with_simba(
    name: str, env: str, settings: dict[str, Any], short_config: Any, tmp_path: Path
) -> None:
    cfg = short_config(name, env, net__kind="simba", **settings)
    result = zx.Session(cfg, tmp_path / "run", quiet=True).run()
    assert result["updates"] > 0
    evaluation = zx.evaluate(tmp_path / "run", episodes=2, seed=1)
    assert evaluation.mean_return == zx.evaluate(tmp_path / "run", episodes=2, seed=1).mean_return

"""Dropout of DroQ's critics, and what it shares with SAC, with numbers worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from by_hand import CONTINUOUS, DISCRETE, batch, set_critic_outputs, set_net_output
from gymnasium.spaces import Discrete

import zhixing as zx
from zhixing.algorithms.sac import SACConfig, SoftActorCritic
from zhixing.core.batch import Batch
from zhixing.core.spaces import Spaces
from zhixing.errors import UserError
from zhixing.nets.mlp import MLP, EnsembleMLP, dropout


def make_learner(spaces: Spaces = CONTINUOUS, **settings: Any) -> SoftActorCritic:
    cfg = zx.config.load(algorithm="droq", env="Acrobot-v1", **({"net__hidden_sizes": [8]} | settings))
    learner = zx.algorithms.get("droq").make(cfg, spaces)
    assert isinstance(learner, SoftActorCritic)
    return learner


def steps(spaces: Spaces = CONTINUOUS) -> Batch:
    discrete = isinstance(spaces.action, Discrete)
    return batch() if discrete else batch(action=torch.tensor([[0.5], [0.0], [-0.5]]))


def test_dropout_zeroes_units_and_keeps_the_mean() -> None:
    rng = torch.Generator().manual_seed(0)
    y = dropout(torch.full((100_000,), 3.0), 0.25, rng)
    assert sorted(set(y.tolist())) == [0.0, 4.0]  # 3 / 0.75
    assert (y == 0).float().mean().item() == pytest.approx(0.25, abs=0.005)
    assert y.mean().item() == pytest.approx(3.0, abs=0.02)


def test_dropout_comes_before_layer_norm() -> None:
    net = EnsembleMLP([MLP(1, [2], "relu", outputs=1)], layer_norm=True, dropout=0.5)
    with torch.no_grad():
        net.weights[0].copy_(torch.tensor([[[1.0, 3.0]]]))
        net.biases[0].zero_()
        net.weights[1].copy_(torch.tensor([[[5.0], [7.0]]]))
        net.biases[1].zero_()
    rng = torch.Generator().manual_seed(0)
    outputs = {round(net(torch.tensor([[2.0]]), rng).item(), 2) for _ in range(50)}
    # units [2, 6] times 2 or 0: [4, 12] and [0, 12] are normalized to [-1, 1], which gives 7; [4, 0] to [1, -1], which
    # gives 5; [0, 0] stays 0
    assert outputs == {7.0, 5.0, 0.0}
    assert net(torch.tensor([[2.0]])).item() == pytest.approx(7.0, abs=1e-3)  # without `rng`, nothing is dropped


def test_defaults_are_those_of_the_paper() -> None:
    cfg = make_learner().cfg
    assert isinstance(cfg, SACConfig)
    assert (cfg.critics, cfg.target_critics, cfg.critic_dropout, cfg.critic_norm) == (2, 2, 0.01, True)
    assert (cfg.updates_per_step, cfg.policy_delay) == (20.0, 20)


@pytest.mark.parametrize("spaces", [CONTINUOUS, DISCRETE])
def test_losses_drop_new_units_each_time_and_values_none(spaces: Spaces) -> None:
    learner, data = make_learner(spaces, critic_dropout=0.5), steps(spaces)
    state = learner.rng.get_state()
    losses = [learner.critic_loss(data)[0].item() for _ in range(2)]
    learner.rng.set_state(state)
    assert learner.critic_loss(data)[0].item() == losses[0] != losses[1]
    assert torch.equal(learner.value(data.obs), learner.value(data.obs))
    without = make_learner(spaces, critic_dropout=0.0)
    without.load_networks(learner.state_dict())
    assert torch.equal(without.value(data.obs), learner.value(data.obs))


def test_target_critics_drop_units_too() -> None:
    learner = make_learner(DISCRETE, critic_dropout=0.5)  # whose targets aren't random otherwise
    assert not torch.equal(learner.target_value(steps(DISCRETE)), learner.target_value(steps(DISCRETE)))
    without = make_learner(DISCRETE, critic_dropout=0.0)
    assert torch.equal(without.target_value(steps(DISCRETE)), without.target_value(steps(DISCRETE)))


def test_actor_maximizes_the_mean_of_the_critics() -> None:
    learner = make_learner(net__hidden_sizes=[], alpha=1e-9)
    set_critic_outputs(learner.critics, [6.0, 1.0], [-4.0, 1.0])
    set_net_output(learner.actor, 0.3, math.log(1e-6))
    # 1 + 6 a and 1 - 4 a at a = tanh 0.3; the minimum would be 1 - 4 a
    assert learner.actor_loss(steps())[0].item() == pytest.approx(-(1 + math.tanh(0.3)), rel=1e-4)


def test_simba_networks_are_rejected() -> None:
    with pytest.raises(UserError, match=r"net\.kind=simba has no dropout, but critic_dropout=0\.01"):
        make_learner(net__kind="simba")
    make_learner(net__kind="simba", critic_dropout=0.0)

"""Expectiles, targets, weights, losses and learning rates of IQL, with numbers worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from by_hand import (
    CONTINUOUS,
    DISCRETE,
    LOGITS,
    OBS,
    all_equal,
    batch,
    check_polyak_update,
    copy_weights,
    gradient_of,
    set_critic_outputs,
    set_net_output,
)
from gymnasium.spaces import Box, Discrete, MultiDiscrete
from probe import probe

import zhixing as zx
from zhixing.algorithms.iql import IQL
from zhixing.core.batch import Batch
from zhixing.core.policy import Phase
from zhixing.core.spaces import Spaces
from zhixing.errors import UserError
from zhixing.ops.losses import advantage_weight, expectile_loss


def make_learner(spaces: Spaces = DISCRETE, **settings: Any) -> IQL:
    base = {"net__hidden_sizes": []}  # one linear layer each
    cfg = zx.config.load(algorithm="iql", env="Acrobot-v1", **(base | settings))
    learner = zx.algorithms.get("iql").make(cfg, spaces)
    assert isinstance(learner, IQL)
    return learner


def continuous_batch(**fields: Any) -> Batch:
    return batch(**({"action": torch.tensor([[1.0], [0.0], [-1.0]])} | fields))


# --- formulas ---


def test_expectile_loss_by_hand() -> None:
    # 0.3 * 4, 0 and 0.7 * 9
    assert expectile_loss(torch.tensor([-2.0, 0.0, 3.0]), 0.7).tolist() == pytest.approx([1.2, 0.0, 6.3])


@pytest.mark.parametrize(("tau", "expectile"), [(0.5, 1.0), (0.7, 2.1 / 1.3), (0.9, 2.7 / 1.1)])
def test_expectile_is_between_the_mean_and_the_maximum(tau: float, expectile: float) -> None:
    # for targets 0, 0 and 3, the gradient is zero where 2 (1 - τ) v = τ (3 - v), i.e. v = 3 τ / (2 - τ)
    estimate = torch.tensor(expectile, requires_grad=True)
    loss = expectile_loss(torch.tensor([0.0, 0.0, 3.0]) - estimate, tau).sum()
    assert gradient_of(loss, estimate) == pytest.approx([0.0], abs=1e-5)


def test_advantage_weights_are_at_most_max_weight_and_have_no_gradient() -> None:
    advantage = torch.tensor([-1.0, 0.0, 0.5, 1e6], requires_grad=True)
    weight = advantage_weight(advantage, 3.0, 100.0)
    assert weight.tolist() == pytest.approx([math.exp(-3), 1.0, math.exp(1.5), 100.0])
    assert not weight.requires_grad


# --- losses ---


def test_value_loss_by_hand() -> None:
    learner = make_learner()
    set_critic_outputs(learner.target_critics, [10.0, 2.0, 6.0], [4.0, 8.0, 7.0])  # minima 4, 2, 6
    set_critic_outputs(learner.critics, [99.0] * 3, [99.0] * 3)  # not used
    set_net_output(learner.state_value, 4.0)
    q = learner.target_q(batch())
    assert q.tolist() == [4.0, 2.0, 6.0]
    loss, value_mean = learner.value_loss(batch(), q)
    # errors 0, -2, 2: 0, 0.3 * 2², 0.7 * 2²
    assert loss.item() == pytest.approx((1.2 + 2.8) / 3)
    assert value_mean.item() == pytest.approx(4.0)
    # 2 (0.3 * 2 - 0.7 * 2) / 3
    assert gradient_of(loss, learner.state_value.layers.linears[0].bias) == pytest.approx([-1.6 / 3])


def test_targets_bootstrap_from_the_value_of_the_next_state() -> None:
    learner = make_learner()
    set_net_output(learner.state_value, 10.0)
    # 1 + 0.9 * 10 = 10; terminated: 1; truncated, which bootstraps: 10
    assert learner.target_value(batch()).tolist() == pytest.approx([10.0, 1.0, 10.0])
    # other discounts: 1 + 0.9 * 10, 2, 3 + 0.9³ * 10
    data = batch(reward=torch.tensor([1.0, 2.0, 3.0]), discount=torch.tensor([0.9, 0.81, 0.729]))
    assert learner.target_value(data).tolist() == pytest.approx([10.0, 2.0, 10.29])


def test_critic_loss_by_hand() -> None:
    learner = make_learner()
    set_critic_outputs(learner.critics, [1.0, 1.5, 4.0], [3.0, 1.0, 0.0])
    set_net_output(learner.state_value, 0.0)
    loss, error, q_mean = learner.critic_loss(batch())
    # the targets are 1, the errors 0, 0.5, 3 and 2, 0, -1. Sums of squares: 4, 0.25, 9 + 1 = 10
    assert loss.item() == pytest.approx(14.25 / 3)
    assert error.tolist() == pytest.approx([1.0, 0.25, 2.0])  # mean over critics
    assert q_mean.item() == pytest.approx((1 + 1.5 + 4 + 3 + 1 + 0) / 6)
    continuous = make_learner(CONTINUOUS)
    set_critic_outputs(continuous.critics, [2.0, 1.0], [0.0, 1.0])
    set_net_output(continuous.state_value, 0.0)
    # Q-values 1 + 2 a = 3, 1, -1, targets 1; the second critic has no error
    assert continuous.critic_loss(continuous_batch())[0].item() == pytest.approx(8 / 3)


def test_discrete_actor_loss_by_hand() -> None:
    learner = make_learner(beta=0.5)
    set_net_output(learner.actor, *LOGITS)
    set_net_output(learner.state_value, 4.0)
    loss, weight = learner.actor_loss(batch(), torch.tensor([4.0, 2.0, 6.0]))  # advantages 0, -2, 2
    expected = [1.0, math.exp(-1), math.e]
    assert weight.tolist() == pytest.approx(expected)
    assert loss.item() == pytest.approx((expected[0] + 2 * expected[1] + 2 * expected[2]) * math.log(2) / 3)
    # gradient with respect to logits: Σ_i w_i (probabilities - one-hot action_i) / 3
    total = sum(expected)
    gradient = [(p * total - w) / 3 for p, w in zip((0.5, 0.25, 0.25), expected, strict=True)]
    assert gradient_of(loss, learner.actor.layers.linears[0].bias) == pytest.approx(gradient)


def test_actor_loss_ignores_invalid_actions() -> None:
    learner = make_learner(beta=0.0)  # behavior cloning
    set_net_output(learner.actor, *LOGITS)
    mask = torch.tensor([[True, False, True]]).expand(3, 3)
    loss, weight = learner.actor_loss(batch(action=torch.tensor([0, 2, 2]), mask=mask), torch.tensor([5.0, -5.0, 0.0]))
    assert weight.tolist() == [1.0, 1.0, 1.0]
    # probabilities 2/3 and 1/3: -(ln 2/3 + 2 ln 1/3) / 3
    assert loss.item() == pytest.approx(math.log(3) - math.log(2) / 3)
    assert gradient_of(loss, learner.actor.layers.linears[0].bias)[1] == 0.0


def test_continuous_actor_loss_by_hand_with_actions_on_the_bounds() -> None:
    learner = make_learner(CONTINUOUS, beta=1.0)
    set_net_output(learner.actor, 0.0, std=0.5)
    set_net_output(learner.state_value, 0.0)
    loss, _ = learner.actor_loss(continuous_batch(), torch.tensor([1.0, 0.0, -1.0]))
    # ln N(a; 0, 0.5) = -2 a² + ln 2 - 0.5 ln 2π
    constant = math.log(2) - 0.5 * math.log(2 * math.pi)
    expected = math.e * (constant - 2) + constant + math.exp(-1) * (constant - 2)
    assert loss.item() == pytest.approx(-expected / 3, rel=1e-5)
    set_net_output(learner.actor, 5.0, std=0.01)  # mean at the bound, with the smallest std
    loss, _ = learner.actor_loss(continuous_batch(), torch.ones(3))
    assert all(torch.isfinite(g).all() for g in torch.autograd.grad(loss, [*learner.actor.parameters()]))


def test_importance_weights_scale_losses_but_not_priorities() -> None:
    learner = make_learner(beta=1.0)
    set_critic_outputs(learner.critics, [1.0, 1.5, 4.0], [3.0, 1.0, 0.0])
    set_critic_outputs(learner.target_critics, [0.0, -2.0, 2.0], [0.0, -2.0, 2.0])
    set_net_output(learner.state_value, 0.0)
    set_net_output(learner.actor, *LOGITS)
    result = probe(learner, batch(weight=torch.tensor([1.0, 0.5, 0.1])))
    # 4 + 0.5 * 0.25 + 0.1 * 10
    assert result.metrics["critic_loss"].item() == pytest.approx(5.125 / 3)
    # 0.5 * 0.3 * 4 + 0.1 * 0.7 * 4
    assert result.metrics["value_loss"].item() == pytest.approx(0.88 / 3)
    # ln 2 (1 + 0.5 * 2 e^-2 + 0.1 * 2 e²)
    expected = (1 + math.exp(-2) + 0.2 * math.exp(2)) * math.log(2) / 3
    assert result.metrics["actor_loss"].item() == pytest.approx(expected)
    assert result.priority is not None
    assert result.priority.tolist() == pytest.approx([1.0, 0.25, 2.0])


# --- updates ---


@pytest.mark.parametrize("spaces", [DISCRETE, CONTINUOUS])
def test_each_loss_has_gradients_of_its_own_network_only(spaces: Spaces) -> None:
    learner = make_learner(spaces, net__hidden_sizes=[8])
    data = batch() if spaces is DISCRETE else continuous_batch()
    nets = [learner.actor, learner.critics, learner.state_value]
    q = learner.target_q(data)
    losses = learner.actor_loss(data, q)[0], learner.critic_loss(data)[0], learner.value_loss(data, q)[0]
    for loss, own_net in zip(losses, nets, strict=True):
        for net in nets:
            gradients = torch.autograd.grad(loss, [*net.parameters()], allow_unused=True, retain_graph=True)
            assert all((gradient is not None) == (net is own_net) for gradient in gradients)


def test_targets_are_polyak_averaged_and_actor_lr_applies_only_to_the_actor() -> None:
    learner = make_learner(tau=0.1, lr=1e-2, actor_lr=1e-4, net__hidden_sizes=[8])
    start = copy_weights(learner.target_critics)
    nets = (learner.actor, 1e-4), (learner.critics, 1e-2), (learner.state_value, 1e-2)
    before = [copy_weights(net) for net, _ in nets]
    learner.update(batch())
    check_polyak_update(learner.target_critics, start, learner.critics, tau=0.1)
    # the first step of Adam changes a weight by the learning rate
    for (net, lr), old in zip(nets, before, strict=True):
        largest = max((p - o).abs().max().item() for p, o in zip(net.parameters(), old, strict=True))
        assert largest == pytest.approx(lr, rel=0.05)


def test_actor_learning_rate_is_annealed_along_a_cosine() -> None:
    learner = make_learner(lr=1e-3, actor_lr=4e-4)
    rates = []
    for fraction in (0.0, 0.25, 0.5, 1.0):
        learner.set_progress(fraction)
        rates.append(learner.actor_optimizer.lr)
    # (1 + cos π/4) / 2 = 0.8536
    assert rates == pytest.approx([4e-4, 4e-4 * 0.853553, 2e-4, 0.0], abs=1e-9)
    assert (learner.critic_optimizer.lr, learner.value_optimizer.lr) == (1e-3, 1e-3)
    constant = make_learner(actor_lr_schedule="constant")
    constant.set_progress(0.9)
    assert constant.actor_optimizer.lr == constant.cfg.lr


@pytest.mark.parametrize("spaces", [DISCRETE, CONTINUOUS])
def test_policy_prefers_the_better_recorded_actions(spaces: Spaces) -> None:
    # episodes of one step; behavior cloning would take the most frequent discrete action, or the mean action 0
    rng = torch.Generator().manual_seed(0)
    learner = make_learner(spaces, net__hidden_sizes=[32], lr=1e-2, beta=5.0, tau=0.05)
    if spaces is DISCRETE:
        action = torch.tensor([0] * 60 + [1] * 20 + [2] * 20)
        reward = torch.tensor([0.0] * 60 + [1.0] * 20 + [0.5] * 20)
    else:
        action = torch.rand(100, 1, generator=rng) * 2 - 1
        reward = 1 - (action[:, 0] - 0.5).abs()
    ended, zeros = torch.ones(100, dtype=torch.bool), torch.zeros(100, 2)
    rows = {"obs": zeros, "next_obs": zeros, "action": action, "reward": reward, "terminated": ended}
    data = batch(**rows, truncated=~ended, discount=torch.ones(100), index=torch.arange(100))
    for _ in range(400):
        learner.update(data)
    best = learner.policy.act(torch.zeros(1, 2), None, None, Phase.EVAL, rng, 0).action.item()
    assert best == (1 if spaces is DISCRETE else pytest.approx(0.5, abs=0.1))


# --- values, rejected settings and state ---


def test_value_is_the_state_value() -> None:
    learner = make_learner()
    set_net_output(learner.state_value, 3.5)
    assert learner.value(torch.zeros(2, 2)).tolist() == pytest.approx([3.5] * 2)


def test_collected_actions_are_within_bounds() -> None:
    learner = make_learner(CONTINUOUS)
    set_net_output(learner.actor, math.atanh(0.9), std=0.5)
    rng, obs = torch.Generator().manual_seed(0), torch.zeros(1000, 2)
    assert learner.policy.act(obs, None, None, Phase.COLLECT, rng, 0).action.max().item() == 1.0
    assert learner.policy.act(obs[:1], None, None, Phase.EVAL, rng, 0).action.item() == pytest.approx(0.9)


def test_all_networks_normalize_observations() -> None:
    learner = make_learner(normalize_obs=True)
    learner.update_normalizers(Batch(obs=torch.tensor([[[1.0, 0.0]], [[3.0, 4.0]]])))
    # means 2 and 2, stds 1 and 2
    for net in (learner.actor, learner.critics, learner.target_critics, learner.state_value):
        assert torch.allclose(net.features(torch.tensor([[3.0, 0.0]])), torch.tensor([[1.0, -1.0]]), atol=1e-5)


def test_unsupported_settings_and_spaces_are_rejected() -> None:
    for space in (MultiDiscrete([2, 2]), Box(-np.inf, np.inf, (1,), np.float32), Box(-1.0, 1.0, (2, 2), np.float32)):
        with pytest.raises(UserError, match="iql needs continuous actions in a bounded one-dimensional Box"):
            make_learner(Spaces(OBS, space))
    with pytest.raises(UserError, match=r"iql does not support recurrent networks: set net\.recurrent=none"):
        make_learner(net__recurrent="gru")
    with pytest.raises(UserError, match="iql needs an environment with one agent"):
        make_learner(Spaces(OBS, Discrete(3), num_agents=2))


@pytest.mark.parametrize("spaces", [DISCRETE, CONTINUOUS])
def test_restored_learner_continues_identically(spaces: Spaces) -> None:
    data = batch() if spaces is DISCRETE else continuous_batch()
    learner, other = make_learner(spaces, net__hidden_sizes=[8]), make_learner(spaces, net__hidden_sizes=[8], seed=9)
    learner.update(data)
    other.load_state_dict(learner.state_dict())
    for _ in range(3):
        first, second = learner.update(data), other.update(data)
        assert set(first.metrics) == set(IQL.metrics)
        assert all(torch.equal(first.metrics[name], second.metrics[name]) for name in first.metrics)
    for name in ("actor", "critics", "target_critics", "state_value"):
        assert all_equal(copy_weights(getattr(learner, name)), copy_weights(getattr(other, name)))

"""Targets, weights and losses of AWAC with discrete and continuous actions, with numbers worked out by hand."""

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
    next_noise,
    set_critic_outputs,
    set_net_output,
)
from gymnasium.spaces import Box, Discrete, MultiDiscrete
from probe import probe

import zhixing as zx
from zhixing.algorithms.awac import AWAC
from zhixing.core.batch import Batch
from zhixing.core.policy import Phase
from zhixing.core.spaces import Spaces
from zhixing.errors import UserError


def make_learner(spaces: Spaces = DISCRETE, **settings: Any) -> AWAC:
    base = {"net__hidden_sizes": []}  # one linear layer each
    cfg = zx.config.load(algorithm="awac", env="Acrobot-v1", **(base | settings))
    learner = zx.algorithms.get("awac").make(cfg, spaces)
    assert isinstance(learner, AWAC)
    return learner


def continuous_batch(**fields: Any) -> Batch:
    return batch(**({"action": torch.tensor([[1.0], [0.0], [-1.0]])} | fields))


# --- targets ---


def test_discrete_targets_are_exact_expectations_without_entropy() -> None:
    learner = make_learner()
    set_critic_outputs(learner.target_critics, [10.0, 2.0, 6.0], [4.0, 8.0, 6.0])
    set_critic_outputs(learner.critics, [99.0] * 3, [99.0] * 3)  # not used
    set_net_output(learner.actor, *LOGITS)
    # minima 4, 2, 6, with the mean 2 + 0.5 + 1.5 = 4: 1 + 0.9 * 4. Terminated: 1; truncated bootstraps
    assert learner.target_value(batch()).tolist() == pytest.approx([4.6, 1.0, 4.6])
    # other discounts: 1 + 0.9 * 4, 2, 3 + 0.9³ * 4
    data = batch(reward=torch.tensor([1.0, 2.0, 3.0]), discount=torch.tensor([0.9, 0.81, 0.729]))
    assert learner.target_value(data).tolist() == pytest.approx([4.6, 2.0, 5.916])


def test_targets_ignore_invalid_actions() -> None:
    learner = make_learner()
    set_critic_outputs(learner.target_critics, [3.0, 1e6, 6.0], [3.0, 1e6, 6.0])
    set_net_output(learner.actor, *LOGITS)
    mask = torch.tensor([[True, False, True], [False, False, False], [True, False, False]])
    # probabilities 2/3 and 1/3: 2 + 2 = 4; terminated, where no action is valid: 1; one valid action: 1 + 0.9 * 3
    assert learner.target_value(batch(next_mask=mask)).tolist() == pytest.approx([4.6, 1.0, 3.7])


def test_continuous_targets_are_the_minimum_at_a_sampled_action_within_bounds() -> None:
    learner = make_learner(CONTINUOUS)
    set_critic_outputs(learner.target_critics, [2.0, 1.0], [-4.0, 1.0])  # 1 + 2 a and 1 - 4 a
    set_net_output(learner.actor, math.atanh(0.6), std=0.9)
    learner.rng.manual_seed(0)
    action = (0.6 + 0.9 * next_noise(learner)[:, 0]).clamp(-1.0, 1.0)
    assert (action == 1.0).any()  # one sample is clipped
    min_q = torch.where(action < 0, 1 + 2 * action, 1 - 4 * action)
    expected = 1 + 0.9 * min_q * torch.tensor([1.0, 0.0, 1.0])
    assert torch.allclose(learner.target_value(continuous_batch()), expected, atol=1e-5)


# --- losses ---


def test_critic_loss_by_hand() -> None:
    learner = make_learner()
    set_critic_outputs(learner.critics, [1.0, 1.5, 4.0], [3.0, 1.0, 0.0])
    set_critic_outputs(learner.target_critics, [0.0] * 3, [0.0] * 3)
    loss, error, q = learner.critic_loss(batch())
    # the targets are 1, the errors 0, 0.5, 3 and 2, 0, -1. Sums of half squares: 2, 0.125, 4.5 + 0.5 = 5
    assert loss.item() == pytest.approx(7.125 / 3)
    assert error.tolist() == pytest.approx([1.0, 0.25, 2.0])  # mean over critics
    assert q.item() == pytest.approx(10.5 / 6)  # mean value
    # each action is taken in one of three steps
    expected = [0.0, 0.5 / 3, 1.0, 2 / 3, 0.0, -1 / 3]
    assert gradient_of(loss, learner.critics.towers.biases[0]) == pytest.approx(expected)


def test_discrete_actor_loss_by_hand() -> None:
    learner = make_learner(advantage_lambda=2.0)
    set_critic_outputs(learner.critics, [10.0, 2.0, 6.0], [4.0, 8.0, 6.0])  # minima 4, 2, 6, with the mean 4
    set_net_output(learner.actor, *LOGITS)
    loss, weight = learner.actor_loss(batch())
    # advantages 0, -2, 2, divided by 2
    expected = [1.0, math.exp(-1), math.e]
    assert weight.tolist() == pytest.approx(expected)
    assert loss.item() == pytest.approx((expected[0] + 2 * expected[1] + 2 * expected[2]) * math.log(2) / 3)
    # gradient with respect to logits: Σ_i w_i (probabilities - one-hot action_i) / 3
    total = sum(expected)
    gradient = [(p * total - w) / 3 for p, w in zip((0.5, 0.25, 0.25), expected, strict=True)]
    assert gradient_of(loss, learner.actor.layers.linears[0].bias) == pytest.approx(gradient)


def test_weights_are_at_most_max_weight() -> None:
    learner = make_learner(advantage_lambda=1e-3, max_weight=5.0)
    set_critic_outputs(learner.critics, [4.0, 2.0, 6.0], [4.0, 2.0, 6.0])
    set_net_output(learner.actor, *LOGITS)
    loss, weight = learner.actor_loss(batch())
    assert weight.tolist() == pytest.approx([1.0, 0.0, 5.0])  # exp(2000) is infinite
    assert loss.isfinite()


def test_actor_loss_ignores_invalid_actions() -> None:
    learner = make_learner()
    set_critic_outputs(learner.critics, [3.0, 1e6, 6.0], [3.0, 1e6, 6.0])
    set_net_output(learner.actor, *LOGITS)
    mask = torch.tensor([[True, False, True]]).expand(3, 3)
    loss, weight = learner.actor_loss(batch(action=torch.tensor([0, 2, 2]), mask=mask))
    # probabilities 2/3 and 1/3, so the policy's value is 4 and the advantages are -1, 2, 2
    expected = [math.exp(-1), math.exp(2), math.exp(2)]
    assert weight.tolist() == pytest.approx(expected)
    log_likelihood = expected[0] * math.log(2 / 3) + 2 * expected[1] * math.log(1 / 3)
    assert loss.item() == pytest.approx(-log_likelihood / 3)
    assert gradient_of(loss, learner.actor.layers.linears[0].bias)[1] == 0.0


def test_continuous_actor_loss_by_hand_with_actions_on_the_bounds() -> None:
    learner = make_learner(CONTINUOUS)
    set_critic_outputs(learner.critics, [2.0, 1.0], [2.0, 1.0])
    set_net_output(learner.actor, 0.0, std=0.5)
    sampled = (0.5 * next_noise(learner)[:, 0]).clamp(-1.0, 1.0)
    loss, weight = learner.actor_loss(continuous_batch())
    # advantages 2 a - 2 a'
    expected = torch.exp(2 * torch.tensor([1.0, 0.0, -1.0]) - 2 * sampled)
    assert torch.allclose(weight, expected, rtol=1e-5)
    # ln N(a; 0, 0.5) = -2 a² + ln 2 - 0.5 ln 2π
    logp = torch.tensor([-2.0, 0.0, -2.0]) + math.log(2) - 0.5 * math.log(2 * math.pi)
    assert loss.item() == pytest.approx(-(expected * logp).mean().item(), rel=1e-5)


def test_importance_weights_scale_losses_but_not_priorities() -> None:
    learner = make_learner()
    set_critic_outputs(learner.critics, [1.0, 1.5, 4.0], [3.0, 1.0, 0.0])
    set_critic_outputs(learner.target_critics, [0.0] * 3, [0.0] * 3)
    set_net_output(learner.actor, *LOGITS)
    result = probe(learner, batch(weight=torch.tensor([1.0, 0.5, 0.1])))
    # 2 + 0.5 * 0.125 + 0.1 * 5
    assert result.metrics["critic_loss"].item() == pytest.approx(2.5625 / 3)
    # minima 1, 1, 0, with the mean 0.75: ln 2 (e^0.25 + 0.5 * 2 e^0.25 + 0.1 * 2 e^-0.75)
    expected = (2 * math.exp(0.25) + 0.2 * math.exp(-0.75)) * math.log(2) / 3
    assert result.metrics["actor_loss"].item() == pytest.approx(expected)
    assert result.priority is not None
    assert result.priority.tolist() == pytest.approx([1.0, 0.25, 2.0])


# --- updates ---


@pytest.mark.parametrize("spaces", [DISCRETE, CONTINUOUS])
def test_each_loss_has_gradients_of_its_own_network_only(spaces: Spaces) -> None:
    learner = make_learner(spaces, net__hidden_sizes=[8])
    data = batch() if spaces is DISCRETE else continuous_batch()
    for loss, net in ((learner.critic_loss(data)[0], learner.actor), (learner.actor_loss(data)[0], learner.critics)):
        assert all(g is None for g in torch.autograd.grad(loss, [*net.parameters()], allow_unused=True))
    state = learner.rng.get_state()
    gradient = probe(learner, data).gradients["critic_optimizer"][0].clone()
    learner.rng.set_state(state)
    assert torch.equal(gradient, learner.critic_optimizer.compute_gradients(learner.critic_loss(data)[0])[0])


def test_targets_are_polyak_averaged_and_actor_lr_applies_only_to_the_actor() -> None:
    learner = make_learner(tau=0.1, lr=1e-2, actor_lr=1e-4, net__hidden_sizes=[8])
    start = copy_weights(learner.target_critics)
    actor, critics = copy_weights(learner.actor), copy_weights(learner.critics)
    learner.update(batch())
    check_polyak_update(learner.target_critics, start, learner.critics, tau=0.1)
    # the first step of Adam changes a weight by the learning rate
    for net, old, lr in ((learner.actor, actor, 1e-4), (learner.critics, critics, 1e-2)):
        largest = max((p - o).abs().max().item() for p, o in zip(net.parameters(), old, strict=True))
        assert largest == pytest.approx(lr, rel=0.05)


@pytest.mark.parametrize("spaces", [DISCRETE, CONTINUOUS])
def test_policy_prefers_the_better_recorded_actions(spaces: Spaces) -> None:
    # episodes of one step; behavior cloning would take the most frequent discrete action, or the mean action 0
    rng = torch.Generator().manual_seed(0)
    learner = make_learner(spaces, net__hidden_sizes=[32], lr=1e-2, advantage_lambda=0.2)
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


def test_value_is_the_expectation_over_the_policy_or_that_of_the_mode() -> None:
    learner = make_learner()
    set_critic_outputs(learner.critics, [10.0, 2.0, 6.0], [4.0, 8.0, 6.0])
    set_net_output(learner.actor, *LOGITS)
    assert learner.value(torch.zeros(2, 2)).tolist() == pytest.approx([4.0] * 2)
    continuous = make_learner(CONTINUOUS)
    set_critic_outputs(continuous.critics, [2.0, 1.0], [-4.0, 1.0])
    set_net_output(continuous.actor, math.atanh(0.5))
    assert continuous.value(torch.zeros(2, 2)).tolist() == pytest.approx([-1.0] * 2)  # the minimum of 2 and -1


def test_collected_actions_are_within_bounds() -> None:
    learner = make_learner(CONTINUOUS)
    set_net_output(learner.actor, math.atanh(0.9), std=0.5)
    rng, obs = torch.Generator().manual_seed(0), torch.zeros(1000, 2)
    action = learner.policy.act(obs, None, None, Phase.COLLECT, rng, 0).action
    assert action.max().item() == 1.0
    assert action.std().item() > 0.2
    assert learner.policy.act(obs[:1], None, None, Phase.EVAL, rng, 0).action.item() == pytest.approx(0.9)


def test_unsupported_settings_and_spaces_are_rejected() -> None:
    for space in (MultiDiscrete([2, 2]), Box(-np.inf, np.inf, (1,), np.float32), Box(-1.0, 1.0, (2, 2), np.float32)):
        with pytest.raises(UserError, match="awac needs continuous actions in a bounded one-dimensional Box"):
            make_learner(Spaces(OBS, space))
    with pytest.raises(UserError, match=r"awac does not support recurrent networks: set net\.recurrent=none"):
        make_learner(net__recurrent="gru")
    with pytest.raises(UserError, match="awac needs an environment with one agent"):
        make_learner(Spaces(OBS, Discrete(3), num_agents=2))


@pytest.mark.parametrize("spaces", [DISCRETE, CONTINUOUS])
def test_restored_learner_continues_identically(spaces: Spaces) -> None:
    data = batch() if spaces is DISCRETE else continuous_batch()
    learner, other = make_learner(spaces, net__hidden_sizes=[8]), make_learner(spaces, net__hidden_sizes=[8], seed=9)
    learner.update(data)
    other.load_state_dict(learner.state_dict())
    for _ in range(3):
        first, second = learner.update(data), other.update(data)
        assert set(first.metrics) == set(AWAC.metrics)
        assert all(torch.equal(first.metrics[name], second.metrics[name]) for name in first.metrics)
    for name in ("actor", "critics", "target_critics"):
        assert all_equal(copy_weights(getattr(learner, name)), copy_weights(getattr(other, name)))

"""Targets, losses, temperature and policy of SAC and REDQ, with numbers worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from by_hand import (
    CONTINUOUS,
    DISCRETE,
    ENTROPY,
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
from zhixing.algorithms.sac import SoftActorCritic
from zhixing.core.batch import Batch
from zhixing.core.policy import Phase
from zhixing.core.spaces import Spaces
from zhixing.errors import UserError


def make_learner(spaces: Spaces = DISCRETE, name: str = "sac", **settings: Any) -> SoftActorCritic:
    base = {"net__hidden_sizes": [], "alpha": 0.5}  # one linear layer each
    cfg = zx.config.load(algorithm=name, env="Acrobot-v1", **(base | settings))
    learner = zx.algorithms.get(name).make(cfg, spaces)
    assert isinstance(learner, SoftActorCritic)
    return learner


def continuous_batch(**fields: Any) -> Batch:
    return batch(**({"action": torch.tensor([[0.5], [0.0], [-0.5]])} | fields))


# --- targets ---


def test_discrete_targets_are_exact_expectations_of_the_minimum_with_entropy() -> None:
    learner = make_learner()
    set_critic_outputs(learner.target_critics, [10.0, 2.0, 6.0], [4.0, 8.0, 6.0])
    set_critic_outputs(learner.critics, [99.0] * 3, [99.0] * 3)  # not used
    set_net_output(learner.actor, *LOGITS)
    # minima 4, 2, 6, with the mean 2 + 0.5 + 1.5 = 4: 1 + 0.9 (4 + 0.5 H). Terminated: 1; truncated bootstraps
    bootstrapped = 1 + 0.9 * (4 + 0.5 * ENTROPY)
    assert learner.target_value(batch()).tolist() == pytest.approx([bootstrapped, 1.0, bootstrapped])


def test_targets_use_the_discount_of_each_row() -> None:
    learner = make_learner()
    set_critic_outputs(learner.target_critics, [10.0 - 0.5 * ENTROPY] * 3, [50.0] * 3)
    set_net_output(learner.actor, *LOGITS)
    # the value is 10, entropy included: 1 + 0.9 * 10; 2 (terminated); 3 + 0.9³ * 10 = 3 + 7.29
    data = batch(reward=torch.tensor([1.0, 2.0, 3.0]), discount=torch.tensor([0.9, 0.81, 0.729]))
    assert learner.target_value(data).tolist() == pytest.approx([10.0, 2.0, 10.29])


def test_targets_ignore_invalid_actions() -> None:
    learner = make_learner()
    set_critic_outputs(learner.target_critics, [3.0, 1e6, 6.0], [3.0, 1e6, 6.0])
    set_net_output(learner.actor, *LOGITS)
    mask = torch.tensor([[True, False, True], [False, False, False], [True, False, False]])
    # probabilities 2/3 and 1/3: 2 + 2 = 4, entropy ln 3 - 2/3 ln 2; terminated, where no action is valid: 1; one valid
    # action: 1 + 0.9 * 3
    first = 1 + 0.9 * (4 + 0.5 * (math.log(3) - 2 / 3 * math.log(2)))
    assert learner.target_value(batch(next_mask=mask)).tolist() == pytest.approx([first, 1.0, 3.7])


def test_continuous_targets_are_the_minimum_at_a_sampled_action_with_entropy() -> None:
    learner = make_learner(CONTINUOUS)
    set_critic_outputs(learner.target_critics, [2.0, 1.0], [-4.0, 1.0])  # 1 + 2 a and 1 - 4 a
    set_critic_outputs(learner.critics, [0.0, 99.0], [0.0, 99.0])  # not used
    set_net_output(learner.actor, 0.3, math.log(0.5))
    z = next_noise(learner)[:, 0]
    action = torch.tanh(0.3 + 0.5 * z)
    # log N(z) - ln 0.5 - ln(1 - a²)
    logp = -0.5 * z**2 - 0.5 * math.log(2 * math.pi) + math.log(2) - torch.log(1 - action**2)
    min_q = torch.where(action < 0, 1 + 2 * action, 1 - 4 * action)
    bootstrap = 0.9 * (min_q - 0.5 * logp)
    expected = 1 + bootstrap * torch.tensor([1.0, 0.0, 1.0])
    assert torch.allclose(learner.target_value(continuous_batch()), expected, atol=1e-5)


def test_continuous_targets_resample_actions() -> None:
    learner = make_learner(CONTINUOUS)
    assert not torch.equal(learner.target_value(continuous_batch()), learner.target_value(continuous_batch()))


def test_redq_targets_are_the_minimum_of_a_random_subset() -> None:
    learner = make_learner(name="redq", critics=4, target_critics=2, alpha=1e-9)
    set_critic_outputs(learner.target_critics, [1.0] * 3, [2.0] * 3, [3.0] * 3, [4.0] * 3)
    minima = [round((learner.target_value(batch())[0].item() - 1) / 0.9) for _ in range(1200)]
    # of the 6 pairs of critics, 3 have the minimum 1, 2 have 2, and 1 has 3; three standard errors are 0.043
    fractions = [minima.count(q) / 1200 for q in (1, 2, 3, 4)]
    assert fractions == pytest.approx([1 / 2, 1 / 3, 1 / 6, 0.0], abs=0.043)
    assert fractions[3] == 0


def test_targets_are_the_minimum_of_all_critics_if_all_are_target_critics() -> None:
    learner = make_learner(critics=4, target_critics=4, alpha=1e-9)
    set_critic_outputs(learner.target_critics, [3.0] * 3, [2.0] * 3, [1.0] * 3, [4.0] * 3)
    assert all(learner.target_value(batch())[0].item() == pytest.approx(1.9) for _ in range(20))


def test_redq_defaults_are_those_of_the_paper() -> None:
    learner = make_learner(name="redq")
    assert learner.critics(torch.zeros(5, 2)).shape == (10, 5, 3)
    assert (learner.cfg.target_critics, learner.cfg.policy_delay, learner.cfg.updates_per_step) == (2, 20, 20.0)


# --- losses ---


def test_critic_loss_by_hand() -> None:
    learner = make_learner(alpha=1e-9)
    set_critic_outputs(learner.critics, [1.0, 1.5, 4.0], [3.0, 1.0, 0.0])
    set_critic_outputs(learner.target_critics, [0.0] * 3, [0.0] * 3)
    loss, error, q = learner.critic_loss(batch())
    # the targets are 1, the errors 0, 0.5, 3 and 2, 0, -1. Sums of half squares: 2, 0.125, 4.5 + 0.5 = 5
    assert loss.item() == pytest.approx(7.125 / 3)
    assert error.tolist() == pytest.approx([1.0, 0.25, 2.0])  # mean over critics
    assert q.tolist() == [[1.0, 1.5, 4.0], [3.0, 1.0, 0.0]]


def test_importance_weights_scale_losses_but_not_priorities() -> None:
    learner = make_learner(alpha=1e-9)
    set_critic_outputs(learner.critics, [1.0, 1.5, 4.0], [3.0, 1.0, 0.0])
    set_critic_outputs(learner.target_critics, [0.0] * 3, [0.0] * 3)
    result = probe(learner, batch(weight=torch.tensor([1.0, 0.5, 0.1])))
    # 2 + 0.5 * 0.125 + 0.1 * 5
    assert result.metrics["critic_loss"].item() == pytest.approx(2.5625 / 3)
    assert result.priority is not None
    assert result.priority.tolist() == pytest.approx([1.0, 0.25, 2.0])


def test_continuous_critic_loss_uses_the_actions_of_the_batch() -> None:
    learner = make_learner(CONTINUOUS, alpha=1e-9)
    set_critic_outputs(learner.critics, [2.0, 1.0], [0.0, 1.0])
    set_critic_outputs(learner.target_critics, [0.0, 0.0], [0.0, 0.0])
    loss, error, _ = learner.critic_loss(continuous_batch())
    # Q-values 1 + 2 a = 2, 1, 0, targets 1: half squares 0.5, 0, 0.5; the second critic has no error
    assert loss.item() == pytest.approx(1 / 3)
    assert error.tolist() == pytest.approx([0.5, 0.0, 0.5])


def test_targets_have_no_gradient() -> None:
    learner = make_learner(alpha=1e-9)
    set_critic_outputs(learner.critics, [3.0] * 3, [3.0] * 3)
    set_critic_outputs(learner.target_critics, [0.0] * 3, [0.0] * 3)
    loss, _, _ = learner.critic_loss(batch())
    # each action is taken in one of three steps, and its Q-value exceeds the target by 2
    assert gradient_of(loss, learner.critics.towers.biases[0]) == pytest.approx([2 / 3] * 6)
    assert torch.autograd.grad(learner.critic_loss(batch())[0], [*learner.actor.parameters()], allow_unused=True) == (
        None,
        None,
    )


def test_discrete_actor_loss_by_hand() -> None:
    learner = make_learner()
    set_critic_outputs(learner.critics, [10.0, 2.0, 6.0], [4.0, 8.0, 6.0])  # minima 4, 2, 6
    set_net_output(learner.actor, *LOGITS)
    loss, entropy = learner.actor_loss(batch())
    assert loss.item() == pytest.approx(-0.5 * ENTROPY - 4.0)
    assert entropy.item() == pytest.approx(ENTROPY)
    # gradient with respect to logits: p (f - mean f), f = 0.5 ln p - q
    p = np.array([0.5, 0.25, 0.25])
    f = 0.5 * np.log(p) - np.array([4.0, 2.0, 6.0])
    expected = p * (f - (p * f).sum())
    assert gradient_of(loss, learner.actor.layers.linears[0].bias) == pytest.approx(expected.tolist(), abs=1e-6)


def test_actor_loss_ignores_invalid_actions() -> None:
    learner = make_learner()
    set_critic_outputs(learner.critics, [3.0, 1e6, 6.0], [3.0, 1e6, 6.0])
    set_net_output(learner.actor, *LOGITS)
    mask = torch.tensor([[True, False, True]]).expand(3, 3)
    loss, entropy = learner.actor_loss(batch(mask=mask))
    # probabilities 2/3 and 1/3
    masked_entropy = math.log(3) - 2 / 3 * math.log(2)
    assert entropy.item() == pytest.approx(masked_entropy)
    assert loss.item() == pytest.approx(-0.5 * masked_entropy - 4.0)
    assert gradient_of(loss, learner.actor.layers.linears[0].bias)[1] == 0.0


@pytest.mark.parametrize(("name", "slope"), [("sac", -4.0), ("redq", 1.0)])
def test_continuous_actor_loss_by_hand(name: str, slope: float) -> None:
    settings = {"critics": 2, "target_critics": 2} if name == "sac" else {"critics": 2, "target_critics": 1}
    learner = make_learner(CONTINUOUS, name=name, **settings)
    # for a > 0 the minimum is -4 a; the mean, for REDQ, is (6 a - 4 a) / 2 = a
    set_critic_outputs(learner.critics, [6.0, 0.0], [-4.0, 0.0])
    set_net_output(learner.actor, 0.3, math.log(0.01))
    z = next_noise(learner)[:, 0]
    a = torch.tanh(0.3 + 0.01 * z)
    logp = -0.5 * z**2 - 0.5 * math.log(2 * math.pi) - math.log(0.01) - torch.log(1 - a**2)
    loss, entropy = learner.actor_loss(continuous_batch())
    assert loss.item() == pytest.approx((0.5 * logp - slope * a).mean().item(), rel=1e-5)
    assert entropy.item() == pytest.approx(-logp.mean().item(), rel=1e-5)
    # with u = mean + std z: d logp / du = 2 a, da / du = 1 - a²; du / d log std = 0.01 z, where logp also falls by 1
    mean_gradient = 0.5 * 2 * a - slope * (1 - a**2)
    log_std_gradient = mean_gradient * 0.01 * z - 0.5
    expected = [mean_gradient.mean().item(), log_std_gradient.mean().item()]
    assert gradient_of(loss, learner.actor.layers.linears[0].bias) == pytest.approx(expected, rel=1e-4)


# --- temperature ---


def test_temperature_falls_if_entropy_exceeds_its_target_and_rises_if_below() -> None:
    for target, sign in ((0.5, -1), (2.0, 1)):
        learner = make_learner(alpha=None, target_entropy=target, lr=1e-2)
        set_net_output(learner.actor, *LOGITS)  # entropy 1.04
        loss = learner.alpha_loss(torch.tensor(ENTROPY), batch())
        assert gradient_of(loss, learner.log_alpha[0]) == pytest.approx([ENTROPY - target])
        assert learner.alpha.item() == 1.0
        learner.update(batch())
        # the first step of Adam changes a weight by the learning rate
        assert learner.alpha.item() == pytest.approx(math.exp(sign * 1e-2), rel=1e-5)


def test_given_alpha_is_constant() -> None:
    learner = make_learner(alpha=0.3)
    assert set(probe(learner, batch()).gradients) == {"critic_optimizer", "actor_optimizer"}
    for _ in range(3):
        alpha = learner.update(batch()).metrics["alpha"]
    assert alpha.item() == learner.alpha.item() == pytest.approx(0.3)


def test_actor_loss_has_no_gradient_of_alpha() -> None:
    learner = make_learner(alpha=None)
    loss, _ = learner.actor_loss(batch())
    assert torch.autograd.grad(loss, [learner.log_alpha[0]], allow_unused=True) == (None,)


def test_default_target_entropy_depends_on_the_action_space() -> None:
    assert make_learner().target_entropy(batch()) == pytest.approx(0.5 * math.log(3))
    assert make_learner(Spaces(OBS, Box(-1.0, 1.0, (4,), np.float32))).target_entropy(batch()) == -4.0
    assert make_learner(target_entropy=0.0).target_entropy(batch()) == 0.0


@pytest.mark.parametrize("name", ["sac", "redq", "cql"])
def test_target_entropy_depends_on_the_number_of_valid_actions(name: str) -> None:
    # 1, 2 and 3 of 3 actions are valid, so the maximum entropies are log 1, log 2 and log 3. The target is half of
    # their mean, so a uniform policy has twice the target entropy, and its temperature falls
    mask = torch.tensor([[0, 1, 0], [1, 1, 0], [1, 1, 1]], dtype=torch.bool)
    masked = batch(mask=mask, next_mask=mask, action=torch.tensor([1, 0, 2]))
    learner = make_learner(name=name, alpha=None, lr=1e-2, policy_delay=1)
    target = 0.5 * (math.log(1) + math.log(2) + math.log(3)) / 3
    assert float(learner.target_entropy(masked)) == pytest.approx(target)
    set_net_output(learner.actor, 0.0, 0.0, 0.0)
    entropy = learner.actor_loss(masked)[1]
    assert float(entropy) == pytest.approx(2 * target)
    assert gradient_of(learner.alpha_loss(entropy, masked), learner.log_alpha[0]) == pytest.approx([target])
    learner.update(masked)
    assert learner.alpha.item() == pytest.approx(math.exp(-1e-2), rel=1e-5)
    assert make_learner(name=name, target_entropy=0.7).target_entropy(masked) == 0.7


# --- updates ---


def test_actor_and_temperature_are_updated_every_policy_delay() -> None:
    learner = make_learner(policy_delay=3, alpha=None, net__hidden_sizes=[8])
    moved, actor_losses = [], []
    for _ in range(7):
        actor, critics, alpha = copy_weights(learner.actor), copy_weights(learner.critics), learner.alpha.item()
        actor_losses.append(learner.update(batch()).metrics["actor_loss"].item())
        moved.append(not all_equal(actor, copy_weights(learner.actor)))
        assert moved[-1] == (alpha != learner.alpha.item())
        assert not all_equal(critics, copy_weights(learner.critics))
    assert moved == [False, False, True, False, False, True, False]
    # between updates of the actor, its last loss is reported
    assert actor_losses[0] == actor_losses[1] == 0.0
    assert actor_losses[2] == actor_losses[3] == actor_losses[4] != actor_losses[5] == actor_losses[6]


def test_target_networks_are_polyak_averaged() -> None:
    learner = make_learner(tau=0.1, net__hidden_sizes=[8])
    start = copy_weights(learner.target_critics)
    assert all_equal(start, copy_weights(learner.critics))
    learner.update(batch())
    check_polyak_update(learner.target_critics, start, learner.critics, tau=0.1)


@pytest.mark.parametrize("spaces", [DISCRETE, CONTINUOUS])
def test_critic_optimizer_uses_only_the_critic_loss(spaces: Spaces) -> None:
    learner = make_learner(spaces, net__hidden_sizes=[8], alpha=None)
    data = batch() if spaces is DISCRETE else continuous_batch()
    state = learner.rng.get_state()
    result = probe(learner, data).gradients["critic_optimizer"][0].clone()
    learner.rng.set_state(state)
    assert torch.equal(result, learner.critic_optimizer.compute_gradients(learner.critic_loss(data)[0])[0])


def test_actor_lr_applies_only_to_the_actor() -> None:
    learner = make_learner(lr=1e-2, actor_lr=1e-4, net__hidden_sizes=[8])
    actor, critics = copy_weights(learner.actor), copy_weights(learner.critics)
    learner.update(batch())
    # the first step of Adam changes a weight by the learning rate
    for net, before, lr in ((learner.actor, actor, 1e-4), (learner.critics, critics, 1e-2)):
        largest = max((p - old).abs().max().item() for p, old in zip(net.parameters(), before, strict=True))
        assert largest == pytest.approx(lr, rel=0.05)


def test_critics_have_different_initial_weights() -> None:
    learner = make_learner(net__hidden_sizes=[8])
    first, second = learner.critics(torch.ones(1, 2))
    assert not torch.equal(first, second)


def test_actor_critics_and_targets_normalize_observations() -> None:
    learner = make_learner(normalize_obs=True)
    learner.update_normalizers(Batch(obs=torch.tensor([[[1.0, 0.0]], [[3.0, 4.0]]])))
    # means 2 and 2, stds 1 and 2
    for net in (learner.actor, learner.critics, learner.target_critics):
        assert torch.allclose(net.features(torch.tensor([[3.0, 0.0]])), torch.tensor([[1.0, -1.0]]), atol=1e-5)


# --- acting ---


def test_policy_samples_while_collecting_and_takes_the_mode_in_evaluations() -> None:
    learner = make_learner()
    set_net_output(learner.actor, *LOGITS)
    rng, obs = torch.Generator().manual_seed(0), torch.zeros(20_000, 2)
    action = learner.policy.act(obs, None, None, Phase.COLLECT, rng, 0).action
    # three standard errors are 0.011
    assert (action.bincount(minlength=3) / 20_000).tolist() == pytest.approx([0.5, 0.25, 0.25], abs=0.011)
    assert learner.policy.act(obs, None, None, Phase.EVAL, rng, 0).action.unique().tolist() == [0]
    mask = torch.tensor([False, True, True]).expand(20_000, 3)
    for phase in Phase:
        assert 0 not in learner.policy.act(obs, None, mask, phase, rng, 0).action
    continuous = make_learner(CONTINUOUS)
    set_net_output(continuous.actor, 0.3, math.log(0.5))
    raw = continuous.policy.act(obs, None, None, Phase.COLLECT, rng, 0).action.atanh()
    assert raw.mean().item() == pytest.approx(0.3, abs=0.011)
    assert raw.std().item() == pytest.approx(0.5, rel=0.03)
    assert continuous.policy.act(obs[:1], None, None, Phase.EVAL, rng, 0).action.item() == pytest.approx(math.tanh(0.3))


def test_log_std_is_clamped() -> None:
    learner = make_learner(CONTINUOUS)
    set_net_output(learner.actor, 0.0, 50.0)
    assert learner.actor(torch.zeros(1, 2)).normal.log_std.item() == 2.0
    set_net_output(learner.actor, 0.0, -50.0)
    assert learner.actor(torch.zeros(1, 2)).normal.log_std.item() == -20.0


def test_value_is_the_soft_value_or_that_of_the_mode() -> None:
    learner = make_learner()
    set_critic_outputs(learner.critics, [10.0, 2.0, 6.0], [4.0, 8.0, 6.0])
    set_net_output(learner.actor, *LOGITS)
    assert learner.value(torch.zeros(2, 2)).tolist() == pytest.approx([4 + 0.5 * ENTROPY] * 2)
    continuous = make_learner(CONTINUOUS)
    set_critic_outputs(continuous.critics, [2.0, 1.0], [-4.0, 1.0])
    set_net_output(continuous.actor, math.atanh(0.5), 0.0)
    assert continuous.value(torch.zeros(2, 2)).tolist() == pytest.approx([-1.0] * 2)  # the minimum of 2 and -1


# --- rejected settings, convergence, state and metrics ---


@pytest.mark.parametrize("name", ["sac", "redq"])
def test_unsupported_settings_and_spaces_are_rejected(name: str) -> None:
    for space in (MultiDiscrete([2, 2]), Box(-np.inf, np.inf, (1,), np.float32), Box(-1.0, 1.0, (2, 2), np.float32)):
        with pytest.raises(UserError, match=f"{name} needs continuous actions in a bounded one-dimensional Box"):
            make_learner(Spaces(OBS, space), name=name)
    with pytest.raises(UserError, match=rf"{name} does not support recurrent networks: set net\.recurrent=none"):
        make_learner(name=name, net__recurrent="gru")
    with pytest.raises(UserError, match="target_critics=4 must be at most critics=3"):
        make_learner(name=name, critics=3, target_critics=4)
    with pytest.raises(UserError, match=f"{name} needs an environment with one agent"):
        make_learner(Spaces(OBS, Discrete(3), num_agents=2), name=name)


def test_q_values_converge_to_the_targets() -> None:
    learner = make_learner(net__hidden_sizes=[8], lr=1e-2)
    data = batch(terminated=torch.ones(3, dtype=torch.bool), reward=torch.tensor([1.0, -2.0, 3.0]))
    first = learner.update(data).metrics["critic_loss"].item()
    for _ in range(400):
        last = learner.update(data).metrics["critic_loss"].item()
    assert last < 0.01 * first


@pytest.mark.parametrize("spaces", [DISCRETE, CONTINUOUS])
def test_restored_learner_continues_identically(spaces: Spaces) -> None:
    settings = {"net__hidden_sizes": [8], "alpha": None, "policy_delay": 2}
    learner, other = make_learner(spaces, **settings), make_learner(spaces, **settings, seed=9)
    data = batch() if spaces is DISCRETE else continuous_batch()
    learner.update(data)
    other.load_state_dict(learner.state_dict())
    for _ in range(3):
        first, second = learner.update(data), other.update(data)
        assert all(torch.equal(first.metrics[name], second.metrics[name]) for name in first.metrics)
    for name in ("actor", "critics", "target_critics", "log_alpha"):
        assert all_equal(copy_weights(getattr(learner, name)), copy_weights(getattr(other, name)))


def test_update_returns_exactly_the_declared_metrics() -> None:
    assert set(make_learner().update(batch()).metrics) == set(SoftActorCritic.metrics)

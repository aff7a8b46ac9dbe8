"""Losses, advantages, minibatches and settings of PPO, with numbers worked out by hand."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from by_hand import changed_parts, collect_random_rollout, named_weights
from gymnasium.spaces import Box, Discrete
from probe import probe

import zhixing as zx
from zhixing.algorithms.ppo import PPO
from zhixing.core.batch import Batch
from zhixing.core.spaces import Spaces
from zhixing.errors import UserError
from zhixing.nets.actor_critic import evaluate_actions
from zhixing.ops.policy_gradient import minibatches

SPACES = Spaces(Box(-1.0, 1.0, (3,), np.float32), Discrete(2))


def minibatches_of(learner: PPO, data: Batch) -> Iterator[Batch]:
    return minibatches(data, learner.cfg.minibatch_size, learner.rng, learner.net.recurrent)


def make_learner(**settings: Any) -> PPO:
    base = {"net__hidden_sizes": [8], "num_envs": 2, "rollout_steps": 6, "minibatch_size": 4, "epochs": 2}
    base |= {"normalize_obs": False, "normalize_reward": False}
    cfg = zx.config.load(algorithm="ppo", env="Acrobot-v1", **(base | settings))
    return PPO(cfg, SPACES)


def rollout(ppo: PPO, steps: int = 6, envs: int = 2, seed: int = 0) -> Batch:
    return collect_random_rollout(ppo, steps, envs, seed)


# --- losses ---


def test_policy_loss_by_hand() -> None:
    ppo = make_learner(normalize_advantage=False, clip_range=0.2)
    ratio = torch.tensor([1.5, 0.5, 1.5, 0.5])
    batch = Batch(advantage=torch.tensor([1.0, 1.0, -1.0, -1.0]), logp=torch.tensor([-1.0, -1.0, -1.0, -1.0]))
    loss, log_ratio = ppo.policy_loss(ratio.log() - 1.0, batch)
    # min(1.5, 1.2) = 1.2;  min(0.5, 0.8) = 0.5;  min(-1.5, -1.2) = -1.5;  min(-0.5, -0.8) = -0.8
    # -(1.2 + 0.5 - 1.5 - 0.8) / 4 = 0.15
    assert loss.item() == pytest.approx(0.15, rel=1e-5)
    assert torch.allclose(log_ratio, ratio.log())


def test_clipped_ratios_have_no_gradient() -> None:
    ppo = make_learner(normalize_advantage=False, clip_range=0.2)
    logp = torch.tensor([1.5, 0.5, 1.5, 0.5]).log().requires_grad_()
    batch = Batch(advantage=torch.tensor([1.0, 1.0, -1.0, -1.0]), logp=torch.zeros(4))
    ppo.policy_loss(logp, batch)[0].backward()
    # if the minimum is the unclipped term, d/dlogp of -rA/4 is -rA/4: -0.125 and 0.375; else it is 0
    assert logp.grad is not None
    assert logp.grad.tolist() == pytest.approx([0.0, -0.125, 0.375, 0.0])


def test_advantages_are_normalized_per_minibatch() -> None:
    ppo = make_learner(clip_range=10.0)
    logp = torch.zeros(3, requires_grad=True)
    ppo.policy_loss(logp, Batch(advantage=torch.tensor([1.0, 2.0, 6.0]), logp=torch.zeros(3)))[0].backward()
    # mean 3; deviations -2, -1, 3; variance (4 + 1 + 9) / 2 = 7; the gradient is -A / 3
    expected = [2 / 7**0.5 / 3, 1 / 7**0.5 / 3, -3 / 7**0.5 / 3]
    assert logp.grad is not None
    assert logp.grad.tolist() == pytest.approx(expected, rel=1e-5)


def test_single_advantage_is_not_normalized_to_zero() -> None:
    loss, _ = make_learner().policy_loss(torch.zeros(1), Batch(advantage=torch.tensor([3.0]), logp=torch.zeros(1)))
    assert loss.item() == -3.0


def test_value_loss_by_hand() -> None:
    batch = Batch(returns=torch.tensor([2.0, 2.0]), value=torch.tensor([0.0, 5.0]))
    value = torch.tensor([1.0, 3.0])
    # (1 - 2)² = 1 and (3 - 2)² = 1
    assert make_learner().value_loss(value, batch).item() == 1.0
    # clipped to within 0.5 of the old values: 0.5 and 4.5; (0.5 - 2)² = 2.25 and (4.5 - 2)² = 6.25 are larger
    assert make_learner(value_clip_range=0.5).value_loss(value, batch).item() == 4.25


def test_gradient_is_the_weighted_sum_of_policy_value_and_entropy() -> None:
    ppo = make_learner(value_coef=0.3, entropy_coef=0.07, normalize_advantage=False, max_grad_norm=None)
    data = ppo.add_advantages(rollout(ppo)).flatten()
    gradient = probe(ppo, data, "gradient_step").gradients["optimizer"][0].clone()
    out = ppo.net(data.obs)
    logp, entropy = out.distribution.log_prob(data.action), out.distribution.entropy()
    # before the first step the ratio is 1
    loss = -(data.advantage * (logp - logp.detach()).exp()).mean()
    loss = loss + 0.3 * (out.value - data.returns).square().mean() - 0.07 * entropy.mean()
    expected = ppo.optimizer.compute_gradients(loss)[0]
    assert torch.allclose(gradient, expected, atol=1e-6)


def test_metrics_by_hand() -> None:
    ppo = make_learner(clip_range=0.2)
    data = ppo.add_advantages(rollout(ppo)).flatten()
    ratio = torch.full((12,), 1.0)
    ratio[:3] = 1.3
    metrics = probe(ppo, data.replace(logp=data.logp - ratio.log()), "gradient_step").metrics
    assert metrics["clip_fraction"].item() == 0.25  # 3 of 12 ratios differ from 1 by more than 0.2
    assert metrics["kl"].item() == pytest.approx((0.3 - math.log(1.3)) / 4, rel=1e-4)
    assert metrics["entropy"].item() == pytest.approx(math.log(2), abs=1e-3)  # the initial policy is nearly uniform


# --- advantages ---


def test_truncated_step_bootstraps_and_terminated_step_does_not() -> None:
    ppo = make_learner(gamma=0.5, gae_lambda=0.0)
    batch = rollout(ppo, steps=3)
    terminated, truncated = (torch.zeros(3, 2, dtype=torch.bool) for _ in range(2))
    terminated[1, 0] = truncated[1, 1] = True
    next_obs = torch.rand(3, 2, 3)
    batch = batch.replace(terminated=terminated, truncated=truncated, next_obs=next_obs)
    data = ppo.add_advantages(batch)
    with torch.no_grad():
        next_value = ppo.value(next_obs.flatten(0, 1)).view(3, 2)
    # λ = 0: A = r + 0.5 V(next) - V, where V(next) is that of the next row except at truncation and in the last row
    expected = batch.reward - batch.value
    expected[0] += 0.5 * batch.value[1]
    expected[1, 1] += 0.5 * next_value[1, 1]
    expected[2] += 0.5 * next_value[2]
    assert torch.allclose(data.advantage, expected, atol=1e-6)
    assert torch.allclose(data.returns, data.advantage + batch.value)


def test_explained_variance_by_hand() -> None:
    ppo = make_learner(gamma=0.0, gae_lambda=0.0)
    batch = rollout(ppo)
    value = torch.arange(12.0).view(6, 2)
    # with γ = 0 returns are rewards, here 2v. The residual v has the variance of v, the return four times as much
    update = ppo.update(batch.replace(value=value, reward=2 * value))
    assert update.metrics["explained_variance"].item() == pytest.approx(0.75, rel=1e-5)


def test_rewards_are_scaled_before_advantages_are_computed() -> None:
    unscaled = make_learner(gamma=0.0, gae_lambda=0.0)
    scaled = make_learner(gamma=0.0, gae_lambda=0.0, normalize_reward=True)
    batch = rollout(unscaled)
    # with γ = 0 returns are rewards, so rewards are divided by their std
    expected = batch.reward / batch.reward.std(unbiased=False)
    assert torch.allclose(scaled.add_advantages(batch).returns, expected, atol=1e-5)
    assert torch.allclose(unscaled.add_advantages(batch).returns, batch.reward, atol=1e-6)


def test_update_updates_observation_statistics() -> None:
    ppo = make_learner(normalize_obs=True)
    batch = rollout(ppo)
    ppo.update(batch)
    assert torch.allclose(ppo.net.encoder.norm.mean, batch.obs.double().mean((0, 1)))
    assert ppo.net.encoder.norm.count == 12


# --- minibatches ---


def test_minibatches_contain_each_step_once() -> None:
    ppo = make_learner(minibatch_size=4)
    data = ppo.add_advantages(rollout(ppo)).replace(advantage=torch.arange(12.0).view(6, 2))
    for _ in range(3):
        parts = [part.advantage for part in minibatches_of(ppo, data)]
        assert [len(part) for part in parts] == [4, 4, 4]
        assert torch.cat(parts).sort().values.tolist() == list(range(12))
    orders = {tuple(torch.cat([p.advantage for p in minibatches_of(ppo, data)]).tolist()) for _ in range(5)}
    assert len(orders) == 5


def test_fields_of_a_minibatch_belong_to_the_same_steps() -> None:
    ppo = make_learner(minibatch_size=4)
    batch = rollout(ppo)
    data = ppo.add_advantages(batch.replace(obs=batch.obs.clone(), value=batch.obs[..., 0].clone()))
    for part in minibatches_of(ppo, data):
        assert torch.equal(part.value, part.obs[:, 0])


def test_recurrent_minibatches_are_whole_sequences() -> None:
    ppo = make_learner(net__recurrent="gru", net__recurrent_size=4, num_envs=4, minibatch_size=12)
    data = ppo.add_advantages(rollout(ppo, envs=4))
    numbers = torch.arange(24.0).view(6, 4)  # 4 t + n
    columns = []
    for part in minibatches_of(ppo, data.replace(advantage=numbers)):
        assert part.advantage.shape == (6, 2)  # 12 steps are two whole sequences of 6
        assert torch.equal(part.advantage, part.advantage[0] + 4 * torch.arange(6.0)[:, None])
        columns += part.advantage[0].tolist()
    assert sorted(columns) == [0, 1, 2, 3]


@pytest.mark.parametrize("kind", ["gru", "lstm"])
def test_unrolled_outputs_equal_those_while_collecting(kind: str) -> None:
    ppo = make_learner(net__recurrent=kind, net__recurrent_size=4)
    batch = rollout(ppo)
    truncated = batch.truncated.clone()
    truncated[2, 1] = True  # resets the hidden state of environment 1 after its third step
    data = ppo.add_advantages(batch.replace(truncated=truncated))
    assert data.is_first.tolist() == [[False, False]] * 3 + [[False, True]] + [[False, False]] * 2
    logp, value, _ = evaluate_actions(ppo.net, data)
    assert torch.allclose(logp[:, 0], data.logp[:, 0], atol=1e-6)
    assert torch.allclose(value[:3], data.value[:3], atol=1e-6)
    assert torch.allclose(value[:, 0], data.value[:, 0], atol=1e-6)
    reset = ppo.net(data.obs[3], None).value[1]  # with the initial hidden state
    assert torch.allclose(value[3, 1], reset, atol=1e-6)


def test_number_of_updates_is_epochs_times_minibatches() -> None:
    ppo = make_learner(epochs=3, minibatch_size=4)
    ppo.update(rollout(ppo))
    assert ppo.updates == 3 * 3
    ppo = make_learner(epochs=3, minibatch_size=100)
    ppo.update(rollout(ppo))
    assert ppo.updates == 3


# --- separate learning rates and epochs ---


def test_gradient_step_can_update_the_actor_or_the_critic() -> None:
    ppo = make_learner(critic_lr=1e-2)
    data = ppo.add_advantages(rollout(ppo)).flatten()
    before = named_weights(ppo.net)
    ppo.gradient_step(data, critic=False)
    assert changed_parts(ppo.net, before) == {"actor", "policy_head"}
    before = named_weights(ppo.net)
    ppo.gradient_step(data, actor=False)
    assert changed_parts(ppo.net, before) == {"critic", "value_head"}


def test_critic_lr_applies_only_to_the_critic() -> None:
    ppo = make_learner(lr=1e-4, critic_lr=1e-2, max_grad_norm=None, epochs=1, minibatch_size=100)
    before = named_weights(ppo.net)
    ppo.update(rollout(ppo))
    steps = {
        part: max((p - before[name]).abs().max().item() for name, p in ppo.net.named_parameters() if part in name)
        for part in ("actor", "policy_head", "critic", "value_head")
    }
    # the first step of Adam changes a weight by the learning rate
    assert steps["actor"] == pytest.approx(1e-4, rel=0.05)
    assert steps["policy_head"] == pytest.approx(1e-4, rel=0.05)
    assert steps["critic"] == pytest.approx(1e-2, rel=0.05)
    assert steps["value_head"] == pytest.approx(1e-2, rel=0.05)


def test_critic_epochs_apply_only_to_the_critic() -> None:
    ppo = make_learner(epochs=2, critic_epochs=5, minibatch_size=100)
    ppo.update(rollout(ppo))
    assert ppo.actor_optimizer.steps[0] == 2
    assert ppo.critic_optimizer.steps[0] == 5
    ppo = make_learner(epochs=2, critic_epochs=0, minibatch_size=100)
    before = named_weights(ppo.net)
    ppo.update(rollout(ppo))
    assert changed_parts(ppo.net, before) == {"actor", "policy_head"}


def test_shared_network_is_trained_by_both_losses_and_rejects_critic_lr() -> None:
    ppo = make_learner(shared_network=True)
    assert ppo.net.critic is ppo.net.actor
    before = named_weights(ppo.net)
    ppo.update(rollout(ppo))
    assert changed_parts(ppo.net, before) == {"actor", "policy_head", "value_head"}
    with pytest.raises(UserError, match="shared_network=true has one optimizer"):
        make_learner(shared_network=True, critic_lr=1e-3)


def test_critic_is_not_trained_with_value_coef_zero() -> None:
    ppo = make_learner(value_coef=0.0)
    before = named_weights(ppo.net)
    ppo.update(rollout(ppo))
    assert changed_parts(ppo.net, before) == {"towers", "policy_head"}
    weight, old = ppo.net.towers.weights[0], before["towers.weights.0"]
    assert not torch.equal(weight[0], old[0])
    assert torch.equal(weight[1], old[1])


# --- early stopping, learning rates, clipping and seeds ---


def test_target_kl_stops_the_epochs() -> None:
    settings = {"lr": 0.5, "epochs": 10, "minibatch_size": 100}
    # in the first epoch the ratio is 1; after a step of 0.5 per weight, the KL of the second is far above 0.015
    for target_kl, updates in ((None, 10), (0.01, 2), (1e6, 10)):
        ppo = make_learner(**settings, target_kl=target_kl)
        metrics = ppo.update(rollout(ppo)).metrics
        assert ppo.updates == metrics["stop_epoch"] == updates


def test_loss_deltas_are_last_epoch_minus_first() -> None:
    ppo, by_hand = (make_learner(epochs=2, minibatch_size=100) for _ in range(2))
    data = by_hand.add_advantages(rollout(by_hand))
    first, last = (by_hand.gradient_step(data.flatten()).metrics for _ in range(2))
    metrics = ppo.update(rollout(ppo)).metrics
    for name in ("policy_loss", "value_loss"):
        assert metrics[f"{name}_delta"] == last[name] - first[name] != 0.0
    assert metrics["stop_epoch"] == 2.0
    assert metrics["value_mean"] == data.value.mean()


def test_linear_lr_schedule_anneals_learning_rates() -> None:
    ppo = make_learner(lr=4e-3, lr_schedule="linear")
    ppo.set_progress(0.25)
    assert ppo.optimizer.lr == pytest.approx(3e-3)
    separate = make_learner(lr=4e-3, critic_lr=8e-3, lr_schedule="linear")
    separate.set_progress(0.75)
    assert (separate.actor_optimizer.lr, separate.critic_optimizer.lr) == pytest.approx((1e-3, 2e-3))
    constant = make_learner(lr=4e-3)
    constant.set_progress(0.75)
    assert constant.optimizer.lr == 4e-3


def test_gradients_are_clipped_to_max_grad_norm() -> None:
    ppo = make_learner(max_grad_norm=0.01, epochs=1, minibatch_size=100)
    data = ppo.add_advantages(rollout(ppo)).flatten()
    norm = probe(ppo, data, "gradient_step").metrics["grad_norm"]
    assert norm > 0.01  # the metric is the norm before clipping
    ppo.optimizer.kind = "rmsprop"  # its second moment after one step is 0.01 of the squared gradient
    assert ppo.gradient_step(data).metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-5)
    squares = ppo.optimizer.second_moment[0].sum().item()
    assert squares == pytest.approx(0.01 * 0.01**2, rel=1e-3)


def test_initial_weights_depend_only_on_the_seed() -> None:
    torch.manual_seed(1)
    a = make_learner(seed=5)
    torch.manual_seed(2)
    b, c = make_learner(seed=5), make_learner(seed=6)
    assert all(torch.equal(p, q) for p, q in zip(a.net.parameters(), b.net.parameters(), strict=True))
    assert not torch.equal(a.net.towers.weights[0], c.net.towers.weights[0])


def test_restored_learner_continues_identically() -> None:
    ppo = make_learner(normalize_obs=True, normalize_reward=True)
    ppo.update(rollout(ppo, seed=1))
    other = make_learner(normalize_obs=True, normalize_reward=True, seed=9)
    other.load_state_dict(ppo.state_dict())
    batch = rollout(ppo, seed=2)
    first, second = ppo.update(batch), other.update(batch)
    assert all(torch.equal(first.metrics[name], second.metrics[name]) for name in first.metrics)
    assert all(torch.equal(p, q) for p, q in zip(ppo.net.parameters(), other.net.parameters(), strict=True))
    assert other.updates == ppo.updates


def test_update_returns_exactly_the_declared_metrics() -> None:
    ppo = make_learner()
    assert set(ppo.update(rollout(ppo)).metrics) == set(PPO.metrics)

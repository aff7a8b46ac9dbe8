"""Policy step of TRPO: it improves the objective within the trust region, or is rejected."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from by_hand import changed_parts, collect_random_rollout, named_weights
from gymnasium.spaces import Box, Discrete

import zhixing as zx
from zhixing.algorithms.trpo import TRPO
from zhixing.core.batch import Batch
from zhixing.core.spaces import Spaces
from zhixing.nets.actor_critic import evaluate_actions
from zhixing.nets.rollouts import forward_actor, forward_critic
from zhixing.ops.distributions import Categorical

OBS = Box(-1.0, 1.0, (3,), np.float32)
DISCRETE, CONTINUOUS = Spaces(OBS, Discrete(3)), Spaces(OBS, Box(-1.0, 1.0, (2,), np.float32))


def make_learner(spaces: Spaces = DISCRETE, **settings: Any) -> TRPO:
    base = {"net__hidden_sizes": [8], "num_envs": 4, "rollout_steps": 16, "minibatch_size": 16}
    cfg = zx.config.load(algorithm="trpo", env="Acrobot-v1", **(base | settings))
    return TRPO(cfg, spaces)


def rollout(trpo: TRPO, seed: int = 0) -> Batch:
    return collect_random_rollout(trpo, 16, 4, seed)


def test_policy_loss_by_hand() -> None:
    policy = Categorical(torch.tensor([[0.6, 0.4], [0.3, 0.7]]).log())
    old = torch.tensor([0.5, 0.5]).log()
    data = Batch(action=torch.tensor([0, 1]), logp=old, advantage=torch.tensor([1.0, -2.0]))
    # ratios 1.2 and 1.4: -(1.2 · 1 - 1.4 · 2) / 2 = 0.8
    assert make_learner().policy_loss(policy, data).item() == pytest.approx(0.8, rel=1e-5)


@pytest.mark.parametrize("spaces", [DISCRETE, CONTINUOUS], ids=["discrete", "continuous"])
@pytest.mark.parametrize("max_kl", [0.001, 0.05])
def test_step_improves_the_objective_within_the_trust_region(spaces: Spaces, max_kl: float) -> None:
    trpo = make_learner(spaces, max_kl=max_kl, damping=1e-3)
    metrics = trpo.update(rollout(trpo)).metrics
    assert metrics["policy_loss"] < 0  # before the step it is 0, the mean of normalized advantages
    assert 0.3 * max_kl < metrics["kl"] <= max_kl
    assert 0 < metrics["step_fraction"] <= 1


def test_reported_kl_is_that_between_the_old_and_the_new_policy() -> None:
    # the std of continuous actions is a parameter, so the old policy must keep a copy
    trpo = make_learner(CONTINUOUS, max_kl=0.05, damping=1e-3)
    batch = rollout(trpo)
    before = trpo.net.policy_head.distribution.log_std.detach().clone()
    obs = batch.obs.flatten(0, 1)
    mean = trpo.net(obs).distribution.mean.detach()
    metrics = trpo.update(batch).metrics
    new = trpo.net(obs).distribution
    ratio = (before - new.log_std).detach()
    shift = (mean - new.mean.detach()) / new.log_std.exp().detach()
    kl = (0.5 * (torch.exp(2 * ratio) + shift**2 - 1) - ratio).sum(-1).mean()
    assert not torch.equal(before, trpo.net.policy_head.distribution.log_std)
    assert metrics["kl"].item() == pytest.approx(kl.item(), rel=1e-3)


def test_rejected_step_does_not_change_the_policy() -> None:
    trpo = make_learner()
    trpo.measure = lambda old, data: (torch.tensor(1.0), torch.tensor(0.0))  # never an improvement
    before = named_weights(trpo.net)
    metrics = trpo.update(rollout(trpo)).metrics
    assert metrics["step_fraction"] == 0
    assert changed_parts(trpo.net, before) == {"critic", "value_head"}


def test_line_search_shortens_the_step_until_the_kl_is_small_enough() -> None:
    trpo = make_learner(line_search_shrink=0.5)
    kls = iter([0.5, 0.02, 0.009, 0.009])  # of three line search steps, and of the metric
    trpo.measure = lambda old, data: (torch.tensor(-1.0), torch.tensor(next(kls)))
    assert trpo.update(rollout(trpo)).metrics["step_fraction"].item() == 0.25


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 1e38])
def test_nonfinite_step_is_reported_and_rejected(value: float) -> None:
    trpo = make_learner()
    batch = rollout(trpo)
    before = named_weights(trpo.net)
    metrics = trpo.update(batch.replace(reward=torch.full_like(batch.reward, value))).metrics
    assert not all(torch.isfinite(metric) for metric in metrics.values())
    assert changed_parts(trpo.net, before) == set()


def test_zero_advantages_give_no_step_and_finite_metrics() -> None:
    trpo = make_learner()
    data = rollout(trpo).flatten()
    before = named_weights(trpo.net)
    metrics = trpo.policy_step(Batch(obs=data.obs, action=data.action, logp=data.logp, advantage=torch.zeros(64)))
    assert changed_parts(trpo.net, before) == set()
    assert metrics["kl"] == 0
    assert metrics["step_fraction"] == 0


def test_update_takes_one_policy_step_and_many_critic_steps() -> None:
    trpo = make_learner(critic_epochs=3)
    trpo.update(rollout(trpo))
    assert trpo.critic_optimizer.steps[0] == 3 * 4  # 64 steps in minibatches of 16
    assert trpo.updates == 1 + 3 * 4


def test_critic_step_changes_only_the_critic() -> None:
    trpo = make_learner()
    data = Batch(obs=torch.rand(5, 3), returns=torch.ones(5))
    before = named_weights(trpo.net)
    trpo.critic_step(data)
    assert changed_parts(trpo.net, before) == {"critic", "value_head"}


@pytest.mark.parametrize("kind", ["gru", "lstm"])
def test_separate_forward_passes_equal_evaluate_actions(kind: str) -> None:
    trpo = make_learner(net__recurrent=kind, net__recurrent_size=4)
    batch = rollout(trpo)
    is_first = torch.zeros(16, 4, dtype=torch.bool)
    is_first[5, 1] = is_first[9, 3] = True
    data = Batch(obs=batch.obs, action=batch.action, hidden=batch.hidden, is_first=is_first)
    logp, value, entropy = evaluate_actions(trpo.net, data)
    policy, _ = forward_actor(trpo.net, data)
    assert torch.allclose(policy.log_prob(data.action), logp, atol=1e-6)
    assert torch.allclose(policy.entropy(), entropy, atol=1e-6)
    assert torch.allclose(forward_critic(trpo.net, data), value, atol=1e-6)


def test_recurrent_step_stays_within_the_trust_region() -> None:
    trpo = make_learner(net__recurrent="gru", net__recurrent_size=4, damping=1e-3)
    metrics = trpo.update(rollout(trpo)).metrics
    assert metrics["policy_loss"] < 0
    assert 0 < metrics["kl"] <= 0.01


def test_update_updates_observation_statistics() -> None:
    trpo = make_learner(normalize_obs=True)
    batch = rollout(trpo)
    trpo.update(batch)
    for torso in (trpo.net.actor, trpo.net.critic):
        assert torch.allclose(torso.encoder.norm.mean, batch.obs.double().mean((0, 1)))


def test_update_returns_exactly_the_declared_metrics() -> None:
    trpo = make_learner()
    assert set(trpo.update(rollout(trpo)).metrics) == set(TRPO.metrics)

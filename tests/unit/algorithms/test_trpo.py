"""TRPO's step: within the trust region, better than before, or not at all."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from by_hand import changed_parts, named_weights
from gymnasium.spaces import Box, Discrete

import zhixing as zx
from zhixing.algorithms.trpo import TRPO
from zhixing.core.batch import Batch
from zhixing.core.spaces import Spaces
from zhixing.core.tree import tree_map
from zhixing.nets.actor_critic import evaluate_actions
from zhixing.nets.rollouts import forward_actor, forward_critic
from zhixing.ops.distributions import Categorical

OBS = Box(-1.0, 1.0, (3,), np.float32)
DISCRETE, CONTINUOUS = Spaces(OBS, Discrete(3)), Spaces(OBS, Box(-1.0, 1.0, (2,), np.float32))


def make_learner(spaces: Spaces = DISCRETE, **settings: Any) -> TRPO:
    short = {"net__hidden_sizes": [8], "num_envs": 4, "rollout_steps": 16, "minibatch_size": 16}
    cfg = zx.config.load(algorithm="trpo", env="Acrobot-v1", **(short | settings))
    return TRPO(cfg, spaces)


def rollout(trpo: TRPO, seed: int = 0) -> Batch:
    """Random observations and rewards with the decisions that `trpo` would have learner."""
    T, N = 16, 4
    g = torch.Generator().manual_seed(seed)
    obs = torch.rand(T + 1, N, 3, generator=g)
    hidden, rows = trpo.policy.initial_hidden(N), []
    with torch.no_grad():
        for t in range(T):
            decision = trpo.policy.act(obs[t], hidden, None, zx.Phase.COLLECT, g, 0)
            rows.append((decision.action, decision.logp, decision.value, hidden))
            hidden = decision.hidden
    fields: dict[str, Any] = {n: torch.stack([r[i] for r in rows]) for i, n in enumerate(("action", "logp", "value"))}
    if trpo.net.recurrent:
        fields["hidden"] = tree_map(lambda *leaves: torch.stack(leaves), *(row[3] for row in rows))
    end = torch.zeros(T, N, dtype=torch.bool)
    reward = torch.randn(T, N, generator=g)
    return Batch(obs=obs[:-1], reward=reward, terminated=end, truncated=end.clone(), next_obs=obs[1:], **fields)


def test_policy_loss_by_hand() -> None:
    policy = Categorical(torch.tensor([[0.6, 0.4], [0.3, 0.7]]).log())
    old = torch.tensor([0.5, 0.5]).log()
    data = Batch(action=torch.tensor([0, 1]), logp=old, advantage=torch.tensor([1.0, -2.0]))
    # ratios 1.2 and 1.4: -(1.2 · 1 - 1.4 · 2) / 2 = 0.8
    assert make_learner().policy_loss(policy, data).item() == pytest.approx(0.8, rel=1e-5)


@pytest.mark.parametrize("spaces", [DISCRETE, CONTINUOUS], ids=["discrete", "continuous"])
@pytest.mark.parametrize("max_kl", [0.001, 0.05])
def test_the_step_improves_the_surrogate_within_the_trust_region(spaces: Spaces, max_kl: float) -> None:
    trpo = make_learner(spaces, max_kl=max_kl, damping=1e-3)
    metrics = trpo.update(rollout(trpo)).metrics
    assert metrics["policy_loss"] < 0  # it was 0: normalised advantages under a ratio of 1
    assert 0.3 * max_kl < metrics["kl"] <= max_kl
    assert 0 < metrics["step_fraction"] <= 1


def test_what_is_told_of_the_kl_is_the_divergence_between_old_and_new() -> None:
    """Also of the spread of continuous actions, which is a weight itself and moves under the old policy's feet."""
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


def test_a_step_that_is_not_accepted_leaves_the_policy_where_it_was() -> None:
    trpo = make_learner()
    trpo.measure = lambda old, data: (torch.tensor(1.0), torch.tensor(0.0))  # never better
    before = named_weights(trpo.net)
    metrics = trpo.update(rollout(trpo)).metrics
    assert metrics["step_fraction"] == 0
    assert changed_parts(trpo.net, before) == {"critic", "value_head"}


def test_the_line_search_shortens_until_the_kl_fits() -> None:
    trpo = make_learner(line_search_shrink=0.5)
    kls = iter([0.5, 0.02, 0.009, 0.009])  # of three trials, and of what is told
    trpo.measure = lambda old, data: (torch.tensor(-1.0), torch.tensor(next(kls)))
    assert trpo.update(rollout(trpo)).metrics["step_fraction"].item() == 0.25


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 1e38])
def test_a_step_that_is_not_finite_is_told_and_not_taken(value: float) -> None:
    trpo = make_learner()
    batch = rollout(trpo)
    before = named_weights(trpo.net)
    metrics = trpo.update(batch.replace(reward=torch.full_like(batch.reward, value))).metrics
    assert not all(torch.isfinite(one) for one in metrics.values())
    assert changed_parts(trpo.net, before) == set()


def test_equal_advantages_give_no_step_and_no_alarm() -> None:
    trpo = make_learner()
    data = rollout(trpo).flatten()
    before = named_weights(trpo.net)
    metrics = trpo.policy_step(Batch(obs=data.obs, action=data.action, logp=data.logp, advantage=torch.zeros(64)))
    assert changed_parts(trpo.net, before) == set()
    assert metrics["kl"] == 0
    assert metrics["step_fraction"] == 0


def test_a_rollout_moves_the_policy_once_and_the_critic_in_minibatches() -> None:
    trpo = make_learner(critic_epochs=3)
    trpo.update(rollout(trpo))
    assert trpo.critic_optimizer.steps[0] == 3 * 4  # 64 steps in minibatches of 16
    assert trpo.updates == 1 + 3 * 4


def test_the_critic_alone_moves_by_its_gradients() -> None:
    trpo = make_learner()
    data = Batch(obs=torch.rand(5, 3), returns=torch.ones(5))
    before = named_weights(trpo.net)
    trpo.critic_step(data)
    assert changed_parts(trpo.net, before) == {"critic", "value_head"}


@pytest.mark.parametrize("kind", ["gru", "lstm"])
def test_one_body_at_a_time_reads_what_both_would(kind: str) -> None:
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


def test_observations_are_taken_into_the_statistics_after_learning() -> None:
    trpo = make_learner(normalize_obs=True)
    batch = rollout(trpo)
    trpo.update(batch)
    for body in (trpo.net.actor, trpo.net.critic):
        assert torch.allclose(body.encoder.norm.mean, batch.obs.double().mean((0, 1)))


def test_update_returns_exactly_the_declared_metrics() -> None:
    trpo = make_learner()
    assert set(trpo.update(rollout(trpo)).metrics) == set(TRPO.metrics)

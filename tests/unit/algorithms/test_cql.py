"""Penalty, penalty weight and targets of CQL, by hand and by exact integrals. test_sac.py tests the rest."""

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
    copy_weights,
    set_critic_outputs,
    set_net_output,
)
from gymnasium.spaces import Box, Discrete, MultiDiscrete
from probe import probe
from torch import Tensor

import zhixing as zx
from zhixing.algorithms.sac import SoftActorCritic, make_sac
from zhixing.core.batch import Batch
from zhixing.core.spaces import Spaces
from zhixing.errors import UserError


def make_learner(spaces: Spaces = DISCRETE, **settings: Any) -> SoftActorCritic:
    base = {"net__hidden_sizes": [], "alpha": 0.5}  # one linear layer each
    cfg = zx.config.load(algorithm="cql", env="Acrobot-v1", **(base | settings))
    learner = zx.algorithms.get("cql").make(cfg, spaces)
    assert isinstance(learner, SoftActorCritic)
    return learner


def continuous_batch(**fields: Any) -> Batch:
    return batch(**({"action": torch.tensor([[0.5], [0.0], [-0.5]])} | fields))


def penalty(learner: SoftActorCritic, data: Batch) -> Tensor:
    assert learner.penalty is not None
    q = learner.critics.q_of_actions(data.obs, data.action)
    return learner.penalty(learner.critics, learner.actor, data, q, learner.rng)


# --- the penalty ---


def test_discrete_penalty_by_hand() -> None:
    learner = make_learner()
    set_critic_outputs(learner.critics, [math.log(1), math.log(2), math.log(5)], [0.0, 0.0, 0.0])
    # ln 8 - (ln 1 + ln 2 + ln 5) / 3, and ln 3
    result = penalty(learner, batch())
    assert result.tolist() == pytest.approx([math.log(8) - math.log(10) / 3, math.log(3)])
    (gradient,) = torch.autograd.grad(result.sum(), [learner.critics.towers.biases[0]])
    # softmax of the Q-values minus the frequencies of actions: 1/8, 2/8, 5/8 and thirds, minus thirds
    assert gradient.flatten().tolist() == pytest.approx(
        [1 / 8 - 1 / 3, 1 / 4 - 1 / 3, 5 / 8 - 1 / 3, 0.0, 0.0, 0.0], abs=1e-6
    )


def test_penalty_ignores_invalid_actions() -> None:
    learner = make_learner()
    set_critic_outputs(learner.critics, [math.log(1), 50.0, math.log(5)], [0.0, 0.0, 0.0])
    mask = torch.tensor([[True, False, True]]).expand(3, 3)
    result = penalty(learner, batch(action=torch.tensor([0, 2, 2]), mask=mask))
    # ln 6 - 2/3 ln 5 and ln 2
    assert result.tolist() == pytest.approx([math.log(6) - 2 / 3 * math.log(5), math.log(2)])
    (gradient,) = torch.autograd.grad(result.sum(), [learner.critics.towers.biases[0]])
    assert gradient[:, 0, 1].tolist() == [0.0, 0.0]


def test_importance_weights_scale_the_penalty() -> None:
    learner = make_learner()
    set_critic_outputs(learner.critics, [math.log(1), math.log(2), math.log(5)], [0.0, 0.0, 0.0])
    result = penalty(learner, batch(weight=torch.tensor([1.0, 0.5, 0.1])))
    # ln 8 + 0.5 (ln 8 - ln 2) + 0.1 (ln 8 - ln 5)
    first = math.log(8) + 0.5 * math.log(4) + 0.1 * math.log(8 / 5)
    assert result.tolist() == pytest.approx([first / 3, 1.6 * math.log(3) / 3])


@pytest.mark.parametrize(("mean", "std"), [(0.0, 1.0), (0.8, 0.5)])
def test_continuous_penalty_estimates_the_integral_over_actions(mean: float, std: float) -> None:
    learner = make_learner(CONTINUOUS, penalty_samples=20_000)
    set_critic_outputs(learner.critics, [3.0, 1.0], [0.0, -2.0])  # 1 + 3 a, and -2
    set_net_output(learner.actor, mean, math.log(std))
    # ∫ exp(1 + 3 a) da = e (e³ - e⁻³) / 3, and 2 e⁻²; the mean Q-values of the recorded actions are 1 and -2
    exact = [math.log((math.exp(3) - math.exp(-3)) / 3), math.log(2)]
    assert penalty(learner, continuous_batch()).tolist() == pytest.approx(exact, abs=0.03)


def test_continuous_penalty_by_hand_for_sampled_actions() -> None:
    learner = make_learner(CONTINUOUS, penalty_samples=2)
    set_critic_outputs(learner.critics, [2.0, 1.0], [-1.0, 0.0])
    set_net_output(learner.actor, 0.3, math.log(0.5))
    state = learner.rng.get_state()
    assert learner.penalty is not None
    actions, logp = learner.penalty.sample_actions(learner.actor, continuous_batch(), learner.rng)
    assert actions.shape == (6, 3, 1)
    assert actions.abs().max() < 1
    # the first two samples are uniform, with density 1/2; the others have the log-density
    # log N(z) - ln 0.5 - ln(1 - a²), z = (atanh a - 0.3) / 0.5
    z = (actions[2:, :, 0].atanh() - 0.3) / 0.5
    log_density = -0.5 * z**2 - 0.5 * math.log(2 * math.pi) + math.log(2) - torch.log(1 - actions[2:, :, 0] ** 2)
    assert torch.allclose(logp[:2], torch.tensor(-math.log(2)))
    assert torch.allclose(logp[2:], log_density, atol=1e-4)
    learner.rng.set_state(state)
    for k, (slope, constant) in enumerate(((2.0, 1.0), (-1.0, 0.0))):
        logsumexp = (torch.exp(slope * actions[..., 0] + constant) / logp.exp()).mean(0).log()  # [B]
        recorded = slope * torch.tensor([0.5, 0.0, -0.5]) + constant
        learner.rng.set_state(state)
        assert penalty(learner, continuous_batch())[k].item() == pytest.approx(
            (logsumexp - recorded).mean().item(), rel=1e-4
        )


def test_actions_are_sampled_uniformly_and_from_the_policy_in_both_states() -> None:
    learner = make_learner(CONTINUOUS, penalty_samples=200)
    with torch.no_grad():
        learner.actor.layers.linears[0].weight.copy_(torch.tensor([[1.0, 0.0], [0.0, 0.0]]))  # the mean is obs[0]
        learner.actor.layers.linears[0].bias.copy_(torch.tensor([0.0, -3.0]))
    obs, next_obs = torch.tensor([[1.0, 0.0]]).expand(3, 2), torch.tensor([[-1.0, 0.0]]).expand(3, 2)
    assert learner.penalty is not None
    actions, _ = learner.penalty.sample_actions(
        learner.actor, continuous_batch(obs=obs, next_obs=next_obs), learner.rng
    )
    groups = actions.view(3, 200, 3)
    # uniform with std 0.577, then close to tanh 1 = 0.76 and to -0.76
    assert groups.mean((1, 2)).tolist() == pytest.approx([0.0, 0.7616, -0.7616], abs=0.08)
    assert groups[0].std().item() == pytest.approx(3**-0.5, rel=0.1)


def test_penalty_has_no_gradient_of_the_actor() -> None:
    learner = make_learner(CONTINUOUS, net__hidden_sizes=[8])
    loss = penalty(learner, continuous_batch()).sum()
    gradients = torch.autograd.grad(loss, [*learner.actor.parameters()], allow_unused=True)
    assert all(gradient is None for gradient in gradients)


# --- the update ---


@pytest.mark.parametrize("spaces", [DISCRETE, CONTINUOUS])
def test_critic_loss_is_the_sum_of_td_loss_and_weighted_penalty(spaces: Spaces) -> None:
    learner = make_learner(spaces, penalty=2.0, net__hidden_sizes=[8])
    data = batch() if spaces is DISCRETE else continuous_batch()
    state = learner.rng.get_state()
    result = probe(learner, data)
    gradient = result.gradients["critic_optimizer"][0].clone()
    assert set(result.gradients) == {"critic_optimizer", "actor_optimizer"}
    learner.rng.set_state(state)
    td_loss = learner.critic_loss(data)[0]
    penalties = penalty(learner, data)
    loss = td_loss + 2.0 * penalties.sum()
    assert result.metrics["critic_loss"].item() == pytest.approx(loss.item())
    assert result.metrics["penalty"].item() == pytest.approx(penalties.mean().item())
    assert torch.allclose(gradient, learner.critic_optimizer.compute_gradients(loss)[0], atol=1e-6)


def test_update_with_negligible_penalty_equals_sac() -> None:
    data = batch()
    learner = make_learner(penalty=1e-12, entropy_in_targets=True, net__hidden_sizes=[8])
    cfg = zx.config.load(algorithm="sac", env="Acrobot-v1", net__hidden_sizes=[8], alpha=0.5)
    sac = make_sac(cfg, DISCRETE)
    for _ in range(3):
        learner.update(data)
        sac.update(data)
    for name in ("actor", "critics", "target_critics"):
        for p, q in zip(getattr(learner, name).parameters(), getattr(sac, name).parameters(), strict=True):
            assert torch.allclose(p, q, atol=1e-5)


def test_penalty_weight_is_constant_or_moves_the_penalty_to_its_target() -> None:
    learner = make_learner(penalty=3.0)
    learner.update(batch())
    assert learner.update(batch()).metrics["penalty_weight"].item() == pytest.approx(3.0)
    for target, sign in ((0.5, 1), (2.0, -1)):  # the penalty is ln 3 = 1.0986
        learner = make_learner(penalty=3.0, penalty_target=target, lr=1e-2)
        set_critic_outputs(learner.critics, [0.0] * 3, [0.0] * 3)
        assert learner.penalty is not None
        loss = learner.penalty.weight_loss(torch.full((2,), math.log(3)))
        assert loss is not None
        (gradient,) = torch.autograd.grad(loss, [learner.penalty.log_weight])
        assert gradient.item() == pytest.approx(3.0 * (target - math.log(3)))
        learner.update(batch())
        # the first step of Adam changes a weight by the learning rate
        assert learner.penalty.weight.item() == pytest.approx(3.0 * math.exp(sign * 1e-2), rel=1e-5)


def test_targets_include_entropy_only_with_entropy_in_targets() -> None:
    # minima 4, 2, 6, with the mean 4
    for entropy, value in ((False, 4.0), (True, 4.0 + 0.5 * ENTROPY)):
        learner = make_learner(entropy_in_targets=entropy)
        set_critic_outputs(learner.target_critics, [10.0, 2.0, 6.0], [4.0, 8.0, 6.0])
        set_critic_outputs(learner.critics, [10.0, 2.0, 6.0], [4.0, 8.0, 6.0])
        set_net_output(learner.actor, *LOGITS)
        bootstrapped = 1 + 0.9 * value
        assert learner.target_value(batch()).tolist() == pytest.approx([bootstrapped, 1.0, bootstrapped])
        assert learner.value(torch.zeros(1, 2)).tolist() == pytest.approx([value])
        assert learner.actor_loss(batch())[0].item() == pytest.approx(-4.0 - 0.5 * ENTROPY)  # always with entropy
    continuous = make_learner(CONTINUOUS)
    set_critic_outputs(continuous.target_critics, [0.0, 7.0], [0.0, 8.0])
    assert continuous.target_value(continuous_batch()).tolist() == pytest.approx([1 + 0.9 * 7, 1.0, 1 + 0.9 * 7])


def test_policy_stays_near_recorded_actions_unlike_that_of_sac() -> None:
    # recorded actions are from -0.6 to 0.2, with rewards equal to the action, so the critics of SAC extrapolate to 1
    action = torch.linspace(-0.6, 0.2, 64).unsqueeze(-1)
    zeros, ended = torch.zeros(64, 2), torch.ones(64, dtype=torch.bool)
    rows = {"obs": zeros, "next_obs": zeros, "action": action, "reward": action[:, 0], "terminated": ended}
    data = batch(**rows, truncated=~ended, discount=torch.ones(64), index=torch.arange(64))
    modes = []
    for weight in (1e-9, 1.0):
        learner = make_learner(
            CONTINUOUS, net__hidden_sizes=[32], lr=1e-2, alpha=0.01, penalty=weight, penalty_samples=4
        )
        for _ in range(200):
            learner.update(data)
        modes.append(learner.actor(torch.zeros(1, 2)).mode().item())
    assert modes[0] > 0.8
    assert -0.6 < modes[1] < 0.3


# --- rejected settings, state and metrics ---


def test_unsupported_settings_and_spaces_are_rejected() -> None:
    for space in (MultiDiscrete([2, 2]), Box(-np.inf, np.inf, (1,), np.float32)):
        with pytest.raises(UserError, match="cql needs continuous actions in a bounded one-dimensional Box"):
            make_learner(Spaces(OBS, space))
    with pytest.raises(UserError, match=r"cql does not support recurrent networks: set net\.recurrent=none"):
        make_learner(net__recurrent="gru")
    with pytest.raises(UserError, match="cql needs an environment with one agent"):
        make_learner(Spaces(OBS, Discrete(3), num_agents=2))
    with pytest.raises(UserError, match="unknown setting 'penalty'"):
        zx.config.load(algorithm="sac", env="Acrobot-v1", penalty=1.0)


@pytest.mark.parametrize("spaces", [DISCRETE, CONTINUOUS])
def test_restored_learner_continues_identically(spaces: Spaces) -> None:
    data = batch() if spaces is DISCRETE else continuous_batch()
    settings = {"net__hidden_sizes": [8], "alpha": None, "penalty_target": 1.0}
    learner, other = make_learner(spaces, **settings), make_learner(spaces, **settings, seed=9)
    learner.update(data)
    other.load_state_dict(learner.state_dict())
    for _ in range(3):
        first, second = learner.update(data), other.update(data)
        assert set(first.metrics) == set(learner.metrics)
        assert all(torch.equal(first.metrics[name], second.metrics[name]) for name in first.metrics)
    for name in ("actor", "critics", "target_critics", "penalty"):
        assert all_equal(copy_weights(getattr(learner, name)), copy_weights(getattr(other, name)))


def test_only_cql_reports_a_penalty() -> None:
    assert {"penalty", "penalty_weight"} <= set(make_learner().metrics)
    assert "penalty" not in SoftActorCritic.metrics

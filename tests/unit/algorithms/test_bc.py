"""Losses and policies of behavior cloning for all action spaces, with numbers worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from by_hand import CONTINUOUS, DISCRETE, LOGITS, OBS, batch, gradient_of, set_net_output
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete

import zhixing as zx
from zhixing.algorithms.bc import BC
from zhixing.core.batch import Batch
from zhixing.core.policy import Phase
from zhixing.core.spaces import Spaces
from zhixing.errors import UserError
from zhixing.nets.critics import BoundedGaussian


def make_learner(spaces: Spaces = DISCRETE, **settings: Any) -> BC:
    base = {"net__hidden_sizes": []}  # one linear layer
    cfg = zx.config.load(algorithm="bc", env="Acrobot-v1", **(base | settings))
    learner = zx.algorithms.get("bc").make(cfg, spaces)
    assert isinstance(learner, BC)
    return learner


# --- losses ---


def test_discrete_loss_is_the_cross_entropy() -> None:
    learner = make_learner()
    set_net_output(learner.actor, *LOGITS)
    loss = learner.loss(batch())
    # -(ln 1/2 + ln 1/4 + ln 1/4) / 3 = 5/3 ln 2; gradient of the logits: probabilities minus frequencies
    assert loss.item() == pytest.approx(5 / 3 * math.log(2))
    assert gradient_of(loss, learner.actor.layers.linears[0].bias) == pytest.approx([1 / 2 - 1 / 3, -1 / 12, -1 / 12])


def test_loss_ignores_invalid_actions() -> None:
    learner = make_learner()
    set_net_output(learner.actor, *LOGITS)
    mask = torch.tensor([[True, False, True]]).expand(3, 3)
    loss = learner.loss(batch(action=torch.tensor([0, 2, 2]), mask=mask))
    # probabilities 2/3 and 1/3: -(ln 2/3 + 2 ln 1/3) / 3
    assert loss.item() == pytest.approx(math.log(3) - math.log(2) / 3)
    assert gradient_of(loss, learner.actor.layers.linears[0].bias) == pytest.approx([1 / 3, 0.0, -1 / 3])


def test_multi_discrete_loss_is_the_sum_of_cross_entropies() -> None:
    learner = make_learner(Spaces(OBS, MultiDiscrete([2, 3])))
    set_net_output(learner.actor, math.log(0.8), math.log(0.2), *LOGITS)
    loss = learner.loss(batch(action=torch.tensor([[0, 0], [1, 1], [0, 2]])))
    # -ln of 0.8 * 0.5, 0.2 * 0.25 and 0.8 * 0.25
    assert loss.item() == pytest.approx(-(math.log(0.4) + math.log(0.05) + math.log(0.2)) / 3)


def test_continuous_loss_is_the_squared_error() -> None:
    learner = make_learner(CONTINUOUS)
    set_net_output(learner.actor, math.atanh(0.5))
    loss = learner.loss(batch(action=torch.tensor([[0.5], [0.0], [-0.5]])))
    # squares 0, 0.25 and 1; gradient before tanh: (2 * 0.5 + 2 * 1) / 3 times 1 - 0.5²
    assert loss.item() == pytest.approx(1.25 / 3)
    assert gradient_of(loss, learner.actor.layers.linears[0].bias) == pytest.approx([0.75])
    learner = make_learner(Spaces(OBS, Box(-1.0, 1.0, (2,), np.float32)))
    set_net_output(learner.actor, math.atanh(0.5), 0.0)
    # mean over the dimensions of actions: (0.25 + 1 + 0 + 0 + 0.25 + 1) / 6
    data = batch(action=torch.tensor([[0.0, 1.0], [0.5, 0.0], [1.0, -1.0]]))
    assert learner.loss(data).item() == pytest.approx(2.5 / 6)


def test_actions_on_the_bounds_have_a_finite_likelihood() -> None:
    learner = make_learner(CONTINUOUS, likelihood=True)
    set_net_output(learner.actor, 0.0, std=0.5)
    loss = learner.loss(batch(action=torch.tensor([[1.0], [0.0], [-1.0]])))
    # -ln N(a; 0, 0.5) = a² / (2 * 0.25) + ln 0.5 + 0.5 ln 2π, where a² / (2 * 0.25) is 2, 0 and 2
    assert loss.item() == pytest.approx(4 / 3 - math.log(2) + 0.5 * math.log(2 * math.pi))
    set_net_output(learner.actor, 3.0, std=0.01)  # mean near the bound, with the smallest std
    assert learner.loss(batch(action=torch.ones(3, 1))).isfinite()
    loss = learner.loss(batch(action=-torch.ones(3, 1)))
    assert all(math.isfinite(g) for g in gradient_of(loss, learner.actor.log_std_raw))


def test_maximum_likelihood_fits_mean_and_std() -> None:
    learner = make_learner(CONTINUOUS, likelihood=True, lr=3e-2)
    actions = torch.tensor([[0.1], [0.3], [0.5]])  # mean 0.3, standard deviation sqrt(0.08 / 3) = 0.1633
    for _ in range(800):
        learner.update(batch(action=actions))
    policy = learner.actor(torch.zeros(1, 2))
    assert policy.mode().item() == pytest.approx(0.3, abs=0.01)
    assert policy.normal.log_std.exp().item() == pytest.approx(0.1633, rel=0.03)


def test_bounded_gaussian_clips_samples_and_has_the_kl_of_a_gaussian() -> None:
    normal = BoundedGaussian(torch.full((20_000, 1), 0.9), torch.tensor([math.log(0.2)]))
    sample = normal.sample(torch.Generator().manual_seed(0))
    # P(0.9 + 0.2 z > 1) = P(z > 0.5) = 0.3085; three standard errors are 0.01
    assert sample.max().item() == 1.0
    assert (sample == 1.0).float().mean().item() == pytest.approx(0.3085, abs=0.01)
    assert normal.mode()[0].item() == pytest.approx(0.9)
    assert normal.entropy()[0].item() == pytest.approx(0.5 * math.log(2 * math.pi * math.e) + math.log(0.2))
    other = BoundedGaussian(torch.full((20_000, 1), 0.5), torch.tensor([math.log(0.2)]))
    assert normal.kl(other)[0].item() == pytest.approx(0.5 * (0.4 / 0.2) ** 2)  # equal stds


# --- training ---


def test_clones_discrete_actions() -> None:
    learner = make_learner(net__hidden_sizes=[32], lr=1e-2)
    obs = torch.randn(512, 2, generator=torch.Generator().manual_seed(0))
    expert_action = (obs[:, 0] > 0).long() + (obs.sum(-1) > 1).long()
    for _ in range(300):
        learner.update(batch(obs=obs, action=expert_action))
    action = learner.policy.act(obs, None, None, Phase.EVAL, torch.Generator(), 0).action
    assert (action == expert_action).float().mean().item() > 0.95


def test_clones_continuous_actions() -> None:
    learner = make_learner(CONTINUOUS, net__hidden_sizes=[32], lr=1e-2)
    obs = torch.randn(512, 2, generator=torch.Generator().manual_seed(0))
    expert_action = (0.5 * obs[:, :1] - 0.3 * obs[:, 1:].abs()).clamp(-1.0, 1.0)  # variance 0.26
    for _ in range(400):
        learner.update(batch(obs=obs, action=expert_action))
    assert learner.loss(batch(obs=obs, action=expert_action)).item() < 0.005


# --- policies, rejected settings and state ---


def test_continuous_policy_is_deterministic_while_collecting_and_in_evaluations() -> None:
    learner = make_learner(CONTINUOUS)
    set_net_output(learner.actor, math.atanh(0.5))
    rng, obs = torch.Generator().manual_seed(0), torch.zeros(1000, 2)
    for phase in (Phase.COLLECT, Phase.EVAL):
        assert torch.allclose(learner.policy.act(obs, None, None, phase, rng, 0).action, torch.tensor(0.5))
    assert learner.value(obs) is None


def test_discrete_policy_samples_while_collecting_and_takes_the_mode_in_evaluations() -> None:
    learner = make_learner()
    set_net_output(learner.actor, *LOGITS)
    rng, obs = torch.Generator().manual_seed(0), torch.zeros(20_000, 2)
    action = learner.policy.act(obs, None, None, Phase.COLLECT, rng, 0).action
    # three standard errors are 0.011
    assert (action.bincount(minlength=3) / 20_000).tolist() == pytest.approx([0.5, 0.25, 0.25], abs=0.011)
    assert learner.policy.act(obs, None, None, Phase.EVAL, rng, 0).action.unique().tolist() == [0]


def test_loss_of_hybrid_actions_is_the_negative_log_likelihood_of_all_parts() -> None:
    learner = make_learner(Spaces(OBS, Dict({"aim": Box(-1.0, 1.0, (1,)), "tool": Discrete(2)})))
    steps = batch(action=torch.tensor([[1.0, 0.5], [0.0, -0.2], [1.0, 0.9]]))  # tool, aim
    out = learner.actor.layers(steps.obs)
    std = torch.exp(-5 + 5 * learner.actor.log_std_raw.sigmoid())
    choice = torch.log_softmax(out[:, :2], -1)[torch.arange(3), steps.action[:, 0].long()]
    number = torch.distributions.Normal(out[:, 2].tanh(), std).log_prob(steps.action[:, 1])
    assert learner.loss(steps).item() == pytest.approx(-(choice + number).mean().item(), rel=1e-5)


def test_unsupported_settings_and_spaces_are_rejected() -> None:
    with pytest.raises(UserError, match="bc needs continuous actions in a bounded one-dimensional Box"):
        make_learner(Spaces(OBS, Box(-np.inf, np.inf, (1,), np.float32)))
    with pytest.raises(UserError, match=r"bc needs bounded actions; this env has Dict.*: set finite bounds"):
        make_learner(Spaces(OBS, Dict({"aim": Box(-np.inf, np.inf, (1,), np.float32), "tool": Discrete(2)})))
    with pytest.raises(UserError, match=r"bc does not support recurrent networks: set net\.recurrent=none"):
        make_learner(net__recurrent="gru")
    with pytest.raises(UserError, match="bc needs an environment with one agent"):
        make_learner(Spaces(OBS, Discrete(3), num_agents=2))


@pytest.mark.parametrize("likelihood", [False, True])
def test_restored_learner_continues_identically(likelihood: bool) -> None:
    data = batch(action=torch.tensor([[1.0], [0.0], [-0.5]]))
    settings = {"net__hidden_sizes": [8], "likelihood": likelihood}
    learner, other = make_learner(CONTINUOUS, **settings), make_learner(CONTINUOUS, **settings, seed=9)
    learner.update(data)
    other.load_state_dict(learner.state_dict())
    for _ in range(3):
        first, second = learner.update(data), other.update(data)
        assert set(first.metrics) == set(BC.metrics)
        assert all(torch.equal(first.metrics[name], second.metrics[name]) for name in first.metrics)


def test_normalize_obs_normalizes_observations() -> None:
    learner = make_learner(normalize_obs=True)
    learner.update_normalizers(Batch(obs=torch.tensor([[[1.0, 0.0]], [[3.0, 4.0]]])))
    # means 2 and 2, stds 1 and 2
    features = learner.actor.features(torch.tensor([[3.0, 0.0]]))
    assert torch.allclose(features, torch.tensor([[1.0, -1.0]]), atol=1e-5)

"""Actor loss of TD3+BC, with numbers worked out by hand. test_td3.py tests the rest."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from by_hand import set_critic_outputs, set_net_output
from gymnasium.spaces import Box, Discrete
from probe import probe

import zhixing as zx
from zhixing.algorithms.td3 import TD3
from zhixing.core.batch import Batch
from zhixing.core.spaces import Spaces
from zhixing.errors import UserError

OBS = Box(-9.0, 9.0, (2,), np.float32)
SPACES = Spaces(OBS, Box(-1.0, 1.0, (1,), np.float32))


def make_learner(name: str = "td3bc", spaces: Spaces = SPACES, **settings: Any) -> TD3:
    base = {"net__hidden_sizes": [], "target_policy_noise": 0.0, "normalize_obs": False}  # one linear layer each
    cfg = zx.config.load(algorithm=name, env="Acrobot-v1", **(base | settings))
    learner = zx.algorithms.get(name).make(cfg, spaces)
    assert isinstance(learner, TD3)
    return learner


def batch(**fields: Any) -> Batch:
    base = {
        "obs": torch.zeros(3, 2),
        "next_obs": torch.zeros(3, 2),
        "action": torch.tensor([[0.5], [0.0], [-0.5]]),
        "reward": torch.tensor([1.0, 1.0, 1.0]),
        "terminated": torch.tensor([False, True, False]),
        "truncated": torch.tensor([False, False, True]),
        "discount": torch.tensor([0.9, 0.9, 0.9]),
        "index": torch.arange(3),
    }
    return Batch(**{**base, **fields})


def test_actor_loss_by_hand() -> None:
    learner = make_learner(alpha=2.0)
    set_critic_outputs(learner.critics, (3.0, 1.0), (-5.0, 0.0))
    set_net_output(learner.actor, math.atanh(0.5))
    loss = learner.actor_loss(batch())
    # first critic: Q = 3 * 0.5 + 1 = 2.5, so λ = 2 / 2.5 = 0.8: (0 + 0.25 + 1) / 3 - 0.8 * 2.5
    assert loss.item() == pytest.approx(1.25 / 3 - 2.0)
    (gradient,) = torch.autograd.grad(loss, [learner.actor.layers.linears[0].bias])
    # 2 (0 + 0.5 + 1) / 3 = 1 of the squared error, 0.8 * 3 = 2.4 of Q; λ has no gradient
    assert gradient.item() == pytest.approx((1 - 2.4) * (1 - 0.25))


def test_actor_gradient_is_independent_of_the_scale_of_rewards() -> None:
    gradients = []
    for scale in (1.0, -1.0, 1000.0):
        learner = make_learner()
        set_critic_outputs(learner.critics, (abs(scale) * 3.0, scale), (0.0, 0.0))
        set_net_output(learner.actor, math.atanh(0.0))
        gradients += torch.autograd.grad(learner.actor_loss(batch()), [learner.actor.layers.linears[0].bias])
    # |Q| = |scale| at the action 0: 2.5 / |scale| * 3 |scale|
    assert [g.item() for g in gradients] == pytest.approx([-7.5] * 3)


def test_actor_loss_is_finite_for_zero_q_values() -> None:
    learner = make_learner()
    set_critic_outputs(learner.critics, (0.0, 0.0), (0.0, 0.0))
    assert learner.actor_loss(batch()).isfinite()


def test_cloning_loss_is_the_mean_over_action_dimensions() -> None:
    learner = make_learner(spaces=Spaces(OBS, Box(-1.0, 1.0, (2,), np.float32)), alpha=1.0)
    set_critic_outputs(learner.critics, (0.0, 2.0), (0.0, 2.0))
    set_net_output(learner.actor, math.atanh(0.5))
    data = batch(action=torch.tensor([[0.0, 1.0], [0.5, 0.5], [1.0, -0.5]]))
    # (0.25 + 0.25 + 0 + 0 + 0.25 + 1) / 6 - 1 / 2 * 2
    assert learner.actor_loss(data).item() == pytest.approx(1.75 / 6 - 1.0)


def test_critic_optimizer_uses_only_the_critic_loss() -> None:
    learner = make_learner(net__hidden_sizes=[8], policy_delay=1)
    result = probe(learner, batch())
    assert set(result.gradients) == {"critic_optimizer", "actor_optimizer"}
    gradient = result.gradients["critic_optimizer"][0].clone()
    assert torch.equal(gradient, learner.critic_optimizer.compute_gradients(learner.critic_loss(batch())[0])[0])


def test_targets_equal_those_of_td3() -> None:
    learner = make_learner()
    set_critic_outputs(learner.target_critics, (2.0, 10.0), (4.0, 8.0))  # 11 and 10 for the action 0.5
    set_net_output(learner.target_actor, math.atanh(0.5))
    assert learner.target_value(batch()).tolist() == pytest.approx([10.0, 1.0, 10.0])


def test_alpha_determines_the_distance_from_recorded_actions() -> None:
    # one state, recorded actions uniform from -1 to 0.6, rewards 1 - (a - 0.3)². With λ ≈ α, the minimum of the loss
    # (π + 0.2)² - α (1 - (π - 0.3)²) is at π = (0.3 α - 0.2) / (1 + α)
    action = torch.linspace(-1.0, 0.6, 128).unsqueeze(-1)
    zeros, ended = torch.zeros(128, 2), torch.ones(128, dtype=torch.bool)
    rows = {"obs": zeros, "next_obs": zeros, "action": action, "reward": 1 - (action[:, 0] - 0.3).square()}
    data = batch(**rows, terminated=ended, truncated=~ended, discount=torch.ones(128), index=torch.arange(128))
    for alpha in (1e-3, 0.5, 2.5):
        learner = make_learner(alpha=alpha, net__hidden_sizes=[32], lr=1e-2)
        for _ in range(600):
            learner.update(data)
        expected = (0.3 * alpha - 0.2) / (1 + alpha)  # -0.2, -0.03 and 0.16
        assert learner.actor(torch.zeros(1, 2)).item() == pytest.approx(expected, abs=0.07)


def test_observations_are_normalized_by_default() -> None:
    cfg = zx.config.load(algorithm="td3bc", env="Acrobot-v1", net__hidden_sizes=[])
    learner = zx.algorithms.get("td3bc").make(cfg, SPACES)
    learner.update_normalizers(Batch(obs=torch.tensor([[[1.0, 0.0]], [[3.0, 4.0]]])))
    # means 2 and 2, stds 1 and 2
    for net in (learner.actor, learner.critics, learner.target_actor, learner.target_critics):
        assert torch.allclose(net.features(torch.tensor([[3.0, 0.0]])), torch.tensor([[1.0, -1.0]]), atol=1e-5)
    assert learner.cfg.alpha == 2.5


def test_unsupported_settings_and_spaces_are_rejected() -> None:
    with pytest.raises(UserError, match="td3bc needs continuous actions in a bounded one-dimensional Box"):
        make_learner(spaces=Spaces(OBS, Discrete(3)))
    with pytest.raises(UserError, match=r"td3bc does not support recurrent networks: set net\.recurrent=none"):
        make_learner(net__recurrent="gru")
    with pytest.raises(UserError, match="unknown setting: `alpha`"):
        make_learner("td3", alpha=1.0)

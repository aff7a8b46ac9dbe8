"""Quantile Huber loss, targets and priorities of QR-DQN, with numbers worked out by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete
from probe import probe

import zhixing as zx
from zhixing.algorithms.qrdqn import QRDQN
from zhixing.core.batch import Batch
from zhixing.core.policy import Phase
from zhixing.core.spaces import Spaces
from zhixing.errors import UserError
from zhixing.ops.losses import quantile_huber_loss

SPACES = Spaces(Box(-9.0, 9.0, (3,), np.float32), Discrete(2))


def make_learner(**settings: Any) -> QRDQN:
    settings = {"net__hidden_sizes": [8], "quantiles": 2} | settings
    learner = zx.algorithms.get("qrdqn").make(zx.config.load(algorithm="qrdqn", env="Acrobot-v1", **settings), SPACES)
    assert isinstance(learner, QRDQN)
    return learner


def set_outputs(qrdqn: QRDQN, net: list[list[float]], target: list[list[float]]) -> None:
    """Make both networks return these quantiles `[n,quantiles]` for any observation."""
    with torch.no_grad():
        for module, quantiles in ((qrdqn.net, net), (qrdqn.target_net, target)):
            linear: Any = module.head.linear
            linear.weight.zero_()
            linear.bias.copy_(torch.tensor(quantiles).flatten())


def batch(**fields: Any) -> Batch:
    base = {
        "obs": torch.zeros(3, 3),
        "next_obs": torch.zeros(3, 3),
        "action": torch.tensor([0, 0, 0]),
        "reward": torch.tensor([1.0, 1.0, 1.0]),
        "terminated": torch.tensor([False, True, False]),
        "truncated": torch.tensor([False, False, True]),
        "discount": torch.tensor([0.5, 0.5, 0.5]),
        "index": torch.arange(3),
    }
    return Batch(**{**base, **fields})


# --- the loss ---


def loss(quantiles: list[float], targets: list[float], kappa: float = 1.0) -> float:
    return quantile_huber_loss(torch.tensor([quantiles]), torch.tensor([targets]), kappa).item()


def test_loss_of_one_quantile_is_half_the_huber_loss() -> None:
    # the weight is τ = ½ on both sides. Huber loss: ½ · 0.6² = 0.18, and linear beyond 1: 3 - ½ = 2.5
    assert loss([1.0], [1.6]) == pytest.approx(0.5 * 0.18)
    assert loss([1.0], [-2.0]) == pytest.approx(0.5 * 2.5)


def test_quantile_huber_loss_by_hand() -> None:
    # τ = ¼, ¾. Estimate 0: errors 2 and -0.5, Huber losses 1.5 and 0.125: (¼ · 1.5 + ¾ · 0.125) / 2 = 0.234375
    # estimate 4: errors -2 and -4.5, weight 1 - ¾, Huber losses 1.5 and 4: ¼ · (1.5 + 4) / 2 = 0.6875
    assert loss([0.0, 4.0], [2.0, -0.5]) == pytest.approx(0.234375 + 0.6875)


def test_loss_is_linear_beyond_kappa() -> None:
    # κ = 2, error 3: ½ · 2 · (3 - 1) = 2; error 1.5: ½ · ½ · 1.5² = 0.5625
    assert loss([0.0], [3.0], kappa=2.0) == pytest.approx(2.0)
    assert loss([0.0], [1.5], kappa=2.0) == pytest.approx(0.5625)


def test_number_of_targets_may_exceed_that_of_quantiles() -> None:
    # errors 1, 2, 3, Huber losses 0.5, 1.5, 2.5: ½ times the mean 1.5
    assert loss([0.0], [1.0, 2.0, 3.0]) == pytest.approx(0.75)


def test_minimum_of_the_loss_is_at_the_quantiles() -> None:
    # the quantiles 1/8, 3/8, 5/8, 7/8 of 0..99 are about 12, 37, 62, 87; a small κ changes them little
    targets = torch.arange(100.0)[None]
    theta = torch.zeros(1, 4, requires_grad=True)
    optimizer = torch.optim.Adam([theta], lr=1.0)
    for _ in range(600):
        optimizer.zero_grad()
        quantile_huber_loss(theta, targets, 0.1).sum().backward()
        optimizer.step()
    assert theta[0].tolist() == pytest.approx([12.0, 37.0, 62.0, 87.0], abs=1.5)


# --- the learner ---


def test_targets_by_hand() -> None:
    qrdqn = make_learner()
    set_outputs(qrdqn, net=[[100.0, 100.0], [0.0, 0.0]], target=[[-10.0, 10.0], [2.0, 6.0]])
    # the action with the highest mean has quantiles 2 and 6: 1 + ½ · 2, 1 + ½ · 6; terminated: 1; truncated bootstraps
    assert qrdqn.target_quantiles(batch(), batch()).tolist() == [[2.0, 4.0], [1.0, 1.0], [2.0, 4.0]]
    # if this action is invalid, the other has quantiles -10 and 10: 1 - 5, 1 + 5
    data = batch(next_mask=torch.tensor([[True, False]]).expand(3, 2))
    assert qrdqn.target_quantiles(data, data).tolist() == [[-4.0, 6.0], [1.0, 1.0], [-4.0, 6.0]]


def test_targets_use_the_discount_of_each_row() -> None:
    qrdqn = make_learner()
    set_outputs(qrdqn, net=[[0.0, 0.0]] * 2, target=[[8.0, 16.0], [0.0, 0.0]])
    data = batch(discount=torch.tensor([0.5, 0.5, 0.125]))
    assert qrdqn.target_quantiles(data, data).tolist() == [[5.0, 9.0], [1.0, 1.0], [2.0, 3.0]]


def test_loss_weights_and_priorities_by_hand() -> None:
    qrdqn = make_learner()
    set_outputs(qrdqn, net=[[0.0, 4.0], [0.0, 0.0]], target=[[2.0, 6.0], [0.0, 0.0]])
    result = probe(qrdqn, batch())
    # targets 2, 4 | 1, 1 | 2, 4 and estimates 0 (τ = ¼) and 4 (τ = ¾)
    # first row: errors 2, 4 of estimate 0: ¼ · (1.5 + 3.5) / 2 = 0.625; -2, 0 of estimate 4: ¼ · 1.5 / 2 = 0.1875
    # second row: error 1 of estimate 0: ¼ · 0.5 = 0.125; error -3 of estimate 4: ¼ · 2.5 = 0.625
    losses = [0.8125, 0.75, 0.8125]
    assert result.metrics["loss"].item() == pytest.approx(sum(losses) / 3)
    assert result.metrics["q_mean"].item() == pytest.approx(2.0)
    # mean targets 3, 1, 3, mean estimate 2
    assert result.priority is not None
    assert result.priority.tolist() == pytest.approx([1.0, 1.0, 1.0])
    weighted = probe(qrdqn, batch(weight=torch.tensor([1.0, 0.5, 0.1])))
    assert weighted.metrics["loss"].item() == pytest.approx((0.8125 + 0.375 + 0.08125) / 3)


def test_learns_the_distribution_and_not_only_its_mean() -> None:
    # rewards -1 and 1 are equally likely: one quantile for each, with mean 0
    qrdqn = make_learner(lr=1e-2, kappa=0.1)
    rng = torch.Generator().manual_seed(0)
    ended = torch.ones(64, dtype=torch.bool)
    for _ in range(400):
        reward = torch.randint(0, 2, (64,), generator=rng) * 2.0 - 1.0
        data = Batch(
            obs=torch.zeros(64, 3),
            next_obs=torch.zeros(64, 3),
            action=torch.zeros(64, dtype=torch.long),
            reward=reward,
            terminated=ended,
            truncated=~ended,
            discount=torch.ones(64),
            index=torch.arange(64),
        )
        qrdqn.update(data)
    assert qrdqn.net(torch.zeros(1, 3))[0][0, 0].tolist() == pytest.approx([-1.0, 1.0], abs=0.15)


def test_policy_and_value_use_the_highest_mean() -> None:
    qrdqn = make_learner()
    set_outputs(qrdqn, net=[[-10.0, 10.0], [1.0, 2.0]], target=[[0.0, 0.0]] * 2)
    obs, rng = torch.zeros(2, 3), torch.Generator().manual_seed(0)
    assert qrdqn.policy.act(obs, None, None, Phase.EVAL, rng, 0).action.tolist() == [1, 1]
    mask = torch.tensor([[True, False], [True, True]])
    assert qrdqn.policy.act(obs, None, mask, Phase.EVAL, rng, 0).action.tolist() == [0, 1]
    assert qrdqn.value(obs).tolist() == [1.5, 1.5]


def test_weights_can_be_loaded_into_another_policy() -> None:
    qrdqn, other = make_learner(target_update_interval=2), make_learner(seed=9)
    for _ in range(3):
        qrdqn.update(batch())
    assert not torch.equal(qrdqn.net.head.linear.weight, qrdqn.target_net.head.linear.weight)
    other.policy.load_state_dict(qrdqn.policy.state_dict())
    x = torch.randn(4, 3)
    assert torch.equal(other.value(x), qrdqn.value(x))


def test_unsupported_settings_and_action_spaces_are_rejected() -> None:
    cfg = zx.config.load(algorithm="qrdqn", env="Acrobot-v1")
    with pytest.raises(UserError, match=r"qrdqn needs Discrete actions, but this env has"):
        QRDQN(cfg, Spaces(SPACES.obs, Box(-1.0, 1.0, (1,), np.float32)))
    with pytest.raises(UserError, match=r"set replay\.n_step=1"):
        make_learner(net__recurrent="gru", replay__n_step=3)

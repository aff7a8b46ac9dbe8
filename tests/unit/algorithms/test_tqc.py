"""Truncated mixtures, targets, losses and updates of TQC, with numbers worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from by_hand import (
    CONTINUOUS,
    DISCRETE,
    all_equal,
    batch,
    check_polyak_update,
    copy_weights,
    gradient_of,
    next_noise,
    set_net_output,
)
from probe import probe

import zhixing as zx
from zhixing.algorithms.tqc import TQC, TQCConfig
from zhixing.core.batch import Batch
from zhixing.core.spaces import Spaces
from zhixing.errors import UserError


def make_learner(spaces: Spaces = CONTINUOUS, **settings: Any) -> TQC:
    base = {"net__hidden_sizes": [], "critic_hidden_sizes": [], "alpha": 0.5}  # one linear layer each
    base |= {"critics": 2, "quantiles": 3, "dropped_quantiles": 1}
    cfg = zx.config.load(algorithm="tqc", env="Acrobot-v1", **(base | settings))
    assert isinstance(cfg, TQCConfig)
    return TQC(cfg, spaces)


def set_quantiles(critics: Any, *rows: list[float], slopes: tuple[float, ...] = (0.0, 0.0)) -> None:
    """Set the quantiles of each critic for the action 0, and by how much an action of 1 raises all of them."""
    with torch.no_grad():
        critics.towers.weights[0].zero_()
        for k, (row, slope) in enumerate(zip(rows, slopes, strict=True)):
            critics.towers.weights[0][k, -1] = slope  # inputs are [obs, obs, action]
            critics.towers.biases[0][k, 0] = torch.tensor(row)


def steps(**fields: Any) -> Batch:
    return batch(**({"action": torch.tensor([[0.5], [0.0], [-0.5]])} | fields))


def test_largest_quantiles_of_all_critics_together_are_dropped() -> None:
    learner = make_learner()
    z = torch.tensor([[[5.0, 1.0, 9.0]], [[7.0, 6.0, 8.0]]])  # [2,1,3]
    # sorted 1 5 6 7 8 9; two critics drop one quantile each: the two largest, both of them from the mixture
    assert learner.truncate(z).tolist() == [[1.0, 5.0, 6.0, 7.0]]


def test_targets_are_the_remaining_quantiles_with_entropy() -> None:
    learner = make_learner()
    set_quantiles(learner.target_critics, [5.0, 1.0, 9.0], [7.0, 6.0, 8.0], slopes=(2.0, 2.0))
    set_quantiles(learner.critics, [99.0] * 3, [99.0] * 3)  # not used
    set_net_output(learner.actor, 0.3, math.log(0.5))
    z = next_noise(learner)[:, 0]
    action = torch.tanh(0.3 + 0.5 * z)
    logp = -0.5 * z**2 - 0.5 * math.log(2 * math.pi) + math.log(2) - torch.log(1 - action**2)
    remaining = torch.tensor([1.0, 5.0, 6.0, 7.0]) + 2 * action[:, None]
    # 1 + 0.9 (quantile - 0.5 log π); terminated: 1; truncated bootstraps
    expected = 1 + 0.9 * (remaining - 0.5 * logp[:, None]) * torch.tensor([[1.0], [0.0], [1.0]])
    torch.testing.assert_close(learner.target_quantiles(steps()), expected, rtol=1e-5, atol=1e-5)


def test_critic_loss_is_the_mean_quantile_huber_loss() -> None:
    learner = make_learner(quantiles=2, dropped_quantiles=1, alpha=1e-9)
    set_quantiles(learner.critics, [0.0, 2.0], [1.0, 1.0])
    set_quantiles(learner.target_critics, [3.0, 8.0], [5.0, 8.0])
    data = steps(reward=torch.zeros(3), discount=torch.ones(3), terminated=torch.zeros(3, dtype=torch.bool))
    loss, error, q_mean = learner.critic_loss(data)
    # targets 3 and 5; quantiles at τ = 1/4 and 3/4; huber(u) = |u| - 1/2 beyond 1; all targets are above
    # critic 1: 1/4 (2.5 + 4.5) / 2 = 0.875 for 0, 3/4 (0.5 + 2.5) / 2 = 1.125 for 2: mean 1
    # critic 2: 1/4 (1.5 + 3.5) / 2 = 0.625 for 1, 3/4 (1.5 + 3.5) / 2 = 1.875 for 1: mean 1.25
    assert loss.item() == pytest.approx((1.0 + 1.25) / 2, rel=1e-5)
    assert error.tolist() == pytest.approx([3.0] * 3, rel=1e-5)  # mean 4 of the targets, 1 of the quantiles
    assert q_mean.item() == pytest.approx(1.0)


def test_targets_below_a_quantile_have_the_opposite_weight() -> None:
    learner = make_learner(critics=1, quantiles=2, dropped_quantiles=1, alpha=1e-9)
    set_quantiles(learner.critics, [6.0, 6.0], slopes=(0.0,))
    set_quantiles(learner.target_critics, [3.0, 8.0], slopes=(0.0,))
    data = steps(reward=torch.zeros(3), discount=torch.ones(3), terminated=torch.zeros(3, dtype=torch.bool))
    # one target, 3, is 3 below: (1 - 1/4) 2.5 and (1 - 3/4) 2.5, mean 1.25
    assert learner.critic_loss(data)[0].item() == pytest.approx(1.25, rel=1e-5)
    gradient = gradient_of(learner.critic_loss(data)[0], learner.critics.towers.biases[0])
    assert gradient == pytest.approx([0.75 / 2, 0.25 / 2], rel=1e-5)  # the slope of huber is 1; half by the mean


def test_importance_weights_scale_losses_but_not_priorities() -> None:
    learner = make_learner(alpha=1e-9)
    set_quantiles(learner.critics, [0.0] * 3, [0.0] * 3)
    ended, weight = torch.ones(3, dtype=torch.bool), torch.tensor([1.0, 0.5, 0.1])
    plain, weighted = probe(learner, steps(terminated=ended)), probe(learner, steps(terminated=ended, weight=weight))
    ratio = weighted.metrics["critic_loss"] / plain.metrics["critic_loss"]  # all three losses are equal
    assert ratio.item() == pytest.approx(1.6 / 3)
    assert weighted.priority is not None
    assert weighted.priority.tolist() == pytest.approx([1.0] * 3)


def test_actor_maximizes_the_mean_of_all_quantiles() -> None:
    learner = make_learner()
    set_quantiles(learner.critics, [0.0, 1.0, 2.0], [3.0, 4.0, 5.0], slopes=(6.0, -4.0))
    set_net_output(learner.actor, 0.3, math.log(0.01))
    z = next_noise(learner)[:, 0]
    action = torch.tanh(0.3 + 0.01 * z)
    logp = -0.5 * z**2 - 0.5 * math.log(2 * math.pi) - math.log(0.01) - torch.log(1 - action**2)
    loss, entropy = learner.actor_loss(steps())
    # means 1 + 6 a and 4 - 4 a
    assert loss.item() == pytest.approx((0.5 * logp - (2.5 + action)).mean().item(), rel=1e-5)
    assert entropy.item() == pytest.approx(-logp.mean().item(), rel=1e-5)
    assert learner.value(torch.zeros(1, 2)).item() == pytest.approx(2.5 + math.tanh(0.3), rel=1e-5)


def test_updates_move_all_parts_and_average_the_targets() -> None:
    learner = make_learner(net__hidden_sizes=[8], critic_hidden_sizes=[8], alpha=None, tau=0.1)
    start, actor, alpha = copy_weights(learner.target_critics), copy_weights(learner.actor), learner.alpha.item()
    update = learner.update(steps())
    assert set(update.metrics) == set(TQC.metrics)
    check_polyak_update(learner.target_critics, start, learner.critics, tau=0.1)
    assert not all_equal(actor, copy_weights(learner.actor))
    assert alpha != learner.alpha.item()


def test_quantiles_converge_to_the_distribution_of_the_reward() -> None:
    learner = make_learner(critic_hidden_sizes=[8], critics=1, quantiles=4, dropped_quantiles=0, lr=1e-2)
    reward = torch.tensor([0.0, 2.0, 4.0, 6.0])  # equally likely
    never, obs = torch.zeros(4, dtype=torch.bool), torch.zeros(4, 2)
    data = Batch(
        obs=obs,
        next_obs=obs,
        action=torch.zeros(4, 1),
        reward=reward,
        terminated=~never,
        truncated=never,
        discount=torch.ones(4),
        index=torch.arange(4),
    )
    for _ in range(1_500):
        learner.update(data)
    theta = learner.critics(data.obs[:1], data.action[:1]).flatten().sort().values
    # the fractions 1/8, 3/8, 5/8 and 7/8 lie in the middle of the four values; huber smooths within 1
    assert theta.tolist() == pytest.approx([0.0, 2.0, 4.0, 6.0], abs=1.0)
    assert (theta[1:] - theta[:-1]).min().item() > 0.5


def test_invalid_settings_and_spaces_are_rejected() -> None:
    with pytest.raises(UserError, match="dropped_quantiles=3 must be less than quantiles=3"):
        make_learner(dropped_quantiles=3)
    with pytest.raises(UserError, match="tqc needs continuous actions in a bounded one-dimensional Box"):
        make_learner(DISCRETE)
    with pytest.raises(UserError, match=r"tqc does not support recurrent networks: set net\.recurrent=none"):
        make_learner(net__recurrent="lstm")


def test_single_quantile_per_critic_is_allowed() -> None:
    learner = make_learner(quantiles=1, dropped_quantiles=0)
    assert learner.critics(torch.zeros(5, 2), torch.zeros(5, 1)).shape == (2, 5, 1)
    learner.update(steps())


def test_restored_learner_continues_identically() -> None:
    learner, other = make_learner(net__hidden_sizes=[8]), make_learner(net__hidden_sizes=[8], seed=9)
    learner.update(steps())
    other.load_state_dict(learner.state_dict())
    for _ in range(3):
        first, second = learner.update(steps()), other.update(steps())
        assert all(torch.equal(first.metrics[name], second.metrics[name]) for name in first.metrics)

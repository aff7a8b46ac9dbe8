"""QR-DQN: the quantile Huber loss, targets and priorities by hand."""

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


def learner(**settings: Any) -> QRDQN:
    settings = {"net__hidden_sizes": [8], "quantiles": 2} | settings
    made = zx.algorithms.get("qrdqn").make(zx.config.load(algorithm="qrdqn", env="Acrobot-v1", **settings), SPACES)
    assert isinstance(made, QRDQN)
    return made


def table(qrdqn: QRDQN, net: list[list[float]], target: list[list[float]]) -> None:
    """Let the network and its target give these quantiles [n,quantiles] for every observation."""
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


def test_quantile_huber_of_one_quantile_is_half_the_huber_loss() -> None:
    # τ = ½ on both sides. Huber: ½ · 0.6² = 0.18; beyond 1 linear: 3 - ½ = 2.5
    assert loss([1.0], [1.6]) == pytest.approx(0.5 * 0.18)
    assert loss([1.0], [-2.0]) == pytest.approx(0.5 * 2.5)


def test_quantile_huber_by_hand() -> None:
    # τ = ¼, ¾. Quantile 0: errors 2 and -0.5, huber 1.5 and 0.125: (¼ · 1.5 + ¾ · 0.125) / 2 = 0.234375
    # quantile 4: errors -2 and -4.5, both below it (1 - ¾): huber 1.5 and 4: ¼ · (1.5 + 4) / 2 = 0.6875
    assert loss([0.0, 4.0], [2.0, -0.5]) == pytest.approx(0.234375 + 0.6875)


def test_kappa_is_where_errors_become_linear() -> None:
    # an error of 3 with κ = 2: 2 · (3 - 1) = 4, times ½; within κ: ½ · 1.5² = 1.125
    assert loss([0.0], [3.0], kappa=2.0) == pytest.approx(2.0)
    assert loss([0.0], [1.5], kappa=2.0) == pytest.approx(0.5625)


def test_targets_may_be_more_than_quantiles() -> None:
    # errors 1, 2, 3, huber 0.5, 1.5, 2.5: the mean 1.5, times ½
    assert loss([0.0], [1.0, 2.0, 3.0]) == pytest.approx(0.75)


def test_the_loss_is_least_at_the_quantiles() -> None:
    # of 0..99 the quantiles 1/8, 3/8, 5/8, 7/8 are about 12, 37, 62, 87; a small κ hardly smooths them
    outcomes = torch.arange(100.0)[None]
    theta = torch.zeros(1, 4, requires_grad=True)
    optimizer = torch.optim.Adam([theta], lr=1.0)
    for _ in range(600):
        optimizer.zero_grad()
        quantile_huber_loss(theta, outcomes, 0.1).sum().backward()
        optimizer.step()
    assert theta[0].tolist() == pytest.approx([12.0, 37.0, 62.0, 87.0], abs=1.5)


# --- the learner ---


def test_targets_by_hand() -> None:
    qrdqn = learner()
    table(qrdqn, net=[[100.0, 100.0], [0.0, 0.0]], target=[[-10.0, 10.0], [2.0, 6.0]])
    # the target's best mean is 4, of 2 and 6: 1 + ½ · 2, 1 + ½ · 6; death: 1; truncation bootstraps
    assert qrdqn.target_quantiles(batch(), batch()).tolist() == [[2.0, 4.0], [1.0, 1.0], [2.0, 4.0]]
    # where that action is forbidden the other's remain: 1 - 5, 1 + 5
    shown = batch(next_mask=torch.tensor([[True, False]]).expand(3, 2))
    assert qrdqn.target_quantiles(shown, shown).tolist() == [[-4.0, 6.0], [1.0, 1.0], [-4.0, 6.0]]


def test_n_step_targets_use_their_own_discount() -> None:
    qrdqn = learner()
    table(qrdqn, net=[[0.0, 0.0]] * 2, target=[[8.0, 16.0], [0.0, 0.0]])
    shown = batch(discount=torch.tensor([0.5, 0.5, 0.125]))
    assert qrdqn.target_quantiles(shown, shown).tolist() == [[5.0, 9.0], [1.0, 1.0], [2.0, 3.0]]


def test_loss_weights_and_priorities_by_hand() -> None:
    qrdqn = learner()
    table(qrdqn, net=[[0.0, 4.0], [0.0, 0.0]], target=[[2.0, 6.0], [0.0, 0.0]])
    found = probe(qrdqn, batch())
    # targets 2, 4 | 1, 1 | 2, 4 as above, against 0 (τ ¼) and 4 (τ ¾).
    # first: errors 2, 4 of quantile 0: ¼ · (1.5 + 3.5) / 2 = 0.625; -2, 0 of quantile 4: ¼ · 1.5 / 2 = 0.1875
    # second: 1 of quantile 0: ¼ · 0.5 = 0.125; -3 of quantile 4: ¼ · 2.5 = 0.625
    losses = [0.8125, 0.75, 0.8125]
    assert found.metrics["loss"].item() == pytest.approx(sum(losses) / 3)
    assert found.metrics["q_mean"].item() == pytest.approx(2.0)
    # means 3, 1, 3 against 2
    assert found.priority is not None
    assert found.priority.tolist() == pytest.approx([1.0, 1.0, 1.0])
    weighted = probe(qrdqn, batch(weight=torch.tensor([1.0, 0.5, 0.1])))
    assert weighted.metrics["loss"].item() == pytest.approx((0.8125 + 0.375 + 0.08125) / 3)


def test_it_learns_the_distribution_not_only_its_mean() -> None:
    """Rewards of -1 and 1 with equal chance: one quantile each, and a mean of 0."""
    qrdqn = learner(lr=1e-2, kappa=0.1)
    rng = torch.Generator().manual_seed(0)
    ended = torch.ones(64, dtype=torch.bool)
    for _ in range(400):
        reward = torch.randint(0, 2, (64,), generator=rng) * 2.0 - 1.0
        shown = Batch(
            obs=torch.zeros(64, 3),
            next_obs=torch.zeros(64, 3),
            action=torch.zeros(64, dtype=torch.long),
            reward=reward,
            terminated=ended,
            truncated=~ended,
            discount=torch.ones(64),
            index=torch.arange(64),
        )
        qrdqn.update(shown)
    assert qrdqn.net(torch.zeros(1, 3))[0][0, 0].tolist() == pytest.approx([-1.0, 1.0], abs=0.15)


def test_actions_and_values_are_those_of_the_highest_mean() -> None:
    qrdqn = learner()
    table(qrdqn, net=[[-10.0, 10.0], [1.0, 2.0]], target=[[0.0, 0.0]] * 2)
    obs, rng = torch.zeros(2, 3), torch.Generator().manual_seed(0)
    assert qrdqn.policy.act(obs, None, None, Phase.EVAL, rng, 0).action.tolist() == [1, 1]
    mask = torch.tensor([[True, False], [True, True]])
    assert qrdqn.policy.act(obs, None, mask, Phase.EVAL, rng, 0).action.tolist() == [0, 1]
    assert qrdqn.value(obs).tolist() == [1.5, 1.5]


def test_weights_go_to_another_policy() -> None:
    qrdqn, other = learner(target_update_interval=2), learner(seed=9)
    for _ in range(3):
        qrdqn.update(batch())
    assert not torch.equal(qrdqn.net.head.linear.weight, qrdqn.target_net.head.linear.weight)
    other.policy.load_state_dict(qrdqn.policy.state_dict())
    x = torch.randn(4, 3)
    assert torch.equal(other.value(x), qrdqn.value(x))


def test_what_it_cannot_do_is_refused_by_name() -> None:
    cfg = zx.config.load(algorithm="qrdqn", env="Acrobot-v1")
    with pytest.raises(UserError, match=r"qrdqn needs Discrete actions, but this env has"):
        QRDQN(cfg, Spaces(SPACES.obs, Box(-1.0, 1.0, (1,), np.float32)))
    with pytest.raises(UserError, match=r"set replay\.n_step=1"):
        learner(net__recurrent="gru", replay__n_step=3)

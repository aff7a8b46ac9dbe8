"""Targets of Munchausen DQN, with numbers worked out by hand: bonus, its limit, soft value, episode ends and masks."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete

import zhixing as zx
from zhixing.algorithms.munchausen_dqn import MunchausenDQN
from zhixing.core.batch import Batch
from zhixing.core.spaces import Spaces

SPACES = Spaces(Box(-9.0, 9.0, (3,), np.float32), Discrete(2))
# The target network's Q-values are 1 and 2 in all states. At temperature 1 the policy is e / (e + e²) = 0.26894 and
# 0.73106, the log-policy -1.31326 and -0.31326, and the soft value log(e + e²) = 2.31326.
LOGP, SOFT = (-1.3132617, -0.3132617), 2.3132617


def make_learner(**settings: Any) -> MunchausenDQN:
    cfg = zx.config.load(algorithm="munchausen_dqn", env="Acrobot-v1", **({"temperature": 1.0} | settings))
    learner = zx.algorithms.get("munchausen_dqn").make(cfg, SPACES)
    assert isinstance(learner, MunchausenDQN)
    with torch.no_grad():
        for net, values in ((learner.net, [0.5, 3.0]), (learner.target_net, [1.0, 2.0])):
            net.head.weight.zero_()
            net.head.bias.copy_(torch.tensor(values))
    return learner


def batch(**fields: Any) -> Batch:
    base = {
        "obs": torch.zeros(3, 3),
        "next_obs": torch.zeros(3, 3),
        "action": torch.tensor([0, 1, 1]),
        "reward": torch.tensor([1.0, 1.0, 1.0]),
        "terminated": torch.tensor([False, True, False]),
        "truncated": torch.tensor([False, False, True]),
        "discount": torch.tensor([0.9, 0.9, 0.81]),
        "index": torch.arange(3),
    }
    return Batch(**{**base, **fields})


def targets(learner: MunchausenDQN, data: Batch) -> list[float]:
    return learner.target_value(data, data).tolist()


def test_constants_above_are_correct() -> None:
    total = math.exp(1) + math.exp(2)
    assert math.log(total) == pytest.approx(SOFT)
    assert (1 - math.log(total), 2 - math.log(total)) == pytest.approx(LOGP)


def test_targets_add_the_log_policy_and_the_soft_value_except_after_termination() -> None:
    expected = [1 + 0.5 * LOGP[0] + 0.9 * SOFT, 1 + 0.5 * LOGP[1], 1 + 0.5 * LOGP[1] + 0.81 * SOFT]
    assert targets(make_learner(bonus=0.5, bonus_limit=2.0), batch()) == pytest.approx(expected)


def test_bonus_is_clipped_at_its_limit() -> None:
    assert targets(make_learner(bonus=1.0, bonus_limit=1.0), batch())[0] == pytest.approx(1 - 1.0 + 0.9 * SOFT)


def test_targets_without_bonus_at_low_temperature_equal_dqn() -> None:
    learner = make_learner(bonus=0.0, temperature=1e-3)
    assert targets(learner, batch()) == pytest.approx([1 + 0.9 * 2, 1, 1 + 0.81 * 2])


def test_invalid_actions_have_zero_probability() -> None:
    mask = torch.tensor([[True, False]]).expand(3, 2)
    data = batch(action=torch.zeros(3, dtype=torch.long), mask=mask, next_mask=mask)
    # the only valid action has the value 1 and the probability 1, so the soft value is 1 and the bonus 0
    assert targets(make_learner(), data) == pytest.approx([1 + 0.9, 1, 1 + 0.81])


def test_loss_is_that_of_the_action_taken() -> None:
    learner = make_learner(loss="mse", bonus=0.0)
    result = learner.losses(batch(), batch())
    expected = [(0.5 - 1 - 0.9 * SOFT) ** 2, (3 - 1) ** 2, (3 - 1 - 0.81 * SOFT) ** 2]
    assert result.loss.tolist() == pytest.approx(expected, rel=1e-5)
    assert result.td_error is not None
    assert result.td_error.tolist() == pytest.approx([math.sqrt(e) for e in expected], rel=1e-5)

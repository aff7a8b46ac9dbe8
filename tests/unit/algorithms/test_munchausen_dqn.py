"""Munchausen DQN's targets by hand: the bonus, its limit, the soft value, ends and masks."""

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
# The target network says 1 and 2 of the two actions everywhere. At temperature 1 the policy is
# e / (e + e²) = 0.26894 and 0.73106, log-policy -1.31326 and -0.31326, and the soft value log(e + e²) = 2.31326.
LOGP, SOFT = (-1.3132617, -0.3132617), 2.3132617


def learner(**settings: Any) -> MunchausenDQN:
    cfg = zx.config.load(algorithm="munchausen_dqn", env="Acrobot-v1", **({"temperature": 1.0} | settings))
    made = zx.algorithms.get("munchausen_dqn").make(cfg, SPACES)
    assert isinstance(made, MunchausenDQN)
    with torch.no_grad():
        for net, values in ((made.net, [0.5, 3.0]), (made.target_net, [1.0, 2.0])):
            net.head.weight.zero_()
            net.head.bias.copy_(torch.tensor(values))
    return made


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


def targets(made: MunchausenDQN, shown: Batch) -> list[float]:
    return made.target_value(shown, shown).tolist()


def test_the_numbers_above_are_right() -> None:
    total = math.exp(1) + math.exp(2)
    assert math.log(total) == pytest.approx(SOFT)
    assert (1 - math.log(total), 2 - math.log(total)) == pytest.approx(LOGP)


def test_targets_pay_the_log_policy_and_bootstrap_softly_but_never_from_death() -> None:
    expected = [1 + 0.5 * LOGP[0] + 0.9 * SOFT, 1 + 0.5 * LOGP[1], 1 + 0.5 * LOGP[1] + 0.81 * SOFT]
    assert targets(learner(bonus=0.5, bonus_limit=2.0), batch()) == pytest.approx(expected)


def test_the_bonus_is_limited() -> None:
    assert targets(learner(bonus=1.0, bonus_limit=1.0), batch())[0] == pytest.approx(1 - 1.0 + 0.9 * SOFT)


def test_without_a_bonus_and_cold_it_is_dqn() -> None:
    made = learner(bonus=0.0, temperature=1e-3)
    assert targets(made, batch()) == pytest.approx([1 + 0.9 * 2, 1, 1 + 0.81 * 2])


def test_forbidden_actions_have_no_share() -> None:
    one = torch.tensor([[True, False]]).expand(3, 2)
    shown = batch(action=torch.zeros(3, dtype=torch.long), mask=one, next_mask=one)
    # one allowed action of value 1: the policy is sure of it, and the soft value is its value
    assert targets(learner(), shown) == pytest.approx([1 + 0.9, 1, 1 + 0.81])


def test_the_loss_is_of_the_action_taken() -> None:
    made = learner(loss="mse", bonus=0.0)
    found = made.losses(batch(), batch())
    expected = [(0.5 - 1 - 0.9 * SOFT) ** 2, (3 - 1) ** 2, (3 - 1 - 0.81 * SOFT) ** 2]
    assert found.loss.tolist() == pytest.approx(expected, rel=1e-5)
    assert found.td_error is not None
    assert found.td_error.tolist() == pytest.approx([math.sqrt(e) for e in expected], rel=1e-5)

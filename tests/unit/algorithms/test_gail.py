"""Imitation rewards and discriminator of GAIL, with numbers worked out by hand; environment rewards have no effect."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import checkpoint_tensors
from gymnasium.spaces import Box, Discrete, MultiDiscrete
from probe import probe

import zhixing as zx
from zhixing.algorithms.gail import GAIL
from zhixing.core.batch import Batch
from zhixing.core.spaces import Spaces

OBS = Box(-9.0, 9.0, (2,), np.float32)


def make_learner(action: Any = None, expert: Batch | None = None, **settings: Any) -> GAIL:
    cfg = zx.config.load(algorithm="gail", env="Acrobot-v1", dataset="somewhere", **settings)
    learner = zx.algorithms.get("gail").make(cfg, Spaces(OBS, action or Discrete(2)))
    assert isinstance(learner, GAIL)
    learner.set_demonstrations(expert or Batch(obs=torch.randn(50, 2), action=torch.zeros(50, dtype=torch.long)))
    return learner


def with_constant_logit(learner: GAIL, value: float) -> GAIL:
    """Make the discriminator return this logit for every step."""
    with torch.no_grad():
        learner.discriminator.layers.linears[-1].weight.zero_()
        learner.discriminator.layers.linears[-1].bias.fill_(value)
    return learner


STEPS = Batch(obs=torch.randn(4, 2), action=torch.tensor([0, 1, 0, 1]))


def test_imitation_rewards_by_hand() -> None:
    # D = 1 / (1 + e^-2) = 0.8808; -log(1 - D) = log(1 + e^2) = 2.1269; log D - log(1 - D) is the logit
    gail, airl = (with_constant_logit(make_learner(imitation_reward=kind), 2.0) for kind in ("gail", "airl"))
    assert gail.imitation_reward(STEPS).tolist() == pytest.approx([math.log(1 + math.e**2)] * 4)
    assert airl.imitation_reward(STEPS).tolist() == pytest.approx([2.0] * 4)


def test_discriminator_loss_by_hand() -> None:
    # the gradient of a constant logit is 0, so the penalty is (0 - 1)² = 1 times its weight. Cross-entropy of the logit
    # 2: log(1 + e^-2) = 0.1269 for the expert's steps, log(1 + e^2) = 2.1269 for the policy's steps
    learner = with_constant_logit(make_learner(gradient_penalty=3.0, discriminator_batch_size=4), 2.0)
    result = probe(learner, STEPS, "discriminator_step")
    expected = 0.5 * (math.log(1 + math.e**-2) + math.log(1 + math.e**2)) + 3.0
    assert result.metrics["discriminator_loss"].item() == pytest.approx(expected)
    assert result.metrics["discriminator_accuracy"].item() == 0.5
    assert list(result.gradients) == ["discriminator_optimizer"]


def test_gradient_penalty_by_hand() -> None:
    learner = make_learner(gradient_penalty=1.0)
    linear = torch.nn.Linear(4, 1)
    with torch.no_grad():
        linear.weight.copy_(torch.tensor([[0.0, 3.0, 0.0, 4.0]]))  # gradient norm 5 everywhere
    learner.discriminator.layers = linear
    assert learner.gradient_penalty(torch.randn(6, 4), torch.randn(6, 4)).item() == pytest.approx((5 - 1) ** 2)


@pytest.mark.parametrize("action", [Discrete(3), MultiDiscrete([2, 3]), Box(-2.0, 2.0, (1,), np.float32)])
def test_discriminator_separates_expert_and_policy_in_all_action_spaces(action: Any) -> None:
    def steps(shift: float) -> Batch:
        actions = torch.as_tensor(np.stack([action.sample() for _ in range(200)]))
        return Batch(obs=torch.randn(200, 2) * 0.1 + shift, action=actions)

    learner = make_learner(action, steps(1.0), discriminator_lr=1e-2, discriminator_batch_size=64, gradient_penalty=0.1)
    policy_steps = steps(-1.0)
    for _ in range(60):
        learner.discriminator_step(learner.sample_steps(policy_steps))
    assert learner.imitation_reward(steps(1.0)).mean() > 3 * learner.imitation_reward(policy_steps).mean()


def test_environment_rewards_have_no_effect(short_config: Callable, tmp_path: Path) -> None:
    for name, sutton_barto in (("one", False), ("other", True)):
        cfg = short_config("gail", "CartPole-v1", env__sutton_barto_reward=sutton_barto, seed=2, env_steps=256)
        zx.Session(cfg, tmp_path / name, quiet=True).run()
    one, other = (checkpoint_tensors(tmp_path / name) for name in ("one", "other"))
    assert all(torch.equal(one[key], other[key]) for key in one if "discriminator" in key or "learner" in key)


def test_init_from_a_run_of_ppo_loads_the_policy(short_config: Callable, tmp_path: Path) -> None:
    zx.Session(short_config("ppo", "CartPole-v1", env_steps=128), tmp_path / "ppo", quiet=True).run()
    cfg = short_config("gail", "CartPole-v1", init_from=str(tmp_path / "ppo"))
    session = zx.Session(cfg, tmp_path / "gail", quiet=True)
    session.close()
    weights = zx.load(tmp_path / "ppo").policy.state_dict()
    assert all(torch.equal(value, weights[name]) for name, value in session.learner.policy.state_dict().items())


def test_too_many_demonstrations_are_rejected(random_dataset: Callable, tmp_path: Path) -> None:
    with pytest.raises(zx.UserError, match="demonstrations=1000 are more than the"):
        zx.train("gail", dataset=random_dataset("CartPole-v1"), out=tmp_path / "run", demonstrations=1000, quiet=True)

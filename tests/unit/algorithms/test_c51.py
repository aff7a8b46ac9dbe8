"""Target distributions, loss, priorities and policy of C51, with numbers worked out by hand."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete, MultiDiscrete
from probe import probe
from torch import Tensor

import zhixing as zx
from zhixing.algorithms.c51 import C51
from zhixing.core.batch import Batch
from zhixing.core.policy import Phase
from zhixing.core.spaces import Spaces
from zhixing.errors import UserError

SPACES = Spaces(Box(-9.0, 9.0, (3,), np.float32), Discrete(2))
SURE = 50.0  # a logit whose probability, next to logits of 0, is 1 in float32
SETTINGS = {"net__hidden_sizes": [8], "atoms": 3, "v_min": 0.0, "v_max": 10.0}  # atoms 0, 5, 10


def make_learner(**settings: Any) -> C51:
    cfg = zx.config.load(algorithm="c51", env="Acrobot-v1", **(SETTINGS | settings))
    learner = zx.algorithms.get("c51").make(cfg, SPACES)
    assert isinstance(learner, C51)
    return learner


def set_outputs(c51: C51, net: list[list[float]], target: list[list[float]]) -> None:
    """Make both networks return these logits `[n,atoms]` for any observation."""
    with torch.no_grad():
        for module, logits in ((c51.net, net), (c51.target_net, target)):
            linear: Any = module.head.linear
            linear.weight.zero_()
            linear.bias.copy_(torch.tensor(logits).flatten())


def batch(**fields: Any) -> Batch:
    base = {
        "obs": torch.zeros(3, 3),
        "next_obs": torch.zeros(3, 3),
        "action": torch.tensor([0, 1, 0]),
        "reward": torch.tensor([1.0, 1.0, 3.0]),
        "terminated": torch.tensor([False, True, False]),
        "truncated": torch.tensor([False, False, True]),
        "discount": torch.tensor([0.5, 0.5, 0.5]),
        "index": torch.arange(3),
    }
    return Batch(**{**base, **fields})


def targets(c51: C51, data: Batch) -> Tensor:
    return c51.target_distribution(data, data)


# logits of distributions: uniform, and on one atom
UNIFORM, ON_0, ON_5, ON_10 = [0.0, 0.0, 0.0], [SURE, 0.0, 0.0], [0.0, SURE, 0.0], [0.0, 0.0, SURE]


def test_targets_by_hand() -> None:
    c51 = make_learner()
    set_outputs(c51, net=[ON_10, ON_0], target=[ON_0, ON_5])
    # the target network prefers its second action, with return 5: 1 + ½ · 5 = 3.5, split 0.3 to 0 and 0.7 to 5;
    # terminated: 1, split 0.8 to 0 and 0.2 to 5; truncated: 3 + ½ · 5 = 5.5, split 0.9 to 5 and 0.1 to 10
    expected = torch.tensor([[0.3, 0.7, 0.0], [0.8, 0.2, 0.0], [0.0, 0.9, 0.1]])
    assert torch.allclose(targets(c51, batch()), expected, atol=1e-6)


def test_returns_out_of_range_are_clipped_to_the_outermost_atoms() -> None:
    c51 = make_learner()
    set_outputs(c51, net=[UNIFORM] * 2, target=[ON_10, ON_0])
    # 1 + ½ · 10 = 6, split 0.8 to 5 and 0.2 to 10; terminated with -7: 0; 8 + 5: 10
    data = batch(reward=torch.tensor([1.0, -7.0, 8.0]))
    expected = torch.tensor([[0.0, 0.8, 0.2], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
    assert torch.allclose(targets(c51, data), expected, atol=1e-6)


def test_targets_use_the_discount_of_each_row() -> None:
    c51 = make_learner()
    set_outputs(c51, net=[UNIFORM] * 2, target=[ON_10, ON_0])
    # 0 + 0.25 · 10 = 2.5, split equally to 0 and 5; terminated: 0; 1 + 0.9 · 10 = 10
    data = batch(reward=torch.tensor([0.0, 0.0, 1.0]), discount=torch.tensor([0.25, 0.5, 0.9]))
    expected = torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
    assert torch.allclose(targets(c51, data), expected, atol=1e-6)


def test_greedy_action_has_the_highest_mean() -> None:
    c51 = make_learner()
    # means: 5 for the uniform distribution, 0.8 · 5 = 4 for the other, although its mode is 5
    set_outputs(c51, net=[UNIFORM] * 2, target=[UNIFORM, [math.log(0.2), math.log(0.8), -SURE]])
    data = batch(reward=torch.zeros(3), discount=torch.ones(3))
    assert torch.allclose(targets(c51, data)[0], torch.full((3,), 1 / 3), atol=1e-6)
    assert c51.value(torch.zeros(2, 3)).tolist() == pytest.approx([5.0, 5.0])


def test_targets_ignore_invalid_actions() -> None:
    c51 = make_learner()
    set_outputs(c51, net=[UNIFORM] * 2, target=[ON_0, ON_10])
    mask = torch.tensor([[True, False], [False, False], [True, True]])
    # only the first action is valid: 1 + ½ · 0; terminated, where no action is valid: 1; 3 + ½ · 10 = 8
    expected = torch.tensor([[0.8, 0.2, 0.0], [0.8, 0.2, 0.0], [0.0, 0.4, 0.6]])
    assert torch.allclose(targets(c51, batch(next_mask=mask)), expected, atol=1e-6)


def test_loss_and_priorities_by_hand() -> None:
    c51 = make_learner()
    set_outputs(c51, net=[UNIFORM, [math.log(0.8), math.log(0.2), -SURE]], target=[ON_0, ON_5])
    result = probe(c51, batch())
    # targets as in test_targets_by_hand. The cross-entropy with a uniform prediction is log 3; the second prediction
    # equals its target, so its cross-entropy is the entropy of the target
    entropy = [-sum(p * math.log(p) for p in row) for row in ((0.3, 0.7), (0.8, 0.2), (0.9, 0.1))]
    losses = [math.log(3), entropy[1], math.log(3)]
    assert result.metrics["loss"].item() == pytest.approx(sum(losses) / 3, rel=1e-5)
    # KL is the cross-entropy minus the entropy of the target
    assert result.priority is not None
    kl = [math.log(3) - entropy[0], 0.0, math.log(3) - entropy[2]]
    assert result.priority.tolist() == pytest.approx(kl, abs=1e-6)
    # means 5 (uniform), 0.2 · 5 = 1, 5
    assert result.metrics["q_mean"].item() == pytest.approx(11 / 3, rel=1e-5)
    weighted = probe(c51, batch(weight=torch.tensor([1.0, 0.5, 0.1])))
    expected = (losses[0] + 0.5 * losses[1] + 0.1 * losses[2]) / 3
    assert weighted.metrics["loss"].item() == pytest.approx(expected, rel=1e-5)
    assert weighted.priority is not None
    assert weighted.priority.tolist() == pytest.approx(kl, abs=1e-6)


def test_distributions_converge_to_the_targets() -> None:
    c51 = make_learner(lr=1e-2)
    data = batch(obs=torch.eye(3), terminated=torch.ones(3, dtype=torch.bool), reward=torch.tensor([1.0, 7.0, 9.0]))
    for _ in range(300):
        c51.update(data)
    with torch.no_grad():
        q = c51.policy.net(torch.eye(3))[0].gather(1, data.action[:, None])[:, 0]
    assert q.tolist() == pytest.approx([1.0, 7.0, 9.0], abs=0.1)


def test_policy_takes_the_valid_action_with_the_highest_mean() -> None:
    c51 = make_learner()
    set_outputs(c51, net=[ON_5, UNIFORM], target=[UNIFORM] * 2)
    rng = torch.Generator().manual_seed(0)

    def act(mask: Tensor | None = None) -> list[int]:
        return c51.policy.act(torch.zeros(2, 3), None, mask, Phase.EVAL, rng, 0).action.tolist()

    with torch.no_grad():
        c51.net.head.linear.bias[5] = 1.0  # more probability of 10: the mean of the second action exceeds 5
    assert act() == [1, 1]
    assert act(torch.tensor([[True, False], [True, True]])) == [0, 1]


def test_recurrent_losses_exclude_the_burn_in() -> None:
    c51 = make_learner(
        net__recurrent="gru", net__recurrent_size=4, replay__burn_in=2, replay__sequence_length=2, gamma=0.5
    )
    set_outputs(c51, net=[UNIFORM] * 2, target=[ON_0, ON_5])
    never = torch.zeros(2, 4, dtype=torch.bool)
    terminated = never.clone()
    terminated[1, 3] = True
    reward = torch.tensor([[99.0, 99.0, 2.5, 2.5], [99.0, 99.0, 2.5, 0.0]])
    data = Batch(
        obs=torch.zeros(2, 4, 3),
        next_obs=torch.zeros(2, 4, 3),
        action=torch.zeros(2, 4, dtype=torch.long),
        reward=reward,
        terminated=terminated,
        truncated=never,
        is_first=never,
        hidden=torch.zeros(2, 4, 4),
        index=torch.arange(2),
    )
    result = probe(c51, data)
    # 2.5 + ½ · 5 = 5, terminated: 0. Every target is on one atom, so all losses and KL divergences are log 3
    assert result.metrics["loss"].item() == pytest.approx(math.log(3), rel=1e-5)
    assert result.priority is not None
    assert result.priority.tolist() == pytest.approx([math.log(3)] * 2, rel=1e-5)


@pytest.mark.parametrize("interval", [1, 3])
def test_target_network_is_copied_every_target_update_interval(interval: int) -> None:
    c51 = make_learner(target_update_interval=interval)
    for updates in range(1, 4):
        c51.update(batch())
        equal = torch.equal(c51.net.head.linear.weight, c51.target_net.head.linear.weight)
        assert equal == (updates % interval == 0)


def test_weights_can_be_loaded_into_another_policy_and_learner() -> None:
    c51, other = make_learner(), make_learner(seed=9)
    for _ in range(3):
        c51.update(batch())
    x = torch.randn(4, 3)
    other.policy.load_state_dict(c51.policy.state_dict())
    assert torch.equal(other.value(x), c51.value(x))
    third = make_learner(seed=8)
    third.load_networks(c51.state_dict())
    assert torch.equal(third.value(x), c51.value(x))
    # a deep copy of the policy shares no memory with the learner
    policy = copy.deepcopy(c51.policy)
    c51.update(batch())
    assert torch.equal(policy.net(x)[0].amax(-1), third.value(x))


def test_invalid_settings_and_action_spaces_are_rejected() -> None:
    with pytest.raises(UserError, match=r"v_min=10 must be below v_max=10"):
        make_learner(v_min=10.0)
    with pytest.raises(UserError, match="atoms=1"):
        make_learner(atoms=1)
    with pytest.raises(UserError, match="v_max=inf"):
        make_learner(v_max=math.inf)
    cfg = zx.config.load(algorithm="c51", env="Acrobot-v1")
    for action in (Box(-1.0, 1.0, (1,), np.float32), MultiDiscrete([2, 2])):
        with pytest.raises(UserError, match=r"c51 needs Discrete actions, but this env has"):
            C51(cfg, Spaces(SPACES.obs, action))
    with pytest.raises(UserError, match=r"set replay\.n_step=1"):
        make_learner(net__recurrent="gru", replay__n_step=3)

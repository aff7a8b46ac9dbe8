"""C51: target distributions, loss and priorities by hand, and what a policy makes of distributions."""

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
SURE = 50.0  # a logit beside zeros whose probability is 1 in 32 bits
# atoms 0, 5, 10
SETTINGS = {"net__hidden_sizes": [8], "atoms": 3, "v_min": 0.0, "v_max": 10.0}


def learner(**settings: Any) -> C51:
    cfg = zx.config.load(algorithm="c51", env="Acrobot-v1", **(SETTINGS | settings))
    made = zx.algorithms.get("c51").make(cfg, SPACES)
    assert isinstance(made, C51)
    return made


def table(c51: C51, net: list[list[float]], target: list[list[float]]) -> None:
    """Let the network and its target give these logits [n,atoms] for every observation."""
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


def targets(c51: C51, shown: Batch) -> Tensor:
    return c51.target_distribution(shown, shown)


UNIFORM, ON_0, ON_5, ON_10 = [0.0, 0.0, 0.0], [SURE, 0.0, 0.0], [0.0, SURE, 0.0], [0.0, 0.0, SURE]


def test_targets_by_hand() -> None:
    c51 = learner()
    table(c51, net=[ON_10, ON_0], target=[ON_0, ON_5])
    # the target's best is its second action, surely 5: 1 + ½ · 5 = 3.5, shared 0.3 to 0 and 0.7 to 5;
    # death: 1, shared 0.8 and 0.2; truncation bootstraps: 3 + ½ · 5 = 5.5, shared 0.9 to 5 and 0.1 to 10
    expected = torch.tensor([[0.3, 0.7, 0.0], [0.8, 0.2, 0.0], [0.0, 0.9, 0.1]])
    assert torch.allclose(targets(c51, batch()), expected, atol=1e-6)


def test_returns_beyond_the_range_count_as_its_edges() -> None:
    c51 = learner()
    table(c51, net=[UNIFORM] * 2, target=[ON_10, ON_0])
    # 1 + ½ · 10 = 6 is 0.8 of 5 and 0.2 of 10; death with -7 is at 0; 8 + 5 is at 10
    shown = batch(reward=torch.tensor([1.0, -7.0, 8.0]))
    expected = torch.tensor([[0.0, 0.8, 0.2], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
    assert torch.allclose(targets(c51, shown), expected, atol=1e-6)


def test_n_step_targets_use_their_own_discount() -> None:
    c51 = learner()
    table(c51, net=[UNIFORM] * 2, target=[ON_10, ON_0])
    # 0 + 0.25 · 10 = 2.5 halves between 0 and 5; terminated: 0; 1 + 0.9 · 10 = 10
    shown = batch(reward=torch.tensor([0.0, 0.0, 1.0]), discount=torch.tensor([0.25, 0.5, 0.9]))
    expected = torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
    assert torch.allclose(targets(c51, shown), expected, atol=1e-6)


def test_the_best_action_is_that_of_the_highest_mean() -> None:
    c51 = learner()
    # means: 5 · (0 + 5 + 10) / 15 = 5 for the uniform one, 4 for 0.2 and 0.8, though its likeliest atom is 5
    table(c51, net=[UNIFORM] * 2, target=[UNIFORM, [math.log(0.2), math.log(0.8), -SURE]])
    shown = batch(reward=torch.zeros(3), discount=torch.ones(3))
    assert torch.allclose(targets(c51, shown)[0], torch.full((3,), 1 / 3), atol=1e-6)
    assert c51.value(torch.zeros(2, 3)).tolist() == pytest.approx([5.0, 5.0])


def test_targets_never_come_from_a_forbidden_action() -> None:
    c51 = learner()
    table(c51, net=[UNIFORM] * 2, target=[ON_0, ON_10])
    mask = torch.tensor([[True, False], [False, False], [True, True]])
    # only 0 is left: 1 + ½ · 0; death, where nothing is allowed: 1; 3 + ½ · 10 = 8
    expected = torch.tensor([[0.8, 0.2, 0.0], [0.8, 0.2, 0.0], [0.0, 0.4, 0.6]])
    assert torch.allclose(targets(c51, batch(next_mask=mask)), expected, atol=1e-6)


def test_loss_and_priorities_by_hand() -> None:
    c51 = learner()
    table(c51, net=[UNIFORM, [math.log(0.8), math.log(0.2), -SURE]], target=[ON_0, ON_5])
    found = probe(c51, batch())
    # the targets above; against the uniform network each costs log 3; the second row meets its target: its entropy
    entropy = [-sum(p * math.log(p) for p in row) for row in ((0.3, 0.7), (0.8, 0.2), (0.9, 0.1))]
    losses = [math.log(3), entropy[1], math.log(3)]
    assert found.metrics["loss"].item() == pytest.approx(sum(losses) / 3, rel=1e-5)
    # KL is the loss less the target's entropy: nothing for what is met
    assert found.priority is not None
    kl = [math.log(3) - entropy[0], 0.0, math.log(3) - entropy[2]]
    assert found.priority.tolist() == pytest.approx(kl, abs=1e-6)
    # means 5 (uniform), 0.2 · 5 = 1, 5
    assert found.metrics["q_mean"].item() == pytest.approx(11 / 3, rel=1e-5)
    weighted = probe(c51, batch(weight=torch.tensor([1.0, 0.5, 0.1])))
    expected = (losses[0] + 0.5 * losses[1] + 0.1 * losses[2]) / 3
    assert weighted.metrics["loss"].item() == pytest.approx(expected, rel=1e-5)
    assert weighted.priority is not None
    assert weighted.priority.tolist() == pytest.approx(kl, abs=1e-6)  # not weighted


def test_distributions_approach_the_targets() -> None:
    c51 = learner(lr=1e-2)
    shown = batch(obs=torch.eye(3), terminated=torch.ones(3, dtype=torch.bool), reward=torch.tensor([1.0, 7.0, 9.0]))
    for _ in range(300):
        c51.update(shown)
    with torch.no_grad():
        q = c51.policy.net(torch.eye(3))[0].gather(1, shown.action[:, None])[:, 0]
    assert q.tolist() == pytest.approx([1.0, 7.0, 9.0], abs=0.1)


def test_actions_are_those_of_the_highest_mean() -> None:
    c51 = learner()
    table(c51, net=[ON_5, UNIFORM], target=[UNIFORM] * 2)
    rng = torch.Generator().manual_seed(0)

    def act(mask: Tensor | None = None) -> list[int]:
        return c51.policy.act(torch.zeros(2, 3), None, mask, Phase.EVAL, rng, 0).action.tolist()

    with torch.no_grad():
        c51.net.head.linear.bias[5] = 1.0  # more weight on 10: the mean of the second is above 5
    assert act() == [1, 1]
    assert act(torch.tensor([[True, False], [True, True]])) == [0, 1]


def test_recurrent_losses_leave_out_the_burn_in() -> None:
    c51 = learner(net__recurrent="gru", net__recurrent_size=4, replay__burn_in=2, replay__sequence_length=2, gamma=0.5)
    table(c51, net=[UNIFORM] * 2, target=[ON_0, ON_5])
    never = torch.zeros(2, 4, dtype=torch.bool)
    died = never.clone()
    died[1, 3] = True
    reward = torch.tensor([[99.0, 99.0, 2.5, 2.5], [99.0, 99.0, 2.5, 0.0]])
    shown = Batch(
        obs=torch.zeros(2, 4, 3),
        next_obs=torch.zeros(2, 4, 3),
        action=torch.zeros(2, 4, dtype=torch.long),
        reward=reward,
        terminated=died,
        truncated=never,
        is_first=never,
        hidden=torch.zeros(2, 4, 4),
        index=torch.arange(2),
    )
    found = probe(c51, shown)
    # 2.5 + ½ · 5 = 5 and, dead, 0: every target is one atom, so loss and KL are log 3 everywhere
    assert found.metrics["loss"].item() == pytest.approx(math.log(3), rel=1e-5)
    assert found.priority is not None
    assert found.priority.tolist() == pytest.approx([math.log(3)] * 2, rel=1e-5)


@pytest.mark.parametrize("sync", [1, 3])
def test_the_target_network_is_copied_every_so_many_updates(sync: int) -> None:
    c51 = learner(target_update_interval=sync)
    for done in range(1, 4):
        c51.update(batch())
        same = torch.equal(c51.net.head.linear.weight, c51.target_net.head.linear.weight)
        assert same == (done % sync == 0)


def test_weights_go_to_another_policy_and_learner() -> None:
    c51, other = learner(), learner(seed=9)
    for _ in range(3):
        c51.update(batch())
    x = torch.randn(4, 3)
    other.policy.load_state_dict(c51.policy.state_dict())
    assert torch.equal(other.value(x), c51.value(x))
    third = learner(seed=8)
    third.load_networks(c51.state_dict())
    assert torch.equal(third.value(x), c51.value(x))
    # a copy of the policy has the support and a network of its own
    apart = copy.deepcopy(c51.policy)
    c51.update(batch())
    assert torch.equal(apart.net(x)[0].amax(-1), third.value(x))


def test_wrong_settings_are_told() -> None:
    with pytest.raises(UserError, match=r"v_min=10 must be below v_max=10"):
        learner(v_min=10.0)
    with pytest.raises(UserError, match="atoms=1"):
        learner(atoms=1)
    with pytest.raises(UserError, match="v_max=inf"):
        learner(v_max=math.inf)
    cfg = zx.config.load(algorithm="c51", env="Acrobot-v1")
    for action in (Box(-1.0, 1.0, (1,), np.float32), MultiDiscrete([2, 2])):
        with pytest.raises(UserError, match=r"c51 needs Discrete actions, but this env has"):
            C51(cfg, Spaces(SPACES.obs, action))
    with pytest.raises(UserError, match=r"set replay\.n_step=1"):
        learner(net__recurrent="gru", replay__n_step=3)

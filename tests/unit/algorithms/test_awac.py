"""AWAC's targets and weights by hand, for choices and moves; masks, ends, priorities, and what must not flow."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from by_hand import CONTINUOUS, DISCRETE, LOGITS, OBS, batch, peek_noise, set_critic_outputs, set_net_output
from gymnasium.spaces import Box, Discrete, MultiDiscrete
from probe import probe
from torch import Tensor, nn

import zhixing as zx
from zhixing.algorithms.awac import AWAC
from zhixing.core.batch import Batch
from zhixing.core.policy import Phase
from zhixing.core.spaces import Spaces
from zhixing.errors import UserError


def learner(spaces: Spaces = DISCRETE, **settings: Any) -> AWAC:
    base = {"net__hidden_sizes": []}  # one linear layer each
    cfg = zx.config.load(algorithm="awac", env="Acrobot-v1", **(base | settings))
    made = zx.algorithms.get("awac").make(cfg, spaces)
    assert isinstance(made, AWAC)
    return made


def moves(**fields: Any) -> Batch:
    return batch(**({"action": torch.tensor([[1.0], [0.0], [-1.0]])} | fields))


def actor_loss(made: AWAC, shown: Batch) -> tuple[Tensor, Tensor]:
    return made.actor_loss(shown)


def gradient_of(loss: Tensor, parameter: Tensor) -> list[float]:
    return torch.autograd.grad(loss, [parameter])[0].flatten().tolist()


def weights(net: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in net.parameters()]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a, b, strict=True))


# --- targets ---


def test_discrete_targets_are_what_the_policy_is_worth_on_average_without_entropy() -> None:
    made = learner()
    set_critic_outputs(made.target_critics, [10.0, 2.0, 6.0], [4.0, 8.0, 6.0])
    set_critic_outputs(made.critics, [99.0] * 3, [99.0] * 3)  # not asked
    set_net_output(made.actor, *LOGITS)
    # the least are 4, 2, 6: 2 + 0.5 + 1.5 = 4 on average. Death: 1; truncation bootstraps
    assert made.target_value(batch()).tolist() == pytest.approx([4.6, 1.0, 4.6])
    # 3 + 0.9³ * 4
    further = batch(reward=torch.tensor([1.0, 2.0, 3.0]), discount=torch.tensor([0.9, 0.81, 0.729]))
    assert made.target_value(further).tolist() == pytest.approx([4.6, 2.0, 5.916])


def test_targets_never_come_from_a_forbidden_action() -> None:
    made = learner()
    set_critic_outputs(made.target_critics, [3.0, 1e6, 6.0], [3.0, 1e6, 6.0])
    set_net_output(made.actor, *LOGITS)
    mask = torch.tensor([[True, False, True], [False, False, False], [True, False, False]])
    # chances 2/3 and 1/3: 2 + 2 = 4; death, where nothing is allowed: 1; one choice: 3 alone
    assert made.target_value(batch(next_mask=mask)).tolist() == pytest.approx([4.6, 1.0, 3.7])


def test_continuous_targets_are_themin_q_at_a_drawn_action_within_bounds() -> None:
    made = learner(CONTINUOUS)
    set_critic_outputs(made.target_critics, [2.0, 1.0], [-4.0, 1.0])  # 1 + 2 a and 1 - 4 a
    set_net_output(made.actor, math.atanh(0.6), std=0.9)
    made.rng.manual_seed(0)
    action = (0.6 + 0.9 * peek_noise(made)[:, 0]).clamp(-1.0, 1.0)
    assert (action == 1.0).any()  # one is drawn beyond
    least = torch.where(action < 0, 1 + 2 * action, 1 - 4 * action)
    expected = 1 + 0.9 * least * torch.tensor([1.0, 0.0, 1.0])
    assert torch.allclose(made.target_value(moves()), expected, atol=1e-5)


# --- losses ---


def test_critic_loss_by_hand() -> None:
    made = learner()
    set_critic_outputs(made.critics, [1.0, 1.5, 4.0], [3.0, 1.0, 0.0])
    set_critic_outputs(made.target_critics, [0.0] * 3, [0.0] * 3)
    loss, error, q = made.critic_loss(batch())
    # targets are 1. Errors 0, 0.5, 3 and 2, 0, -1: half squares 2, 0.125, 4.5 + 0.5 = 5
    assert loss.item() == pytest.approx(7.125 / 3)
    assert error.tolist() == pytest.approx([1.0, 0.25, 2.0])  # the mean over critics, for priorities
    assert q.item() == pytest.approx(10.5 / 6)  # the mean value
    # each action was taken once in three steps
    expected = [0.0, 0.5 / 3, 1.0, 2 / 3, 0.0, -1 / 3]
    assert gradient_of(loss, made.critics.towers.biases[0]) == pytest.approx(expected)


def test_discrete_actor_loss_by_hand() -> None:
    made = learner(advantage_lambda=2.0)
    set_critic_outputs(made.critics, [10.0, 2.0, 6.0], [4.0, 8.0, 6.0])  # the least are 4, 2, 6, on average 4
    set_net_output(made.actor, *LOGITS)
    loss, weight = actor_loss(made, batch())
    # advantages 0, -2, 2 over 2
    expected = [1.0, math.exp(-1), math.e]
    assert weight.tolist() == pytest.approx(expected)
    assert loss.item() == pytest.approx((expected[0] + 2 * expected[1] + 2 * expected[2]) * math.log(2) / 3)
    # by the logits: Σ_i w_i (chances - the one taken) / 3
    total = sum(expected)
    slopes = [(p * total - w) / 3 for p, w in zip((0.5, 0.25, 0.25), expected, strict=True)]
    assert gradient_of(loss, made.actor.layers.linears[0].bias) == pytest.approx(slopes)


def test_weights_have_a_limit() -> None:
    made = learner(advantage_lambda=1e-3, max_weight=5.0)
    set_critic_outputs(made.critics, [4.0, 2.0, 6.0], [4.0, 2.0, 6.0])
    set_net_output(made.actor, *LOGITS)
    loss, weight = actor_loss(made, batch())
    assert weight.tolist() == pytest.approx([1.0, 0.0, 5.0])  # exp(2000) is infinite
    assert loss.isfinite()


def test_a_forbidden_action_has_no_part_in_what_the_policy_is_worth() -> None:
    made = learner()
    set_critic_outputs(made.critics, [3.0, 1e6, 6.0], [3.0, 1e6, 6.0])
    set_net_output(made.actor, *LOGITS)
    mask = torch.tensor([[True, False, True]]).expand(3, 3)
    loss, weight = actor_loss(made, batch(action=torch.tensor([0, 2, 2]), mask=mask))
    # chances 2/3 and 1/3, worth 4 on average: advantages -1, 2, 2
    expected = [math.exp(-1), math.exp(2), math.exp(2)]
    assert weight.tolist() == pytest.approx(expected)
    likelihood = expected[0] * math.log(2 / 3) + 2 * expected[1] * math.log(1 / 3)
    assert loss.item() == pytest.approx(-likelihood / 3)
    assert gradient_of(loss, made.actor.layers.linears[0].bias)[1] == 0.0


def test_continuous_actor_loss_by_hand_also_on_the_bounds() -> None:
    made = learner(CONTINUOUS)
    set_critic_outputs(made.critics, [2.0, 1.0], [2.0, 1.0])
    set_net_output(made.actor, 0.0, std=0.5)
    own = (0.5 * peek_noise(made)[:, 0]).clamp(-1.0, 1.0)
    loss, weight = actor_loss(made, moves())
    # 2 a - 2 a'
    expected = torch.exp(2 * torch.tensor([1.0, 0.0, -1.0]) - 2 * own)
    assert torch.allclose(weight, expected, rtol=1e-5)
    # ln N(a; 0, 0.5) = -2 a² + ln 2 - 0.5 ln 2π
    logp = torch.tensor([-2.0, 0.0, -2.0]) + math.log(2) - 0.5 * math.log(2 * math.pi)
    assert loss.item() == pytest.approx(-(expected * logp).mean().item(), rel=1e-5)


def test_importance_weights_weigh_both_losses_and_not_the_priority() -> None:
    made = learner()
    set_critic_outputs(made.critics, [1.0, 1.5, 4.0], [3.0, 1.0, 0.0])
    set_critic_outputs(made.target_critics, [0.0] * 3, [0.0] * 3)
    set_net_output(made.actor, *LOGITS)
    found = probe(made, batch(weight=torch.tensor([1.0, 0.5, 0.1])))
    # 2 + 0.5 * 0.125 + 0.1 * 5
    assert found.metrics["critic_loss"].item() == pytest.approx(2.5625 / 3)
    # the least are 1, 1, 0, on average 0.75: ln 2 (e^0.25 + 0.5 * 2 e^0.25 + 0.1 * 2 e^-0.75)
    expected = (2 * math.exp(0.25) + 0.2 * math.exp(-0.75)) * math.log(2) / 3
    assert found.metrics["actor_loss"].item() == pytest.approx(expected)
    assert found.priority is not None
    assert found.priority.tolist() == pytest.approx([1.0, 0.25, 2.0])


# --- updates ---


@pytest.mark.parametrize("spaces", [DISCRETE, CONTINUOUS])
def test_gradients_change_nothing_and_are_each_networks_own(spaces: Spaces) -> None:
    made = learner(spaces, net__hidden_sizes=[8])
    shown = batch() if spaces is DISCRETE else moves()
    parts = (made.actor, made.critics, made.target_critics)
    before = [p for part in parts for p in weights(part)]
    probe(made, shown)
    assert same(before, [p for part in parts for p in weights(part)])
    assert not any(p.requires_grad for p in made.target_critics.parameters())
    for loss, net in ((made.critic_loss(shown)[0], made.actor), (actor_loss(made, shown)[0], made.critics)):
        assert all(g is None for g in torch.autograd.grad(loss, [*net.parameters()], allow_unused=True))
    # what the critics take is the gradient of their own loss, not the actor's too
    state = made.rng.get_state()
    found = probe(made, shown).gradients["critic_optimizer"][0].clone()
    made.rng.set_state(state)
    assert torch.equal(found, made.critic_optimizer.compute_gradients(made.critic_loss(shown)[0])[0])


def test_targets_follow_slowly_and_the_actor_has_its_own_learning_rate() -> None:
    made = learner(tau=0.1, lr=1e-2, actor_lr=1e-4, net__hidden_sizes=[8])
    start, actor, critics = weights(made.target_critics), weights(made.actor), weights(made.critics)
    made.update(batch())
    for target, before, net in zip(weights(made.target_critics), start, weights(made.critics), strict=True):
        assert torch.allclose(target, 0.9 * before + 0.1 * net, atol=1e-7)
    # Adam's first step is as long as the learning rate
    for net, old, lr in ((made.actor, actor, 1e-4), (made.critics, critics, 1e-2)):
        longest = max((p - o).abs().max().item() for p, o in zip(net.parameters(), old, strict=True))
        assert longest == pytest.approx(lr, rel=0.05)


@pytest.mark.parametrize("spaces", [DISCRETE, CONTINUOUS])
def test_it_prefers_the_better_of_what_was_recorded(spaces: Spaces) -> None:
    """One step in one state. Cloning would take the choice most often recorded, or the mean of the moves, zero."""
    rng = torch.Generator().manual_seed(0)
    made = learner(spaces, net__hidden_sizes=[32], lr=1e-2, advantage_lambda=0.2)
    if spaces is DISCRETE:
        action = torch.tensor([0] * 60 + [1] * 20 + [2] * 20)
        reward = torch.tensor([0.0] * 60 + [1.0] * 20 + [0.5] * 20)
    else:
        action = torch.rand(100, 1, generator=rng) * 2 - 1
        reward = 1 - (action[:, 0] - 0.5).abs()
    ended, zeros = torch.ones(100, dtype=torch.bool), torch.zeros(100, 2)
    rows = {"obs": zeros, "next_obs": zeros, "action": action, "reward": reward, "terminated": ended}
    shown = batch(**rows, truncated=~ended, discount=torch.ones(100), index=torch.arange(100))
    for _ in range(400):
        made.update(shown)
    best = made.policy.act(torch.zeros(1, 2), None, None, Phase.EVAL, rng, 0).action.item()
    assert best == (1 if spaces is DISCRETE else pytest.approx(0.5, abs=0.1))


# --- values, what is refused, saved and told ---


def test_value_is_that_of_acting_as_the_policy() -> None:
    made = learner()
    set_critic_outputs(made.critics, [10.0, 2.0, 6.0], [4.0, 8.0, 6.0])
    set_net_output(made.actor, *LOGITS)
    assert made.value(torch.zeros(2, 2)).tolist() == pytest.approx([4.0] * 2)
    moving = learner(CONTINUOUS)
    set_critic_outputs(moving.critics, [2.0, 1.0], [-4.0, 1.0])
    set_net_output(moving.actor, math.atanh(0.5))
    assert moving.value(torch.zeros(2, 2)).tolist() == pytest.approx([-1.0] * 2)  # the least of 2 and -1


def test_what_it_collects_stays_within_bounds() -> None:
    made = learner(CONTINUOUS)
    set_net_output(made.actor, math.atanh(0.9), std=0.5)
    rng, obs = torch.Generator().manual_seed(0), torch.zeros(1000, 2)
    taken = made.policy.act(obs, None, None, Phase.COLLECT, rng, 0).action
    assert taken.max().item() == 1.0
    assert taken.std().item() > 0.2
    assert made.policy.act(obs[:1], None, None, Phase.EVAL, rng, 0).action.item() == pytest.approx(0.9)


def test_what_it_cannot_do_is_refused_by_name() -> None:
    for space in (MultiDiscrete([2, 2]), Box(-np.inf, np.inf, (1,), np.float32), Box(-1.0, 1.0, (2, 2), np.float32)):
        with pytest.raises(UserError, match="awac needs continuous actions in a bounded one-dimensional Box"):
            learner(Spaces(OBS, space))
    with pytest.raises(UserError, match=r"awac does not support recurrent networks: set net\.recurrent=none"):
        learner(net__recurrent="gru")
    with pytest.raises(UserError, match="awac needs an environment with one agent"):
        learner(Spaces(OBS, Discrete(3), num_agents=2))


@pytest.mark.parametrize("spaces", [DISCRETE, CONTINUOUS])
def test_state_round_trip_gives_the_same_next_update(spaces: Spaces) -> None:
    shown = batch() if spaces is DISCRETE else moves()
    made, other = learner(spaces, net__hidden_sizes=[8]), learner(spaces, net__hidden_sizes=[8], seed=9)
    made.update(shown)
    other.load_state_dict(made.state_dict())
    for _ in range(3):
        first, second = made.update(shown), other.update(shown)
        assert set(first.metrics) == set(AWAC.metrics)
        assert all(torch.equal(first.metrics[name], second.metrics[name]) for name in first.metrics)
    for name in ("actor", "critics", "target_critics"):
        assert same(weights(getattr(made, name)), weights(getattr(other, name)))

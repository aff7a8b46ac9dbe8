"""IQL's expectiles, targets and weights by hand; masks, ends, priorities, the schedule, and what must not flow."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from by_hand import CONTINUOUS, DISCRETE, LOGITS, OBS, batch, set_critic_outputs, set_net_output
from gymnasium.spaces import Box, Discrete, MultiDiscrete
from probe import probe
from torch import Tensor, nn

import zhixing as zx
from zhixing.algorithms.iql import IQL
from zhixing.core.batch import Batch
from zhixing.core.policy import Phase
from zhixing.core.spaces import Spaces
from zhixing.errors import UserError
from zhixing.ops.losses import advantage_weight, expectile_loss


def learner(spaces: Spaces = DISCRETE, **settings: Any) -> IQL:
    base = {"net__hidden_sizes": []}  # one linear layer each
    cfg = zx.config.load(algorithm="iql", env="Acrobot-v1", **(base | settings))
    made = zx.algorithms.get("iql").make(cfg, spaces)
    assert isinstance(made, IQL)
    return made


def moves(**fields: Any) -> Batch:
    return batch(**({"action": torch.tensor([[1.0], [0.0], [-1.0]])} | fields))


def gradient_of(loss: Tensor, parameter: Tensor) -> list[float]:
    return torch.autograd.grad(loss, [parameter])[0].flatten().tolist()


def weights(net: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in net.parameters()]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a, b, strict=True))


# --- its formulas ---


def test_expectiles_by_hand() -> None:
    # 0.3 * 4, 0 and 0.7 * 9
    assert expectile_loss(torch.tensor([-2.0, 0.0, 3.0]), 0.7).tolist() == pytest.approx([1.2, 0.0, 6.3])


@pytest.mark.parametrize(("tau", "settles"), [(0.5, 1.0), (0.7, 2.1 / 1.3), (0.9, 2.7 / 1.1)])
def test_expectiles_settle_between_the_mean_and_the_best(tau: float, settles: float) -> None:
    # of targets 0, 0 and 3: 2 (1 - τ) v = τ (3 - v), so v = 3 τ / (2 - τ)
    estimate = torch.tensor(settles, requires_grad=True)
    loss = expectile_loss(torch.tensor([0.0, 0.0, 3.0]) - estimate, tau).sum()
    assert gradient_of(loss, estimate) == pytest.approx([0.0], abs=1e-5)


def test_weights_of_advantages_have_a_limit_and_no_gradient() -> None:
    advantage = torch.tensor([-1.0, 0.0, 0.5, 1e6], requires_grad=True)
    weight = advantage_weight(advantage, 3.0, 100.0)
    assert weight.tolist() == pytest.approx([math.exp(-3), 1.0, math.exp(1.5), 100.0])
    assert not weight.requires_grad


# --- losses ---


def test_value_loss_by_hand() -> None:
    made = learner()
    set_critic_outputs(made.target_critics, [10.0, 2.0, 6.0], [4.0, 8.0, 7.0])  # the least are 4, 2, 6
    set_critic_outputs(made.critics, [99.0] * 3, [99.0] * 3)  # not asked
    set_net_output(made.state_value, 4.0)
    q = made.target_q(batch())
    assert q.tolist() == [4.0, 2.0, 6.0]
    loss, value_mean = made.value_loss(batch(), q)
    # 0.3 * 2² below and 0.7 * 2² above
    assert loss.item() == pytest.approx((1.2 + 2.8) / 3)
    assert value_mean.item() == pytest.approx(4.0)
    # 2 (0.3 * 2 - 0.7 * 2) / 3
    assert gradient_of(loss, made.state_value.layers.linears[0].bias) == pytest.approx([-1.6 / 3])


def test_targets_are_by_the_value_of_the_next_state() -> None:
    made = learner()
    set_net_output(made.state_value, 10.0)
    # 1 + 0.9 * 10 = 10; death: 1; truncation bootstraps: 10
    assert made.target_value(batch()).tolist() == pytest.approx([10.0, 1.0, 10.0])
    # 3 + 0.9³ * 10
    further = batch(reward=torch.tensor([1.0, 2.0, 3.0]), discount=torch.tensor([0.9, 0.81, 0.729]))
    assert made.target_value(further).tolist() == pytest.approx([10.0, 2.0, 10.29])


def test_critic_loss_by_hand() -> None:
    made = learner()
    set_critic_outputs(made.critics, [1.0, 1.5, 4.0], [3.0, 1.0, 0.0])
    set_net_output(made.state_value, 0.0)
    loss, error, q_mean = made.critic_loss(batch())
    # targets are 1. Errors 0, 0.5, 3 and 2, 0, -1: squares 4, 0.25, 9 + 1 = 10
    assert loss.item() == pytest.approx(14.25 / 3)
    assert error.tolist() == pytest.approx([1.0, 0.25, 2.0])  # the mean over critics, for priorities
    assert q_mean.item() == pytest.approx((1 + 1.5 + 4 + 3 + 1 + 0) / 6)
    moving = learner(CONTINUOUS)
    set_critic_outputs(moving.critics, [2.0, 1.0], [0.0, 1.0])
    set_net_output(moving.state_value, 0.0)
    # 1 + 2 a = 3, 1, -1 against 1; the second critic is right
    assert moving.critic_loss(moves())[0].item() == pytest.approx(8 / 3)


def test_discrete_actor_loss_by_hand() -> None:
    made = learner(beta=0.5)
    set_net_output(made.actor, *LOGITS)
    set_net_output(made.state_value, 4.0)
    loss, weight = made.actor_loss(batch(), torch.tensor([4.0, 2.0, 6.0]))  # advantages 0, -2, 2
    expected = [1.0, math.exp(-1), math.e]
    assert weight.tolist() == pytest.approx(expected)
    assert loss.item() == pytest.approx((expected[0] + 2 * expected[1] + 2 * expected[2]) * math.log(2) / 3)
    # by the logits: Σ_i w_i (chances - the one taken) / 3
    total = sum(expected)
    slopes = [(p * total - w) / 3 for p, w in zip((0.5, 0.25, 0.25), expected, strict=True)]
    assert gradient_of(loss, made.actor.layers.linears[0].bias) == pytest.approx(slopes)


def test_forbidden_choices_have_no_share() -> None:
    made = learner(beta=0.0)  # behaviour cloning
    set_net_output(made.actor, *LOGITS)
    mask = torch.tensor([[True, False, True]]).expand(3, 3)
    loss, weight = made.actor_loss(batch(action=torch.tensor([0, 2, 2]), mask=mask), torch.tensor([5.0, -5.0, 0.0]))
    assert weight.tolist() == [1.0, 1.0, 1.0]
    # chances 2/3 and 1/3: -(ln 2/3 + 2 ln 1/3) / 3
    assert loss.item() == pytest.approx(math.log(3) - math.log(2) / 3)
    assert gradient_of(loss, made.actor.layers.linears[0].bias)[1] == 0.0


def test_continuous_actor_loss_by_hand_also_on_the_bounds() -> None:
    made = learner(CONTINUOUS, beta=1.0)
    set_net_output(made.actor, 0.0, std=0.5)
    set_net_output(made.state_value, 0.0)
    loss, _ = made.actor_loss(moves(), torch.tensor([1.0, 0.0, -1.0]))
    # ln N(a; 0, 0.5) = -2 a² + ln 2 - 0.5 ln 2π
    constant = math.log(2) - 0.5 * math.log(2 * math.pi)
    expected = math.e * (constant - 2) + constant + math.exp(-1) * (constant - 2)
    assert loss.item() == pytest.approx(-expected / 3, rel=1e-5)
    set_net_output(made.actor, 5.0, std=0.01)  # at the bound and nearly sure
    loss, _ = made.actor_loss(moves(), torch.ones(3))
    assert all(torch.isfinite(g).all() for g in torch.autograd.grad(loss, [*made.actor.parameters()]))


def test_importance_weights_weigh_every_loss_and_not_the_priority() -> None:
    made = learner(beta=1.0)
    set_critic_outputs(made.critics, [1.0, 1.5, 4.0], [3.0, 1.0, 0.0])
    set_critic_outputs(made.target_critics, [0.0, -2.0, 2.0], [0.0, -2.0, 2.0])
    set_net_output(made.state_value, 0.0)
    set_net_output(made.actor, *LOGITS)
    found = probe(made, batch(weight=torch.tensor([1.0, 0.5, 0.1])))
    # 4 + 0.5 * 0.25 + 0.1 * 10
    assert found.metrics["critic_loss"].item() == pytest.approx(5.125 / 3)
    # 0.5 * 0.3 * 4 + 0.1 * 0.7 * 4
    assert found.metrics["value_loss"].item() == pytest.approx(0.88 / 3)
    # ln 2 (1 + 0.5 * 2 e^-2 + 0.1 * 2 e²)
    expected = (1 + math.exp(-2) + 0.2 * math.exp(2)) * math.log(2) / 3
    assert found.metrics["actor_loss"].item() == pytest.approx(expected)
    assert found.priority is not None
    assert found.priority.tolist() == pytest.approx([1.0, 0.25, 2.0])


# --- updates ---


@pytest.mark.parametrize("spaces", [DISCRETE, CONTINUOUS])
def test_gradients_change_nothing_and_are_each_networks_own(spaces: Spaces) -> None:
    made = learner(spaces, net__hidden_sizes=[8])
    shown = batch() if spaces is DISCRETE else moves()
    parts = [made.actor, made.critics, made.state_value, made.target_critics]
    before = [p for part in parts for p in weights(part)]
    probe(made, shown)
    assert same(before, [p for part in parts for p in weights(part)])
    assert not any(p.requires_grad for p in made.target_critics.parameters())
    q = made.target_q(shown)
    losses = made.actor_loss(shown, q)[0], made.critic_loss(shown)[0], made.value_loss(shown, q)[0]
    for loss, own in zip(losses, parts, strict=False):
        for part in parts[:3]:
            found = torch.autograd.grad(loss, [*part.parameters()], allow_unused=True, retain_graph=True)
            assert all((gradient is not None) == (part is own) for gradient in found)


def test_targets_follow_slowly_and_the_actor_has_its_own_learning_rate() -> None:
    made = learner(tau=0.1, lr=1e-2, actor_lr=1e-4, net__hidden_sizes=[8])
    start = weights(made.target_critics)
    nets = (made.actor, 1e-4), (made.critics, 1e-2), (made.state_value, 1e-2)
    before = [weights(net) for net, _ in nets]
    made.update(batch())
    for target, then, net in zip(weights(made.target_critics), start, weights(made.critics), strict=True):
        assert torch.allclose(target, 0.9 * then + 0.1 * net, atol=1e-7)
    # Adam's first step is as long as the learning rate
    for (net, lr), old in zip(nets, before, strict=True):
        longest = max((p - o).abs().max().item() for p, o in zip(net.parameters(), old, strict=True))
        assert longest == pytest.approx(lr, rel=0.05)


def test_the_actors_learning_rate_falls_along_a_cosine() -> None:
    made = learner(lr=1e-3, actor_lr=4e-4)
    found = []
    for fraction in (0.0, 0.25, 0.5, 1.0):
        made.set_progress(fraction)
        found.append(made.actor_optimizer.lr)
    # (1 + cos π/4) / 2 = 0.8536
    assert found == pytest.approx([4e-4, 4e-4 * 0.853553, 2e-4, 0.0], abs=1e-9)
    assert (made.critic_optimizer.lr, made.value_optimizer.lr) == (1e-3, 1e-3)
    still = learner(actor_lr_decay=False)
    still.set_progress(0.9)
    assert still.actor_optimizer.lr == still.cfg.lr


@pytest.mark.parametrize("spaces", [DISCRETE, CONTINUOUS])
def test_it_prefers_the_better_of_what_was_recorded(spaces: Spaces) -> None:
    """One step in one state. Cloning would take the choice most often recorded, or the mean of the moves, zero."""
    rng = torch.Generator().manual_seed(0)
    made = learner(spaces, net__hidden_sizes=[32], lr=1e-2, beta=5.0, tau=0.05)
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


def test_value_is_that_of_the_state() -> None:
    made = learner()
    set_net_output(made.state_value, 3.5)
    assert made.value(torch.zeros(2, 2)).tolist() == pytest.approx([3.5] * 2)


def test_what_it_collects_stays_within_bounds() -> None:
    made = learner(CONTINUOUS)
    set_net_output(made.actor, math.atanh(0.9), std=0.5)
    rng, obs = torch.Generator().manual_seed(0), torch.zeros(1000, 2)
    assert made.policy.act(obs, None, None, Phase.COLLECT, rng, 0).action.max().item() == 1.0
    assert made.policy.act(obs[:1], None, None, Phase.EVAL, rng, 0).action.item() == pytest.approx(0.9)


def test_normalised_observations_reach_all_networks() -> None:
    made = learner(normalize_obs=True)
    made.update_normalizers(Batch(obs=torch.tensor([[[1.0, 0.0]], [[3.0, 4.0]]])))
    # means 2 and 2, spreads 1 and 2
    for net in (made.actor, made.critics, made.target_critics, made.state_value):
        assert torch.allclose(net.features(torch.tensor([[3.0, 0.0]])), torch.tensor([[1.0, -1.0]]), atol=1e-5)


def test_what_it_cannot_do_is_refused_by_name() -> None:
    for space in (MultiDiscrete([2, 2]), Box(-np.inf, np.inf, (1,), np.float32), Box(-1.0, 1.0, (2, 2), np.float32)):
        with pytest.raises(UserError, match="iql needs continuous actions in a bounded one-dimensional Box"):
            learner(Spaces(OBS, space))
    with pytest.raises(UserError, match=r"iql does not support recurrent networks: set net\.recurrent=none"):
        learner(net__recurrent="gru")
    with pytest.raises(UserError, match="iql needs an environment with one agent"):
        learner(Spaces(OBS, Discrete(3), num_agents=2))


@pytest.mark.parametrize("spaces", [DISCRETE, CONTINUOUS])
def test_state_round_trip_gives_the_same_next_update(spaces: Spaces) -> None:
    shown = batch() if spaces is DISCRETE else moves()
    made, other = learner(spaces, net__hidden_sizes=[8]), learner(spaces, net__hidden_sizes=[8], seed=9)
    made.update(shown)
    other.load_state_dict(made.state_dict())
    for _ in range(3):
        first, second = made.update(shown), other.update(shown)
        assert set(first.metrics) == set(IQL.metrics)
        assert all(torch.equal(first.metrics[name], second.metrics[name]) for name in first.metrics)
    for name in ("actor", "critics", "target_critics", "state_value"):
        assert same(weights(getattr(made, name)), weights(getattr(other, name)))

"""SAC's and REDQ's targets by hand, their losses, the temperature, the delay and what they refuse."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from by_hand import CONTINUOUS, DISCRETE, ENTROPY, LOGITS, OBS, batch, peek_noise, set_critic_outputs, set_net_output
from gymnasium.spaces import Box, Discrete, MultiDiscrete
from probe import probe
from torch import Tensor, nn

import zhixing as zx
from zhixing.algorithms.sac import SoftActorCritic
from zhixing.core.batch import Batch
from zhixing.core.policy import Phase
from zhixing.core.spaces import Spaces
from zhixing.errors import UserError


def learner(spaces: Spaces = DISCRETE, name: str = "sac", **settings: Any) -> SoftActorCritic:
    base = {"net__hidden_sizes": [], "alpha": 0.5}  # one linear layer each
    cfg = zx.config.load(algorithm=name, env="Acrobot-v1", **(base | settings))
    made = zx.algorithms.get(name).make(cfg, spaces)
    assert isinstance(made, SoftActorCritic)
    return made


def moves(**fields: Any) -> Batch:
    return batch(**({"action": torch.tensor([[0.5], [0.0], [-0.5]])} | fields))


def gradient_of(loss: Tensor, parameter: Tensor) -> list[float]:
    return torch.autograd.grad(loss, [parameter])[0].flatten().tolist()


def weights(net: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in net.parameters()]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a, b, strict=True))


# --- targets ---


def test_discrete_targets_are_exact_expectations_of_themin_q_with_entropy() -> None:
    made = learner()
    set_critic_outputs(made.target_critics, [10.0, 2.0, 6.0], [4.0, 8.0, 6.0])
    set_critic_outputs(made.critics, [99.0] * 3, [99.0] * 3)  # not asked
    set_net_output(made.actor, *LOGITS)
    # the least are 4, 2, 6: 2 + 0.5 + 1.5 = 4 on average; 1 + 0.9 (4 + 0.5 H). Death: 1; truncation bootstraps
    alive = 1 + 0.9 * (4 + 0.5 * ENTROPY)
    assert made.target_value(batch()).tolist() == pytest.approx([alive, 1.0, alive])


def test_n_step_targets_use_their_own_discount() -> None:
    made = learner()
    set_critic_outputs(made.target_critics, [10.0 - 0.5 * ENTROPY] * 3, [50.0] * 3)
    set_net_output(made.actor, *LOGITS)
    # worth 10 with its entropy: 1 + 0.9 * 10; 2 (died); 3 + 0.9³ * 10 = 3 + 7.29
    shown = batch(reward=torch.tensor([1.0, 2.0, 3.0]), discount=torch.tensor([0.9, 0.81, 0.729]))
    assert made.target_value(shown).tolist() == pytest.approx([10.0, 2.0, 10.29])


def test_targets_never_come_from_a_forbidden_action() -> None:
    made = learner()
    set_critic_outputs(made.target_critics, [3.0, 1e6, 6.0], [3.0, 1e6, 6.0])
    set_net_output(made.actor, *LOGITS)
    mask = torch.tensor([[True, False, True], [False, False, False], [True, False, False]])
    # chances 2/3 and 1/3: 2 + 2 = 4, entropy ln 3 - 2/3 ln 2; death, where nothing is allowed: 1; one choice: 3 alone
    first = 1 + 0.9 * (4 + 0.5 * (math.log(3) - 2 / 3 * math.log(2)))
    assert made.target_value(batch(next_mask=mask)).tolist() == pytest.approx([first, 1.0, 3.7])


def test_continuous_targets_are_themin_q_at_a_drawn_action_with_its_entropy() -> None:
    made = learner(CONTINUOUS)
    set_critic_outputs(made.target_critics, [2.0, 1.0], [-4.0, 1.0])  # 1 + 2 a and 1 - 4 a
    set_critic_outputs(made.critics, [0.0, 99.0], [0.0, 99.0])  # not asked
    set_net_output(made.actor, 0.3, math.log(0.5))
    z = peek_noise(made)[:, 0]
    action = torch.tanh(0.3 + 0.5 * z)
    # log N(z) - ln 0.5 - ln(1 - a²)
    logp = -0.5 * z**2 - 0.5 * math.log(2 * math.pi) + math.log(2) - torch.log(1 - action**2)
    least = torch.where(action < 0, 1 + 2 * action, 1 - 4 * action)
    future = 0.9 * (least - 0.5 * logp)
    expected = 1 + future * torch.tensor([1.0, 0.0, 1.0])
    assert torch.allclose(made.target_value(moves()), expected, atol=1e-5)


def test_continuous_targets_draw_anew_each_time() -> None:
    made = learner(CONTINUOUS)
    assert not torch.equal(made.target_value(moves()), made.target_value(moves()))


def test_redq_targets_take_themin_q_of_a_random_few() -> None:
    made = learner(name="redq", critics=4, target_critics=2, alpha=1e-9)
    set_critic_outputs(made.target_critics, [1.0] * 3, [2.0] * 3, [3.0] * 3, [4.0] * 3)
    found = [round((made.target_value(batch())[0].item() - 1) / 0.9) for _ in range(1200)]
    # of 6 pairs 3 have the first, 2 of the others the second, 1 the third, and none only the fourth;
    # three standard errors are 0.043
    shares = [found.count(worth) / 1200 for worth in (1, 2, 3, 4)]
    assert shares == pytest.approx([1 / 2, 1 / 3, 1 / 6, 0.0], abs=0.043)
    assert shares[3] == 0


def test_targets_of_as_many_as_there_are_take_themin_q_of_all() -> None:
    made = learner(critics=4, target_critics=4, alpha=1e-9)
    set_critic_outputs(made.target_critics, [3.0] * 3, [2.0] * 3, [1.0] * 3, [4.0] * 3)
    assert all(made.target_value(batch())[0].item() == pytest.approx(1.9) for _ in range(20))


def test_redq_has_ten_critics_of_which_targets_take_two_and_delays_its_actor() -> None:
    made = learner(name="redq")
    assert made.critics(torch.zeros(5, 2)).shape == (10, 5, 3)
    assert (made.cfg.target_critics, made.cfg.policy_delay, made.cfg.updates_per_step) == (2, 20, 20.0)


# --- losses ---


def test_critic_loss_by_hand() -> None:
    made = learner(alpha=1e-9)
    set_critic_outputs(made.critics, [1.0, 1.5, 4.0], [3.0, 1.0, 0.0])
    set_critic_outputs(made.target_critics, [0.0] * 3, [0.0] * 3)
    loss, error, q = made.critic_loss(batch())
    # targets are 1. Errors 0, 0.5, 3 and 2, 0, -1: half squares 2, 0.125, 4.5 + 0.5 = 5
    assert loss.item() == pytest.approx(7.125 / 3)
    assert error.tolist() == pytest.approx([1.0, 0.25, 2.0])  # the mean over critics, for priorities
    assert q.tolist() == [[1.0, 1.5, 4.0], [3.0, 1.0, 0.0]]


def test_importance_weights_weigh_each_error_and_not_its_priority() -> None:
    made = learner(alpha=1e-9)
    set_critic_outputs(made.critics, [1.0, 1.5, 4.0], [3.0, 1.0, 0.0])
    set_critic_outputs(made.target_critics, [0.0] * 3, [0.0] * 3)
    found = probe(made, batch(weight=torch.tensor([1.0, 0.5, 0.1])))
    # 2 + 0.5 * 0.125 + 0.1 * 5
    assert found.metrics["critic_loss"].item() == pytest.approx(2.5625 / 3)
    assert found.priority is not None
    assert found.priority.tolist() == pytest.approx([1.0, 0.25, 2.0])


def test_critic_loss_judges_the_moves_taken() -> None:
    made = learner(CONTINUOUS, alpha=1e-9)
    set_critic_outputs(made.critics, [2.0, 1.0], [0.0, 1.0])
    set_critic_outputs(made.target_critics, [0.0, 0.0], [0.0, 0.0])
    loss, error, _ = made.critic_loss(moves())
    # 1 + 2 a = 2, 1, 0 against 1: half squares 0.5, 0, 0.5; the second critic is right
    assert loss.item() == pytest.approx(1 / 3)
    assert error.tolist() == pytest.approx([0.5, 0.0, 0.5])


def test_the_critics_gradient_doesnt_pass_through_the_target() -> None:
    made = learner(alpha=1e-9)
    set_critic_outputs(made.critics, [3.0] * 3, [3.0] * 3)
    set_critic_outputs(made.target_critics, [0.0] * 3, [0.0] * 3)
    loss, _, _ = made.critic_loss(batch())
    # each action was taken once in three steps, two too high
    assert gradient_of(loss, made.critics.towers.biases[0]) == pytest.approx([2 / 3] * 6)
    assert torch.autograd.grad(made.critic_loss(batch())[0], [*made.actor.parameters()], allow_unused=True) == (
        None,
        None,
    )


def test_discrete_actor_loss_by_hand() -> None:
    made = learner()
    set_critic_outputs(made.critics, [10.0, 2.0, 6.0], [4.0, 8.0, 6.0])  # the least are 4, 2, 6
    set_net_output(made.actor, *LOGITS)
    loss, entropy = made.actor_loss(batch())
    assert loss.item() == pytest.approx(-0.5 * ENTROPY - 4.0)
    assert entropy.item() == pytest.approx(ENTROPY)
    # by the logits: p (f - mean f), f = 0.5 ln p - q
    p = np.array([0.5, 0.25, 0.25])
    f = 0.5 * np.log(p) - np.array([4.0, 2.0, 6.0])
    expected = p * (f - (p * f).sum())
    assert gradient_of(loss, made.actor.layers.linears[0].bias) == pytest.approx(expected.tolist(), abs=1e-6)


def test_a_forbidden_action_has_no_part_in_the_actors_loss() -> None:
    made = learner()
    set_critic_outputs(made.critics, [3.0, 1e6, 6.0], [3.0, 1e6, 6.0])
    set_net_output(made.actor, *LOGITS)
    mask = torch.tensor([[True, False, True]]).expand(3, 3)
    loss, entropy = made.actor_loss(batch(mask=mask))
    # chances 2/3 and 1/3
    left = math.log(3) - 2 / 3 * math.log(2)
    assert entropy.item() == pytest.approx(left)
    assert loss.item() == pytest.approx(-0.5 * left - 4.0)
    assert gradient_of(loss, made.actor.layers.linears[0].bias)[1] == 0.0


@pytest.mark.parametrize(("name", "slope"), [("sac", -4.0), ("redq", 1.0)])
def test_continuous_actor_loss_by_hand(name: str, slope: float) -> None:
    settings = {"critics": 2, "target_critics": 2} if name == "sac" else {"critics": 2, "target_critics": 1}
    made = learner(CONTINUOUS, name=name, **settings)
    # for actions above zero the least is -4 a; the mean of an ensemble is (6 a - 4 a) / 2 = a
    set_critic_outputs(made.critics, [6.0, 0.0], [-4.0, 0.0])
    set_net_output(made.actor, 0.3, math.log(0.01))
    z = peek_noise(made)[:, 0]
    a = torch.tanh(0.3 + 0.01 * z)
    logp = -0.5 * z**2 - 0.5 * math.log(2 * math.pi) - math.log(0.01) - torch.log(1 - a**2)
    loss, entropy = made.actor_loss(moves())
    assert loss.item() == pytest.approx((0.5 * logp - slope * a).mean().item(), rel=1e-5)
    assert entropy.item() == pytest.approx(-logp.mean().item(), rel=1e-5)
    # d logp = 2 a dm, d a = (1 - a²) dm; by the logarithm of the spread m moves 0.01 z, and logp by -1 besides
    by_mean = 0.5 * 2 * a - slope * (1 - a**2)
    by_spread = by_mean * 0.01 * z - 0.5
    expected = [by_mean.mean().item(), by_spread.mean().item()]
    assert gradient_of(loss, made.actor.layers.linears[0].bias) == pytest.approx(expected, rel=1e-4)


# --- temperature ---


def test_temperature_falls_where_entropy_is_above_its_target_and_rises_below() -> None:
    for target, sign in ((0.5, -1), (2.0, 1)):
        made = learner(alpha=None, target_entropy=target, lr=1e-2)
        set_net_output(made.actor, *LOGITS)  # entropy 1.04
        loss = made.alpha_loss(torch.tensor(ENTROPY), batch())
        assert gradient_of(loss, made.log_alpha[0]) == pytest.approx([ENTROPY - target])
        assert made.alpha.item() == 1.0
        made.update(batch())
        # Adam's first step is as long as the learning rate
        assert made.alpha.item() == pytest.approx(math.exp(sign * 1e-2), rel=1e-5)


def test_a_given_temperature_stays() -> None:
    made = learner(alpha=0.3)
    assert set(probe(made, batch()).gradients) == {"critic_optimizer", "actor_optimizer"}
    for _ in range(3):
        told = made.update(batch()).metrics["alpha"]
    assert told.item() == made.alpha.item() == pytest.approx(0.3)


def test_the_actors_loss_doesnt_move_the_temperature() -> None:
    made = learner(alpha=None)
    loss, _ = made.actor_loss(batch())
    assert torch.autograd.grad(loss, [made.log_alpha[0]], allow_unused=True) == (None,)


def test_the_usual_target_of_entropy() -> None:
    assert learner().target_entropy(batch()) == pytest.approx(0.5 * math.log(3))
    assert learner(Spaces(OBS, Box(-1.0, 1.0, (4,), np.float32))).target_entropy(batch()) == -4.0
    assert learner(target_entropy=0.0).target_entropy(batch()) == 0.0


@pytest.mark.parametrize("name", ["sac", "redq", "cql"])
def test_a_mask_lowers_the_target_of_entropy_state_by_state(name: str) -> None:
    """Allowed are 1, 2 and 3 of 3 actions. The most entropy is log 1, log 2 and log 3; the target is half of its mean,
    so a policy that spreads evenly over what is allowed has twice the target, and its temperature falls."""
    mask = torch.tensor([[0, 1, 0], [1, 1, 0], [1, 1, 1]], dtype=torch.bool)
    masked = batch(mask=mask, next_mask=mask, action=torch.tensor([1, 0, 2]))
    made = learner(name=name, alpha=None, lr=1e-2, policy_delay=1)
    target = 0.5 * (math.log(1) + math.log(2) + math.log(3)) / 3
    assert float(made.target_entropy(masked)) == pytest.approx(target)
    set_net_output(made.actor, 0.0, 0.0, 0.0)
    entropy = made.actor_loss(masked)[1]
    assert float(entropy) == pytest.approx(2 * target)
    assert gradient_of(made.alpha_loss(entropy, masked), made.log_alpha[0]) == pytest.approx([target])
    made.update(masked)
    assert made.alpha.item() == pytest.approx(math.exp(-1e-2), rel=1e-5)
    assert learner(name=name, target_entropy=0.7).target_entropy(masked) == 0.7


# --- updates ---


def test_the_actor_and_the_temperature_move_every_so_many_updates() -> None:
    made = learner(policy_delay=3, alpha=None, net__hidden_sizes=[8])
    moved, told = [], []
    for _ in range(7):
        actor, critics, alpha = weights(made.actor), weights(made.critics), made.alpha.item()
        told.append(made.update(batch()).metrics["actor_loss"].item())
        moved.append(not same(actor, weights(made.actor)))
        assert moved[-1] == (alpha != made.alpha.item())
        assert not same(critics, weights(made.critics))
    assert moved == [False, False, True, False, False, True, False]
    assert told[0] == told[1] == 0.0 != told[2] == told[3] == told[4] != told[5] == told[6]


def test_targets_follow_slowly() -> None:
    made = learner(tau=0.1, net__hidden_sizes=[8])
    start = weights(made.target_critics)
    assert same(start, weights(made.critics))
    made.update(batch())
    assert not same(start, weights(made.critics))
    for target, before, net in zip(weights(made.target_critics), start, weights(made.critics), strict=True):
        assert torch.allclose(target, 0.9 * before + 0.1 * net, atol=1e-7)


@pytest.mark.parametrize("spaces", [DISCRETE, CONTINUOUS])
def test_gradients_change_nothing_and_are_each_networks_own(spaces: Spaces) -> None:
    made = learner(spaces, net__hidden_sizes=[8], alpha=None)
    shown = batch() if spaces is DISCRETE else moves()
    parts = (made.actor, made.critics, made.target_critics, made.log_alpha)
    before = [p for part in parts for p in weights(part)]
    probe(made, shown)
    assert same(before, [p for part in parts for p in weights(part)])
    assert not any(p.requires_grad for p in made.target_critics.parameters())
    # what the critics take is the gradient of their own loss, not the actor's too
    state = made.rng.get_state()
    found = probe(made, shown).gradients["critic_optimizer"][0].clone()
    made.rng.set_state(state)
    assert torch.equal(found, made.critic_optimizer.compute_gradients(made.critic_loss(shown)[0])[0])


def test_actor_lr_is_the_actors_alone() -> None:
    made = learner(lr=1e-2, actor_lr=1e-4, net__hidden_sizes=[8])
    actor, critics = weights(made.actor), weights(made.critics)
    made.update(batch())
    # Adam's first step is as long as the learning rate
    for net, before, lr in ((made.actor, actor, 1e-4), (made.critics, critics, 1e-2)):
        longest = max((p - old).abs().max().item() for p, old in zip(net.parameters(), before, strict=True))
        assert longest == pytest.approx(lr, rel=0.05)


def test_critics_start_different() -> None:
    made = learner(net__hidden_sizes=[8])
    first, second = made.critics(torch.ones(1, 2))
    assert not torch.equal(first, second)


def test_normalised_observations_reach_actor_critics_and_targets() -> None:
    made = learner(normalize_obs=True)
    made.update_normalizers(Batch(obs=torch.tensor([[[1.0, 0.0]], [[3.0, 4.0]]])))
    # means 2 and 2, spreads 1 and 2
    for net in (made.actor, made.critics, made.target_critics):
        assert torch.allclose(net.features(torch.tensor([[3.0, 0.0]])), torch.tensor([[1.0, -1.0]]), atol=1e-5)


# --- acting ---


def test_actions_are_drawn_while_collecting_and_the_likeliest_in_evaluations() -> None:
    made = learner()
    set_net_output(made.actor, *LOGITS)
    rng, obs = torch.Generator().manual_seed(0), torch.zeros(20_000, 2)
    taken = made.policy.act(obs, None, None, Phase.COLLECT, rng, 0).action
    # three standard errors are 0.011
    assert (taken.bincount(minlength=3) / 20_000).tolist() == pytest.approx([0.5, 0.25, 0.25], abs=0.011)
    assert made.policy.act(obs, None, None, Phase.EVAL, rng, 0).action.unique().tolist() == [0]
    mask = torch.tensor([False, True, True]).expand(20_000, 3)
    for phase in Phase:
        assert 0 not in made.policy.act(obs, None, mask, phase, rng, 0).action
    moving = learner(CONTINUOUS)
    set_net_output(moving.actor, 0.3, math.log(0.5))
    drawn = moving.policy.act(obs, None, None, Phase.COLLECT, rng, 0).action.atanh()
    assert drawn.mean().item() == pytest.approx(0.3, abs=0.011)
    assert drawn.std().item() == pytest.approx(0.5, rel=0.03)
    assert moving.policy.act(obs[:1], None, None, Phase.EVAL, rng, 0).action.item() == pytest.approx(math.tanh(0.3))


def test_spreads_stay_within_bounds() -> None:
    made = learner(CONTINUOUS)
    set_net_output(made.actor, 0.0, 50.0)
    assert made.actor(torch.zeros(1, 2)).normal.log_std.item() == 2.0
    set_net_output(made.actor, 0.0, -50.0)
    assert made.actor(torch.zeros(1, 2)).normal.log_std.item() == -20.0


def test_value_is_that_of_acting_as_usual() -> None:
    made = learner()
    set_critic_outputs(made.critics, [10.0, 2.0, 6.0], [4.0, 8.0, 6.0])
    set_net_output(made.actor, *LOGITS)
    assert made.value(torch.zeros(2, 2)).tolist() == pytest.approx([4 + 0.5 * ENTROPY] * 2)
    moving = learner(CONTINUOUS)
    set_critic_outputs(moving.critics, [2.0, 1.0], [-4.0, 1.0])
    set_net_output(moving.actor, float(np.arctanh(0.5)), 0.0)
    assert moving.value(torch.zeros(2, 2)).tolist() == pytest.approx([-1.0] * 2)  # the least of 2 and -1


# --- what is refused, saved and told ---


@pytest.mark.parametrize("name", ["sac", "redq"])
def test_what_it_cannot_do_is_refused_by_name(name: str) -> None:
    for space in (MultiDiscrete([2, 2]), Box(-np.inf, np.inf, (1,), np.float32), Box(-1.0, 1.0, (2, 2), np.float32)):
        with pytest.raises(UserError, match=f"{name} needs continuous actions in a bounded one-dimensional Box"):
            learner(Spaces(OBS, space), name=name)
    with pytest.raises(UserError, match=rf"{name} does not support recurrent networks: set net\.recurrent=none"):
        learner(name=name, net__recurrent="gru")
    with pytest.raises(UserError, match="target_critics=4 must be at most critics=3"):
        learner(name=name, critics=3, target_critics=4)
    with pytest.raises(UserError, match=f"{name} needs an environment with one agent"):
        learner(Spaces(OBS, Discrete(3), num_agents=2), name=name)


def test_values_approach_the_targets() -> None:
    made = learner(net__hidden_sizes=[8], lr=1e-2)
    shown = batch(terminated=torch.ones(3, dtype=torch.bool), reward=torch.tensor([1.0, -2.0, 3.0]))
    first = made.update(shown).metrics["critic_loss"].item()
    for _ in range(400):
        last = made.update(shown).metrics["critic_loss"].item()
    assert last < 0.01 * first


@pytest.mark.parametrize("spaces", [DISCRETE, CONTINUOUS])
def test_state_round_trip_gives_the_same_next_update(spaces: Spaces) -> None:
    settings = {"net__hidden_sizes": [8], "alpha": None, "policy_delay": 2}
    made, other = learner(spaces, **settings), learner(spaces, **settings, seed=9)
    shown = batch() if spaces is DISCRETE else moves()
    made.update(shown)
    other.load_state_dict(made.state_dict())
    for _ in range(3):
        first, second = made.update(shown), other.update(shown)
        assert all(torch.equal(first.metrics[name], second.metrics[name]) for name in first.metrics)
    for name in ("actor", "critics", "target_critics", "log_alpha"):
        assert same(weights(getattr(made, name)), weights(getattr(other, name)))


def test_what_an_update_tells_is_what_it_names() -> None:
    assert set(learner().update(batch()).metrics) == set(SoftActorCritic.metrics)

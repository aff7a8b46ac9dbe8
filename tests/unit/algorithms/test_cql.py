"""CQL's penalty by hand and by exact integrals, its weight, and targets without entropy. The rest is SAC's."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from by_hand import CONTINUOUS, DISCRETE, ENTROPY, LOGITS, OBS, batch, set_critic_outputs, set_net_output
from gymnasium.spaces import Box, Discrete, MultiDiscrete
from probe import probe
from torch import Tensor, nn

import zhixing as zx
from zhixing.algorithms.sac import SoftActorCritic, make_sac
from zhixing.core.batch import Batch
from zhixing.core.spaces import Spaces
from zhixing.errors import UserError


def learner(spaces: Spaces = DISCRETE, **settings: Any) -> SoftActorCritic:
    base = {"net__hidden_sizes": [], "alpha": 0.5}  # one linear layer each
    cfg = zx.config.load(algorithm="cql", env="Acrobot-v1", **(base | settings))
    made = zx.algorithms.get("cql").make(cfg, spaces)
    assert isinstance(made, SoftActorCritic)
    return made


def moves(**fields: Any) -> Batch:
    return batch(**({"action": torch.tensor([[0.5], [0.0], [-0.5]])} | fields))


def penalty(made: SoftActorCritic, shown: Batch) -> Tensor:
    assert made.penalty is not None
    q = made.critics.q_of_actions(shown.obs, shown.action)
    return made.penalty(made.critics, made.actor, shown, q, made.rng)


def weights(net: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in net.parameters()]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a, b, strict=True))


# --- the penalty ---


def test_penalty_on_choices_by_hand() -> None:
    made = learner()
    set_critic_outputs(made.critics, [math.log(1), math.log(2), math.log(5)], [0.0, 0.0, 0.0])
    # ln 8 - (ln 1 + ln 2 + ln 5) / 3 and ln 3
    found = penalty(made, batch())
    assert found.tolist() == pytest.approx([math.log(8) - math.log(10) / 3, math.log(3)])
    (gradient,) = torch.autograd.grad(found.sum(), [made.critics.towers.biases[0]])
    # chances by values less how often each was taken: 1/8, 2/8, 5/8 and thirds, less thirds
    assert gradient.flatten().tolist() == pytest.approx(
        [1 / 8 - 1 / 3, 1 / 4 - 1 / 3, 5 / 8 - 1 / 3, 0.0, 0.0, 0.0], abs=1e-6
    )


def test_forbidden_choices_are_not_held_down() -> None:
    made = learner()
    set_critic_outputs(made.critics, [math.log(1), 50.0, math.log(5)], [0.0, 0.0, 0.0])
    mask = torch.tensor([[True, False, True]]).expand(3, 3)
    found = penalty(made, batch(action=torch.tensor([0, 2, 2]), mask=mask))
    # ln 6 - 2/3 ln 5 and ln 2
    assert found.tolist() == pytest.approx([math.log(6) - 2 / 3 * math.log(5), math.log(2)])
    (gradient,) = torch.autograd.grad(found.sum(), [made.critics.towers.biases[0]])
    assert gradient[:, 0, 1].tolist() == [0.0, 0.0]


def test_importance_weights_weigh_the_penalty() -> None:
    made = learner()
    set_critic_outputs(made.critics, [math.log(1), math.log(2), math.log(5)], [0.0, 0.0, 0.0])
    found = penalty(made, batch(weight=torch.tensor([1.0, 0.5, 0.1])))
    # ln 8 + 0.5 (ln 8 - ln 2) + 0.1 (ln 8 - ln 5)
    first = math.log(8) + 0.5 * math.log(4) + 0.1 * math.log(8 / 5)
    assert found.tolist() == pytest.approx([first / 3, 1.6 * math.log(3) / 3])


@pytest.mark.parametrize(("mean", "std"), [(0.0, 1.0), (0.8, 0.5)])
def test_penalty_on_moves_is_the_integral_over_all_of_them(mean: float, std: float) -> None:
    made = learner(CONTINUOUS, penalty_samples=20_000)
    set_critic_outputs(made.critics, [3.0, 1.0], [0.0, -2.0])  # 1 + 3 a, and -2 everywhere
    set_net_output(made.actor, mean, math.log(std))
    # ∫ exp(1 + 3 a) da = e (e³ - e⁻³) / 3 and 2 e⁻²; the recorded moves are worth 1 and -2 on average
    exact = [math.log((math.exp(3) - math.exp(-3)) / 3), math.log(2)]
    assert penalty(made, moves()).tolist() == pytest.approx(exact, abs=0.03)


def test_penalty_on_moves_by_the_very_moves_drawn() -> None:
    made = learner(CONTINUOUS, penalty_samples=2)
    set_critic_outputs(made.critics, [2.0, 1.0], [-1.0, 0.0])
    set_net_output(made.actor, 0.3, math.log(0.5))
    state = made.rng.get_state()
    assert made.penalty is not None
    actions, logp = made.penalty.sample_actions(made.actor, moves(), made.rng)
    assert actions.shape == (6, 3, 1)
    assert actions.abs().max() < 1
    # the first two are even, with density 1/2; of the others log N(z) - ln 0.5 - ln(1 - a²), z = (atanh a - 0.3) / 0.5
    z = (actions[2:, :, 0].atanh() - 0.3) / 0.5
    density = -0.5 * z**2 - 0.5 * math.log(2 * math.pi) + math.log(2) - torch.log(1 - actions[2:, :, 0] ** 2)
    assert torch.allclose(logp[:2], torch.tensor(-math.log(2)))
    assert torch.allclose(logp[2:], density, atol=1e-4)
    made.rng.set_state(state)
    for k, (slope, constant) in enumerate(((2.0, 1.0), (-1.0, 0.0))):
        everywhere = (torch.exp(slope * actions[..., 0] + constant) / logp.exp()).mean(0).log()  # [B]
        recorded = slope * torch.tensor([0.5, 0.0, -0.5]) + constant
        made.rng.set_state(state)
        assert penalty(made, moves())[k].item() == pytest.approx((everywhere - recorded).mean().item(), rel=1e-4)


def test_moves_are_drawn_by_the_policy_of_the_next_state_too() -> None:
    made = learner(CONTINUOUS, penalty_samples=200)
    with torch.no_grad():
        made.actor.layers.linears[0].weight.copy_(torch.tensor([[1.0, 0.0], [0.0, 0.0]]))  # the mean is obs[0]
        made.actor.layers.linears[0].bias.copy_(torch.tensor([0.0, -3.0]))
    here, there = torch.tensor([[1.0, 0.0]]).expand(3, 2), torch.tensor([[-1.0, 0.0]]).expand(3, 2)
    assert made.penalty is not None
    actions, _ = made.penalty.sample_actions(made.actor, moves(obs=here, next_obs=there), made.rng)
    kinds = actions.view(3, 200, 3)
    # evenly around 0 with spread 0.577, else close to tanh 1 = 0.76 and -0.76
    assert kinds.mean((1, 2)).tolist() == pytest.approx([0.0, 0.7616, -0.7616], abs=0.08)
    assert kinds[0].std().item() == pytest.approx(3**-0.5, rel=0.1)


def test_no_gradient_of_the_penalty_reaches_the_actor() -> None:
    made = learner(CONTINUOUS, net__hidden_sizes=[8])
    found = torch.autograd.grad(penalty(made, moves()).sum(), [*made.actor.parameters()], allow_unused=True)
    assert all(gradient is None for gradient in found)


# --- its place in the update ---


@pytest.mark.parametrize("spaces", [DISCRETE, CONTINUOUS])
def test_the_critics_descend_both_terms_and_the_actor_its_own(spaces: Spaces) -> None:
    made = learner(spaces, penalty=2.0, net__hidden_sizes=[8])
    shown = batch() if spaces is DISCRETE else moves()
    state = made.rng.get_state()
    found = probe(made, shown)
    critic = found.gradients["critic_optimizer"][0].clone()
    assert set(found.gradients) == {"critic_optimizer", "actor_optimizer"}
    made.rng.set_state(state)
    bellman = made.critic_loss(shown)[0]
    held = penalty(made, shown)
    assert found.metrics["critic_loss"].item() == pytest.approx((bellman + 2.0 * held.sum()).item())
    assert found.metrics["penalty"].item() == pytest.approx(held.mean().item())
    assert torch.allclose(critic, made.critic_optimizer.compute_gradients(bellman + 2.0 * held.sum())[0], atol=1e-6)


def test_a_vanishing_weight_leaves_sac() -> None:
    shown = batch()
    made = learner(penalty=1e-12, entropy_in_targets=True, net__hidden_sizes=[8])
    cfg = zx.config.load(algorithm="sac", env="Acrobot-v1", net__hidden_sizes=[8], alpha=0.5)
    sac = make_sac(cfg, DISCRETE)
    for _ in range(3):
        made.update(shown)
        sac.update(shown)
    for name in ("actor", "critics", "target_critics"):
        for mine, theirs in zip(weights(getattr(made, name)), weights(getattr(sac, name)), strict=True):
            assert torch.allclose(mine, theirs, atol=1e-5)


def test_a_fixed_weight_stays_and_a_learned_one_keeps_the_penalty_near_its_target() -> None:
    made = learner(penalty=3.0)
    made.update(batch())
    assert made.update(batch()).metrics["penalty_weight"].item() == pytest.approx(3.0)
    for target, sign in ((0.5, 1), (2.0, -1)):  # ln 3 = 1.0986 lies between
        made = learner(penalty=3.0, penalty_target=target, lr=1e-2)
        set_critic_outputs(made.critics, [0.0] * 3, [0.0] * 3)
        assert made.penalty is not None
        loss = made.penalty.weight_loss(torch.full((2,), math.log(3)))
        assert loss is not None
        (gradient,) = torch.autograd.grad(loss, [made.penalty.log_weight])
        assert gradient.item() == pytest.approx(3.0 * (target - math.log(3)))
        made.update(batch())
        # Adam's first step is as long as the learning rate
        assert made.penalty.weight.item() == pytest.approx(3.0 * math.exp(sign * 1e-2), rel=1e-5)


def test_targets_count_entropy_only_where_asked() -> None:
    for entropy, worth in ((False, 4.0), (True, 4.0 + 0.5 * ENTROPY)):
        made = learner(entropy_in_targets=entropy)
        set_critic_outputs(
            made.target_critics, [10.0, 2.0, 6.0], [4.0, 8.0, 6.0]
        )  # the least are 4, 2, 6: 4 on average
        set_critic_outputs(made.critics, [10.0, 2.0, 6.0], [4.0, 8.0, 6.0])
        set_net_output(made.actor, *LOGITS)
        alive = 1 + 0.9 * worth
        assert made.target_value(batch()).tolist() == pytest.approx([alive, 1.0, alive])
        assert made.value(torch.zeros(1, 2)).tolist() == pytest.approx([worth])
        assert made.actor_loss(batch())[0].item() == pytest.approx(-4.0 - 0.5 * ENTROPY)  # the actor always does
    moving = learner(CONTINUOUS)
    set_critic_outputs(moving.target_critics, [0.0, 7.0], [0.0, 8.0])
    assert moving.target_value(moves()).tolist() == pytest.approx([1 + 0.9 * 7, 1.0, 1 + 0.9 * 7])


def test_it_is_held_near_what_was_recorded_where_sac_is_not() -> None:
    """One state and moves from -0.6 to 0.2, the better the further right. Beyond nothing is known: SAC goes there."""
    action = torch.linspace(-0.6, 0.2, 64).unsqueeze(-1)
    zeros, ended = torch.zeros(64, 2), torch.ones(64, dtype=torch.bool)
    rows = {"obs": zeros, "next_obs": zeros, "action": action, "reward": action[:, 0], "terminated": ended}
    shown = batch(**rows, truncated=~ended, discount=torch.ones(64), index=torch.arange(64))
    ends = []
    for weight in (1e-9, 1.0):
        made = learner(CONTINUOUS, net__hidden_sizes=[32], lr=1e-2, alpha=0.01, penalty=weight, penalty_samples=4)
        for _ in range(200):
            made.update(shown)
        ends.append(made.actor(torch.zeros(1, 2)).mode().item())
    assert ends[0] > 0.8
    assert -0.6 < ends[1] < 0.3


# --- what is refused, saved and told ---


def test_what_it_cannot_do_is_refused_by_name() -> None:
    for space in (MultiDiscrete([2, 2]), Box(-np.inf, np.inf, (1,), np.float32)):
        with pytest.raises(UserError, match="cql needs continuous actions in a bounded one-dimensional Box"):
            learner(Spaces(OBS, space))
    with pytest.raises(UserError, match=r"cql does not support recurrent networks: set net\.recurrent=none"):
        learner(net__recurrent="gru")
    with pytest.raises(UserError, match="cql needs an environment with one agent"):
        learner(Spaces(OBS, Discrete(3), num_agents=2))
    with pytest.raises(UserError, match="unknown setting 'penalty'"):
        zx.config.load(algorithm="sac", env="Acrobot-v1", penalty=1.0)


@pytest.mark.parametrize("spaces", [DISCRETE, CONTINUOUS])
def test_state_round_trip_gives_the_same_next_update(spaces: Spaces) -> None:
    shown = batch() if spaces is DISCRETE else moves()
    settings = {"net__hidden_sizes": [8], "alpha": None, "penalty_target": 1.0}
    made, other = learner(spaces, **settings), learner(spaces, **settings, seed=9)
    made.update(shown)
    other.load_state_dict(made.state_dict())
    for _ in range(3):
        first, second = made.update(shown), other.update(shown)
        assert set(first.metrics) == set(made.metrics)
        assert all(torch.equal(first.metrics[name], second.metrics[name]) for name in first.metrics)
    for name in ("actor", "critics", "target_critics", "penalty"):
        assert same(weights(getattr(made, name)), weights(getattr(other, name)))


def test_only_cql_tells_its_penalty() -> None:
    assert {"penalty", "penalty_weight"} <= set(learner().metrics)
    assert "penalty" not in SoftActorCritic.metrics

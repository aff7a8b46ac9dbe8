"""A2C's and AC's advantages and losses by hand, and what each of their settings does to an update."""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from by_hand import column, flag_at, named_weights
from gymnasium.spaces import Box, Dict, Discrete
from probe import probe
from torch import Tensor, nn

import zhixing as zx
from zhixing.algorithms.a2c import A2C
from zhixing.core.batch import Batch
from zhixing.core.policy import Phase
from zhixing.core.spaces import Spaces
from zhixing.core.tree import tree_map
from zhixing.errors import UserError

OBS = Box(-99.0, 99.0, (1,), np.float32)
SPACES = Spaces(OBS, Discrete(3))
HALVES = [math.log(0.5), math.log(0.25), math.log(0.25)]  # logits of a policy with entropy 1.5 ln 2
ENTROPY = 1.5 * math.log(2)


def make_learner(name: str = "a2c", plain: bool = True, spaces: Spaces = SPACES, **settings: Any) -> A2C:
    """A `plain` one has no layers but its heads; its critic says what is data, its actor likes the first action."""
    base = {"gamma": 0.5, "num_envs": 1, "max_grad_norm": None, "net__hidden_sizes": [8]}
    cfg = zx.config.load(algorithm=name, env="Acrobot-v1", **(base | settings))
    learner = zx.algorithms.get(name).make(cfg, spaces, net=(lambda space: nn.Identity()) if plain else None)
    assert isinstance(learner, A2C)
    if plain:
        with torch.no_grad():
            learner.net.value_head.linear.weight.fill_(1.0)
            learner.net.policy_head.linear.weight.zero_()
            if spaces is SPACES:
                learner.net.policy_head.linear.bias.copy_(torch.tensor(HALVES))
    return learner


def rollout(**fields: Any) -> Batch:
    """Three steps from places worth 1, 2 and 3. What the second led to was worth 7, what the last led to 8."""
    never = torch.zeros(3, 1, dtype=torch.bool)
    base = {
        "obs": column(1.0, 2.0, 3.0)[..., None],
        "next_obs": column(2.0, 7.0, 8.0)[..., None],
        "action": torch.tensor([[0], [1], [0]]),
        "reward": column(1.0, 1.0, 1.0),
        "value": column(1.0, 2.0, 3.0),
        "logp": column(0.0, 0.0, 0.0),
        "terminated": never,
        "truncated": never,
    }
    return Batch(**{**base, **fields})


def prepared(learner: A2C, data: Batch) -> Batch:
    """What an update hands to the losses."""
    with mock.patch.object(learner, "gradient_step", wraps=learner.gradient_step) as losses:
        learner.update(data)
    return losses.call_args.args[0]


def advantages(learner: A2C, **fields: Any) -> list[float]:
    data = prepared(learner, rollout(**fields))
    assert torch.allclose(data.returns, data.advantage + data.value)
    return data.advantage.flatten().tolist()


def by_parameter(learner: A2C) -> dict[str, Tensor]:
    """What `gradients` result last, by parameter."""
    result = dict(zip(learner.optimizer.parameters, learner.optimizer._gradient_views, strict=True))
    return {name: result[parameter].clone() for name, parameter in learner.net.named_parameters()}


# --- advantages ---


def test_ac_looks_one_step_ahead() -> None:
    # r + 0.5 V' - V: 1 + 1 - 1, 1 + 1.5 - 2, and the last, 1 + 4 - 3, goes on with what follows the rollout
    assert advantages(make_learner("ac")) == pytest.approx([1.0, 0.5, 2.0])
    # truncated: 1 + 3.5 - 2, from what it really led to; dead: 1 - 2
    assert advantages(make_learner("ac"), truncated=flag_at(1)) == pytest.approx([1.0, 2.5, 2.0])
    assert advantages(make_learner("ac"), terminated=flag_at(1)) == pytest.approx([1.0, -1.0, 2.0])


def test_a2c_looks_to_the_end_of_the_rollout() -> None:
    # returns 1 + 4 = 5, 1 + 2.5 = 3.5, 1 + 1.75 = 2.75
    assert advantages(make_learner()) == pytest.approx([1.75, 1.5, 2.0])


def test_a2c_goes_on_with_the_value_at_truncation_and_with_nothing_at_death() -> None:
    # 1 + 3.5 = 4.5, before it 1 + 2.25 = 3.25; the next episode's rewards don't enter
    assert advantages(make_learner(), truncated=flag_at(1)) == pytest.approx([2.25, 2.5, 2.0])
    # 1, before it 1.5
    assert advantages(make_learner(), terminated=flag_at(1)) == pytest.approx([0.5, -1.0, 2.0])
    # dead in the last step: 1, 1.5, 1.75
    assert advantages(make_learner(), terminated=flag_at(2)) == pytest.approx([0.75, -0.5, -2.0])


def test_gae_weighs_steps_ahead_less_and_less() -> None:
    # errors 1, 0.5, 2, each with 0.5 * 0.5 of what follows: 2, 0.5 + 0.5, 1 + 0.25
    assert advantages(make_learner(gae_lambda=0.5)) == pytest.approx([1.25, 1.0, 2.0])
    # errors 1, 2.5, 2; the trace ends with the episode: 1 + 0.25 * 2.5
    assert advantages(make_learner(gae_lambda=0.5), truncated=flag_at(1)) == pytest.approx([1.625, 2.5, 2.0])


def test_values_are_those_noted_while_acting() -> None:
    # 1 + 0.5 * 20 - 10, 1 + 0.5 * 30 - 20, 1 + 0.5 * 8 - 30
    assert advantages(make_learner("ac"), value=column(10.0, 20.0, 30.0)) == pytest.approx([1.0, -4.0, -25.0])


def test_environments_are_apart() -> None:
    learner = make_learner(num_envs=2)
    one, other = rollout(truncated=flag_at(1)), rollout(terminated=flag_at(1))
    both = prepared(learner, Batch.cat([one, other], 1))
    expected = torch.tensor([[2.25, 0.5], [2.5, -1.0], [2.0, 2.0]])
    assert torch.allclose(both.advantage, expected)


# --- losses ---


def losses(**fields: Any) -> Batch:
    base = {
        "obs": column(1.0, 2.0)[..., None],
        "action": torch.tensor([[0], [1]]),
        "advantage": column(2.0, -1.0),
        "returns": column(3.0, 1.0),
    }
    return Batch(**{**base, **fields})


def test_losses_by_hand() -> None:
    told = probe(make_learner(), losses(), "gradient_step").metrics
    # -(2 ln 0.5 - ln 0.25) / 2 = -(-2 + 2) ln 2 / 2
    assert told["policy_loss"].item() == pytest.approx(0.0, abs=1e-6)
    assert told["value_loss"].item() == pytest.approx((4.0 + 1.0) / 2)  # 1 - 3 and 2 - 1
    assert told["entropy"].item() == pytest.approx(ENTROPY)
    # -(2 ln 0.5 + 3 ln 0.25) / 2 = 4 ln 2
    told = probe(make_learner(), losses(advantage=column(2.0, 3.0)), "gradient_step").metrics
    assert told["policy_loss"].item() == pytest.approx(4 * math.log(2))


@pytest.mark.parametrize(("value_coef", "entropy_coef"), [(0.5, 0.0), (0.0, 0.3), (2.0, 0.1)])
def test_the_gradient_is_policy_value_and_entropy_by_their_coefficients(value_coef: float, entropy_coef: float) -> None:
    learner = make_learner(value_coef=value_coef, entropy_coef=entropy_coef)
    probe(learner, losses(), "gradient_step")
    result = by_parameter(learner)
    # by the logits: the mean of -A (1{a} - p), and p (ln p + H) of the entropy
    p = np.array([0.5, 0.25, 0.25])
    policy = -(2.0 * (np.array([1.0, 0.0, 0.0]) - p) - (np.array([0.0, 1.0, 0.0]) - p)) / 2
    expected = policy + entropy_coef * p * (np.log(p) + ENTROPY)
    assert result["policy_head.linear.bias"].tolist() == pytest.approx(expected.tolist(), abs=1e-6)
    # errors -2 and 1: 2 (-2 + 1) / 2 by the bias, 2 (-2 * 1 + 1 * 2) / 2 by the weight
    assert result["value_head.linear.bias"].item() == pytest.approx(-value_coef)
    assert result["value_head.linear.weight"].item() == pytest.approx(0.0, abs=1e-6)


def test_better_than_expected_becomes_likelier() -> None:
    for advantage, sign in ((2.0, 1), (-2.0, -1)):
        learner = make_learner(lr=1e-3)
        learner.gradient_step(losses(action=torch.tensor([[1], [1]]), advantage=column(advantage, advantage)))
        chance = learner.net(torch.zeros(1, 1)).distribution.logp.exp()[0, 1].item()
        assert (chance - 0.25) * sign > 0


def test_advantages_may_be_normalised_over_the_rollout() -> None:
    learner = make_learner(normalize_advantage=True, value_coef=0.0)
    data = {"obs": torch.zeros(3, 1, 1), "action": torch.tensor([[0], [0], [1]]), "returns": column(0.0, 0.0, 0.0)}
    result = probe(learner, Batch(**data, advantage=column(1.0, 2.0, 6.0)), "gradient_step").metrics["policy_loss"]
    # mean 3; deviations -2, -1, 3; variance (4 + 1 + 9) / 2 = 7: -(-3 ln 0.5 + 3 ln 0.25) / 3 / √7
    assert result.item() == pytest.approx(math.log(2) / 7**0.5, rel=1e-5)


def test_a_forbidden_action_gets_no_gradient_and_is_never_taken() -> None:
    learner = make_learner(entropy_coef=0.1)
    mask = torch.tensor([True, True, False])
    told = probe(learner, losses(mask=mask.expand(2, 1, 3)), "gradient_step").metrics
    # probabilities 2/3 and 1/3: -(2 ln(2/3) - ln(1/3)) / 2
    assert told["policy_loss"].item() == pytest.approx(-math.log(2 / 3) + 0.5 * math.log(1 / 3))
    assert told["entropy"].item() == pytest.approx(math.log(3) - 2 / 3 * math.log(2))
    assert by_parameter(learner)["policy_head.linear.bias"][2].item() == 0.0
    for phase in Phase:
        rng = torch.Generator().manual_seed(0)
        action = learner.policy.act(torch.zeros(999, 1), None, mask.expand(999, 3), phase, rng, 0).action
        assert 2 not in action


def test_masks_of_a_rollout_reach_the_losses() -> None:
    mask = torch.tensor([True, True, False]).expand(3, 1, 3)
    assert torch.equal(prepared(make_learner(), rollout(mask=mask)).mask, mask)


# --- updates ---


def test_a_rollout_is_one_update() -> None:
    learner = make_learner()
    learner.update(rollout())
    assert learner.updates == 1


def test_the_optimizer_is_rmsprop_for_a2c_and_adam_for_ac() -> None:
    assert make_learner().optimizer.kind == "rmsprop"
    assert make_learner("ac").optimizer.kind == "adam"
    assert make_learner(optimizer="adam").optimizer.kind == "adam"
    # RMSProp's first step: 0.01 of the square is kept, so g / (0.1 |g|) is ten times the learning rate
    learner = make_learner(lr=1e-3)
    before = named_weights(learner.net)
    learner.update(rollout())
    step = (named_weights(learner.net)["value_head.linear.bias"] - before["value_head.linear.bias"]).item()
    assert step == pytest.approx(10 * 1e-3, rel=1e-3)


def test_ac_updates_after_every_step_and_looks_one_ahead() -> None:
    cfg = make_learner("ac").cfg
    assert (cfg.rollout_steps, cfg.gae_lambda) == (1, 0.0)
    assert (make_learner().cfg.rollout_steps, make_learner().cfg.gae_lambda) == (5, 1.0)


def test_the_learning_rate_falls_to_zero_with_anneal_lr() -> None:
    learner = make_learner(lr=4e-3, anneal_lr=True)
    learner.set_progress(0.25)
    assert learner.optimizer.lr == pytest.approx(3e-3)
    learner.set_progress(1.0)
    assert learner.optimizer.lr == 0.0
    before = named_weights(learner.net)
    learner.update(rollout())
    assert all(torch.equal(p, before[name]) for name, p in named_weights(learner.net).items())
    constant = make_learner(lr=4e-3)
    constant.set_progress(0.75)
    assert constant.optimizer.lr == 4e-3


def test_gradients_are_clipped_to_the_norm() -> None:
    whole, clipped = make_learner(optimizer="rmsprop"), make_learner(optimizer="rmsprop", max_grad_norm=0.01)
    norms = [learner.update(rollout()).metrics["grad_norm"].item() for learner in (whole, clipped)]
    assert norms[0] == pytest.approx(norms[1])  # what is told is the norm before clipping
    assert norms[0] > 0.01
    # second moments are 0.01 of the squares
    assert whole.optimizer.second_moment[0].sum().sqrt().item() == pytest.approx(0.1 * norms[0], rel=1e-4)
    assert clipped.optimizer.second_moment[0].sum().sqrt().item() == pytest.approx(0.1 * 0.01, rel=1e-4)


def test_rewards_are_divided_by_the_spread_of_returns() -> None:
    learner = make_learner("ac", normalize_reward=True)
    # returns so far: 2, 4 + 1 = 5, 1 + 2.5 = 3.5, over which the episode's end is told: mean 3.5, variance 4.5 / 3
    data = prepared(learner, rollout(reward=column(2.0, 4.0, 1.0), truncated=flag_at(2), value=column(0.0, 0.0, 0.0)))
    spread = 1.5**0.5
    # the critic says 0 within the rollout and 8 after it
    assert data.advantage.flatten().tolist() == pytest.approx([2 / spread, 4 / spread, 1 / spread + 4], rel=1e-5)
    # after an end returns start anew: 0, 6, 3. All six: mean 3.25, squares 4 + 25 + 12.25 + 0 + 36 + 9 = 86.25
    data = rollout(reward=column(0.0, 6.0, 0.0), terminated=flag_at(2), value=column(0.0, 0.0, 0.0))
    spread = (86.25 / 6 - 3.25**2) ** 0.5
    assert prepared(learner, data).advantage.flatten().tolist() == pytest.approx([0, 6 / spread, 0], rel=1e-5)


def test_rewards_are_as_they_are_by_default() -> None:
    assert make_learner().reward_scale is None
    assert advantages(make_learner("ac"), reward=column(100.0, 0.0, 0.0))[0] == pytest.approx(100 + 1 - 1)


def test_observations_are_taken_into_the_statistics_after_learning() -> None:
    learner = make_learner(plain=False, normalize_obs=True)
    value = learner.net(torch.tensor([[3.0]])).value
    data = rollout()
    with mock.patch.object(learner, "gradient_step", wraps=learner.gradient_step) as losses:
        losses.side_effect = lambda data: assert_fresh(learner)
        learner.update(data)
    norm = learner.net.encoder.norm
    assert (norm.mean.item(), norm.count.item()) == (2.0, 3.0)
    assert norm.var.item() == pytest.approx(2 / 3)
    assert not torch.equal(learner.net(torch.tensor([[3.0]])).value, value)


def assert_fresh(learner: A2C) -> Any:
    assert learner.net.encoder.norm.count == 0
    return mock.DEFAULT


def test_shared_network_has_one_body() -> None:
    learner = make_learner(plain=False, shared_network=True)
    assert learner.net.critic is learner.net.actor
    before = named_weights(learner.net)
    learner.update(rollout())
    moved = {name.split(".")[0] for name, p in named_weights(learner.net).items() if not torch.equal(p, before[name])}
    assert moved == {"actor", "policy_head", "value_head"}
    assert "towers.weights.0" in named_weights(make_learner(plain=False).net)


def test_continuous_actions_have_the_first_spread() -> None:
    learner = make_learner(spaces=Spaces(OBS, Box(-1.0, 1.0, (2,), np.float32)), log_std_init=-1.0)
    assert learner.net(torch.zeros(1, 1)).distribution.log_std.tolist() == [[-1.0, -1.0]]
    told = probe(
        learner, losses(action=torch.tensor([[[0.0, 0.0]], [[1.0, 0.0]]]), advantage=column(1.0, 1.0)), "gradient_step"
    )
    # two normals each: 2 - ln 2π; the second action is e spreads off in one: -e² / 2
    expected = -(2 * (2 - math.log(2 * math.pi)) - 0.5 * math.e**2) / 2
    assert told.metrics["policy_loss"].item() == pytest.approx(expected, rel=1e-5)


# --- memory ---


@pytest.mark.parametrize("shared_network", [True, False])
@pytest.mark.parametrize("kind", ["gru", "lstm"])
def test_recurrent_gradients_are_those_of_stepping_through_the_rollout(kind: str, shared_network: bool) -> None:
    settings = {"net__recurrent": kind, "net__recurrent_size": 4, "num_envs": 2, "shared_network": shared_network}
    learner = make_learner(plain=False, entropy_coef=0.1, **settings)
    T, N, rng = 5, 2, torch.Generator().manual_seed(0)
    obs, last = torch.randn(T + 1, N, 1, generator=rng), torch.randn(1, 1, generator=rng)
    ended = torch.zeros(T, N, dtype=torch.bool)
    ended[1, 0] = True  # the memory of the first environment is cleared after its second step
    following = obs[1:].clone()
    following[1, 0] = last
    with torch.no_grad():  # some memory of what was before the rollout
        hidden = learner.net(torch.randn(N, 1, generator=rng)).hidden
    memories, actions, after, logps, values, entropies = [], [], torch.zeros(T, N), [], [], []
    for t in range(T):
        memories.append(tree_map(torch.Tensor.detach, hidden))
        out = learner.net(obs[t], hidden)
        actions.append(out.distribution.sample(rng))
        logps.append(out.distribution.log_prob(actions[-1]))
        values.append(out.value)
        entropies.append(out.distribution.entropy())
        after[t] = learner.net(following[t], out.hidden).value.detach()
        keep = (~ended[t]).float()[:, None]
        hidden = tree_map(lambda leaf, keep=keep: leaf * keep, out.hidden)
    logp, value, entropy = torch.stack(logps), torch.stack(values), torch.stack(entropies)
    reward = torch.randn(T, N, generator=rng)
    data = Batch(
        obs=obs[:T],
        next_obs=following,
        action=torch.stack(actions),
        hidden=tree_map(lambda *steps: torch.stack(steps), *memories),
        reward=reward,
        value=value.detach(),
        logp=logp.detach(),
        terminated=torch.zeros(T, N, dtype=torch.bool),
        truncated=ended,
    )
    ret, later = torch.zeros(T, N), after[-1]
    for t in reversed(range(T)):
        later = ret[t] = reward[t] + 0.5 * torch.where(ended[t], after[t], later)
    loss = -(logp * (ret - value.detach())).mean() + 0.5 * (value - ret).square().mean() - 0.1 * entropy.mean()
    expected = learner.optimizer.compute_gradients(loss)[0].clone()
    data = prepared(learner, data)
    assert torch.allclose(data.returns, ret, atol=1e-5)
    fresh = make_learner(plain=False, entropy_coef=0.1, **settings)  # the update has moved the other
    assert torch.allclose(probe(fresh, data, "gradient_step").gradients["optimizer"][0], expected, atol=1e-5)
    assert set(fresh.extra_fields) == {"logp", "value", "hidden"}


# --- rejected settings, state and metrics ---


@pytest.mark.parametrize("name", ["a2c", "ac"])
def test_what_it_cannot_do_is_refused(name: str) -> None:
    with pytest.raises(UserError, match=r"action space .* is not supported; use Discrete, MultiDiscrete or a"):
        make_learner(name, spaces=Spaces(OBS, Dict({"a": Discrete(2)})))
    with pytest.raises(UserError, match=f"{name} needs an environment with one agent"):
        make_learner(name, spaces=Spaces(OBS, Discrete(3), num_agents=2))


def test_value_is_the_critics() -> None:
    assert make_learner().value(torch.tensor([[4.0], [7.0]])).tolist() == [4.0, 7.0]


def test_restored_learner_continues_identically() -> None:
    settings = {"plain": False, "normalize_obs": True, "normalize_reward": True}
    learner, other = make_learner(**settings), make_learner(**settings, seed=9)
    learner.update(rollout())
    other.load_state_dict(learner.state_dict())
    for _ in range(2):
        first, second = learner.update(rollout()), other.update(rollout())
        assert all(torch.equal(first.metrics[name], second.metrics[name]) for name in first.metrics)
    assert all(torch.equal(p, named_weights(other.net)[name]) for name, p in named_weights(learner.net).items())


def test_update_returns_exactly_the_declared_metrics() -> None:
    assert set(make_learner().update(rollout()).metrics) == set(A2C.metrics)

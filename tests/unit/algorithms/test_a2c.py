"""Advantages, losses and settings of A2C and AC, with numbers worked out by hand."""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from by_hand import ENTROPY, LOGITS, changed_parts, column, flag_at, named_weights
from gymnasium.spaces import Box, Discrete, Text
from probe import gradient_step_data, named_gradients, probe
from torch import nn

import zhixing as zx
from zhixing.algorithms.a2c import A2C
from zhixing.core.batch import Batch
from zhixing.core.policy import Phase
from zhixing.core.spaces import Spaces
from zhixing.core.tree import tree_map
from zhixing.errors import UserError

OBS = Box(-99.0, 99.0, (1,), np.float32)
SPACES = Spaces(OBS, Discrete(3))


def make_learner(name: str = "a2c", plain: bool = True, spaces: Spaces = SPACES, **settings: Any) -> A2C:
    """Return a learner. If `plain`, it has no hidden layers, the observation as value, and the policy of `LOGITS`."""
    base = {"gamma": 0.5, "num_envs": 1, "max_grad_norm": None, "net__hidden_sizes": [8]}
    cfg = zx.config.load(algorithm=name, env="Acrobot-v1", **(base | settings))
    learner = zx.algorithms.get(name).make(cfg, spaces, net=(lambda space: nn.Identity()) if plain else None)
    assert isinstance(learner, A2C)
    if plain:
        with torch.no_grad():
            learner.net.value_head.linear.weight.fill_(1.0)
            learner.net.policy_head.linear.weight.zero_()
            if spaces is SPACES:
                learner.net.policy_head.linear.bias.copy_(torch.tensor(LOGITS))
    return learner


def rollout(**fields: Any) -> Batch:
    """Return three steps in states with values 1, 2 and 3. The next state of the second has value 7, of the last 8."""
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


def advantages(learner: A2C, **fields: Any) -> list[float]:
    data = gradient_step_data(learner, rollout(**fields))
    assert torch.allclose(data.returns, data.advantage + data.value)
    return data.advantage.flatten().tolist()


# --- advantages ---


def test_advantages_of_ac_are_one_step() -> None:
    # r + 0.5 V' - V: 1 + 1 - 1, 1 + 1.5 - 2, and 1 + 4 - 3, which bootstraps from the state after the rollout
    assert advantages(make_learner("ac")) == pytest.approx([1.0, 0.5, 2.0])
    # truncated: 1 + 3.5 - 2, from the final observation; terminated: 1 - 2
    assert advantages(make_learner("ac"), truncated=flag_at(1)) == pytest.approx([1.0, 2.5, 2.0])
    assert advantages(make_learner("ac"), terminated=flag_at(1)) == pytest.approx([1.0, -1.0, 2.0])


def test_advantages_of_a2c_reach_to_the_end_of_the_rollout() -> None:
    # returns 1 + 4 = 5, 1 + 2.5 = 3.5, 1 + 1.75 = 2.75
    assert advantages(make_learner()) == pytest.approx([1.75, 1.5, 2.0])


def test_a2c_bootstraps_after_truncation_but_not_after_termination() -> None:
    # returns: truncated 1 + 3.5 = 4.5, without rewards of the next episode; before that 1 + 2.25 = 3.25
    assert advantages(make_learner(), truncated=flag_at(1)) == pytest.approx([2.25, 2.5, 2.0])
    # returns: terminated 1, before that 1.5
    assert advantages(make_learner(), terminated=flag_at(1)) == pytest.approx([0.5, -1.0, 2.0])
    # returns: terminated in the last step 1, before that 1.5, 1.75
    assert advantages(make_learner(), terminated=flag_at(2)) == pytest.approx([0.75, -0.5, -2.0])


def test_gae_by_hand() -> None:
    # TD errors 1, 0.5, 2, each plus 0.25 of the following advantage: 2, 0.5 + 0.5, 1 + 0.25
    assert advantages(make_learner(gae_lambda=0.5)) == pytest.approx([1.25, 1.0, 2.0])
    # TD errors 1, 2.5, 2; the trace ends with the episode: 1 + 0.25 * 2.5
    assert advantages(make_learner(gae_lambda=0.5), truncated=flag_at(1)) == pytest.approx([1.625, 2.5, 2.0])


def test_advantages_use_the_values_stored_while_acting() -> None:
    # 1 + 0.5 * 20 - 10, 1 + 0.5 * 30 - 20, 1 + 0.5 * 8 - 30
    assert advantages(make_learner("ac"), value=column(10.0, 20.0, 30.0)) == pytest.approx([1.0, -4.0, -25.0])


def test_environments_are_independent() -> None:
    learner = make_learner(num_envs=2)
    data = gradient_step_data(learner, Batch.cat([rollout(truncated=flag_at(1)), rollout(terminated=flag_at(1))], 1))
    expected = torch.tensor([[2.25, 0.5], [2.5, -1.0], [2.0, 2.0]])
    assert torch.allclose(data.advantage, expected)


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
    metrics = probe(make_learner(), losses(), "gradient_step").metrics
    # -(2 ln 0.5 - ln 0.25) / 2 = -(-2 + 2) ln 2 / 2
    assert metrics["policy_loss"].item() == pytest.approx(0.0, abs=1e-6)
    assert metrics["value_loss"].item() == pytest.approx((4.0 + 1.0) / 2)  # errors 1 - 3 and 2 - 1
    assert metrics["entropy"].item() == pytest.approx(ENTROPY)
    # -(2 ln 0.5 + 3 ln 0.25) / 2 = 4 ln 2
    metrics = probe(make_learner(), losses(advantage=column(2.0, 3.0)), "gradient_step").metrics
    assert metrics["policy_loss"].item() == pytest.approx(4 * math.log(2))


@pytest.mark.parametrize(("value_coef", "entropy_coef"), [(0.5, 0.0), (0.0, 0.3), (2.0, 0.1)])
def test_gradient_is_the_weighted_sum_of_policy_value_and_entropy(value_coef: float, entropy_coef: float) -> None:
    learner = make_learner(value_coef=value_coef, entropy_coef=entropy_coef)
    probe(learner, losses(), "gradient_step")
    gradients = named_gradients(learner.net, learner.optimizer)
    # gradient of the logits: the mean of -A (1{a} - p), and p (ln p + H) of the entropy
    p = np.array([0.5, 0.25, 0.25])
    policy = -(2.0 * (np.array([1.0, 0.0, 0.0]) - p) - (np.array([0.0, 1.0, 0.0]) - p)) / 2
    expected = policy + entropy_coef * p * (np.log(p) + ENTROPY)
    assert gradients["policy_head.linear.bias"].tolist() == pytest.approx(expected.tolist(), abs=1e-6)
    # errors -2 and 1: 2 (-2 + 1) / 2 for the bias, 2 (-2 * 1 + 1 * 2) / 2 for the weight
    assert gradients["value_head.linear.bias"].item() == pytest.approx(-value_coef)
    assert gradients["value_head.linear.weight"].item() == pytest.approx(0.0, abs=1e-6)


def test_actions_with_positive_advantage_become_more_likely() -> None:
    for advantage, sign in ((2.0, 1), (-2.0, -1)):
        learner = make_learner(lr=1e-3)
        learner.gradient_step(losses(action=torch.tensor([[1], [1]]), advantage=column(advantage, advantage)))
        probability = learner.net(torch.zeros(1, 1)).distribution.logp.exp()[0, 1].item()
        assert (probability - 0.25) * sign > 0


def test_normalize_advantage_normalizes_over_the_rollout() -> None:
    learner = make_learner(normalize_advantage=True, value_coef=0.0)
    data = {"obs": torch.zeros(3, 1, 1), "action": torch.tensor([[0], [0], [1]]), "returns": column(0.0, 0.0, 0.0)}
    result = probe(learner, Batch(**data, advantage=column(1.0, 2.0, 6.0)), "gradient_step").metrics["policy_loss"]
    # mean 3; deviations -2, -1, 3; variance (4 + 1 + 9) / 2 = 7: -(-3 ln 0.5 + 3 ln 0.25) / 3 / √7
    assert result.item() == pytest.approx(math.log(2) / 7**0.5, rel=1e-5)


def test_invalid_actions_get_no_gradient_and_are_never_taken() -> None:
    learner = make_learner(entropy_coef=0.1)
    mask = torch.tensor([True, True, False])
    metrics = probe(learner, losses(mask=mask.expand(2, 1, 3)), "gradient_step").metrics
    # probabilities 2/3 and 1/3: -(2 ln(2/3) - ln(1/3)) / 2
    assert metrics["policy_loss"].item() == pytest.approx(-math.log(2 / 3) + 0.5 * math.log(1 / 3))
    assert metrics["entropy"].item() == pytest.approx(math.log(3) - 2 / 3 * math.log(2))
    assert named_gradients(learner.net, learner.optimizer)["policy_head.linear.bias"][2].item() == 0.0
    for phase in Phase:
        rng = torch.Generator().manual_seed(0)
        action = learner.policy.act(torch.zeros(999, 1), None, mask.expand(999, 3), phase, rng, 0).action
        assert 2 not in action


def test_losses_use_the_masks_of_the_rollout() -> None:
    mask = torch.tensor([True, True, False]).expand(3, 1, 3)
    assert torch.equal(gradient_step_data(make_learner(), rollout(mask=mask)).mask, mask)


# --- updates ---


def test_each_rollout_is_one_update() -> None:
    learner = make_learner()
    learner.update(rollout())
    assert learner.updates == 1


def test_default_optimizer_is_rmsprop_for_a2c_and_adam_for_ac() -> None:
    assert make_learner().optimizer.kind == "rmsprop"
    assert make_learner("ac").optimizer.kind == "adam"
    assert make_learner(optimizer="adam").optimizer.kind == "adam"
    # first step of RMSProp: the second moment is 0.01 g², so the step is lr g / (0.1 |g|), ten times the learning rate
    learner = make_learner(lr=1e-3)
    before = named_weights(learner.net)
    learner.update(rollout())
    step = (named_weights(learner.net)["value_head.linear.bias"] - before["value_head.linear.bias"]).item()
    assert step == pytest.approx(10 * 1e-3, rel=1e-3)


def test_defaults_of_rollout_steps_and_gae_lambda() -> None:
    cfg = make_learner("ac").cfg
    assert (cfg.rollout_steps, cfg.gae_lambda) == (1, 0.0)
    assert (make_learner().cfg.rollout_steps, make_learner().cfg.gae_lambda) == (5, 1.0)


def test_linear_lr_schedule_anneals_the_learning_rate_to_zero() -> None:
    learner = make_learner(lr=4e-3, lr_schedule="linear")
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


def test_gradients_are_clipped_to_max_grad_norm() -> None:
    unclipped, clipped = make_learner(optimizer="rmsprop"), make_learner(optimizer="rmsprop", max_grad_norm=0.01)
    norms = [learner.update(rollout()).metrics["grad_norm"].item() for learner in (unclipped, clipped)]
    assert norms[0] == pytest.approx(norms[1])  # the metric is the norm before clipping
    assert norms[0] > 0.01
    # second moments are 0.01 of the squares
    assert unclipped.optimizer.second_moment[0].sum().sqrt().item() == pytest.approx(0.1 * norms[0], rel=1e-4)
    assert clipped.optimizer.second_moment[0].sum().sqrt().item() == pytest.approx(0.1 * 0.01, rel=1e-4)


def test_normalize_reward_divides_by_the_std_of_returns() -> None:
    learner = make_learner("ac", normalize_reward=True)
    # discounted returns 2, 4 + 1 = 5, 1 + 2.5 = 3.5: mean 3.5, variance 4.5 / 3
    data = gradient_step_data(
        learner, rollout(reward=column(2.0, 4.0, 1.0), truncated=flag_at(2), value=column(0.0, 0.0, 0.0))
    )
    std = 1.5**0.5
    # stored values are 0, the value after the rollout is 8
    assert data.advantage.flatten().tolist() == pytest.approx([2 / std, 4 / std, 1 / std + 4], rel=1e-5)
    # returns restart with the episode: 0, 6, 3. All six: mean 3.25, squares 4 + 25 + 12.25 + 0 + 36 + 9 = 86.25
    data = rollout(reward=column(0.0, 6.0, 0.0), terminated=flag_at(2), value=column(0.0, 0.0, 0.0))
    std = (86.25 / 6 - 3.25**2) ** 0.5
    assert gradient_step_data(learner, data).advantage.flatten().tolist() == pytest.approx([0, 6 / std, 0], rel=1e-5)


def test_rewards_are_not_normalized_by_default() -> None:
    assert make_learner().reward_scale is None
    assert advantages(make_learner("ac"), reward=column(100.0, 0.0, 0.0))[0] == pytest.approx(100 + 1 - 1)


def test_observation_statistics_are_updated_after_the_gradient_step() -> None:
    learner = make_learner(plain=False, normalize_obs=True)
    value = learner.net(torch.tensor([[3.0]])).value

    def check_no_statistics(data: Batch) -> Any:
        assert learner.net.encoder.norm.count == 0
        return mock.DEFAULT

    with mock.patch.object(learner, "gradient_step", wraps=learner.gradient_step, side_effect=check_no_statistics):
        learner.update(rollout())
    norm = learner.net.encoder.norm
    assert (norm.mean.item(), norm.count.item()) == (2.0, 3.0)
    assert norm.var.item() == pytest.approx(2 / 3)
    assert not torch.equal(learner.net(torch.tensor([[3.0]])).value, value)


def test_shared_network_has_one_torso() -> None:
    learner = make_learner(plain=False, shared_network=True)
    assert learner.net.critic is learner.net.actor
    before = named_weights(learner.net)
    learner.update(rollout())
    assert changed_parts(learner.net, before) == {"actor", "policy_head", "value_head"}
    assert "towers.weights.0" in named_weights(make_learner(plain=False).net)


def test_log_std_init_is_the_initial_log_std() -> None:
    learner = make_learner(spaces=Spaces(OBS, Box(-1.0, 1.0, (2,), np.float32)), log_std_init=-1.0)
    assert learner.net(torch.zeros(1, 1)).distribution.log_std.tolist() == [[-1.0, -1.0]]
    metrics = probe(
        learner, losses(action=torch.tensor([[[0.0, 0.0]], [[1.0, 0.0]]]), advantage=column(1.0, 1.0)), "gradient_step"
    )
    # two Gaussian dimensions: 2 - ln 2π; the second action differs from the mean by e stds in one: -e² / 2
    expected = -(2 * (2 - math.log(2 * math.pi)) - 0.5 * math.e**2) / 2
    assert metrics.metrics["policy_loss"].item() == pytest.approx(expected, rel=1e-5)


# --- recurrent networks ---


@pytest.mark.parametrize("shared_network", [True, False])
@pytest.mark.parametrize("kind", ["gru", "lstm"])
def test_recurrent_gradients_equal_those_of_single_steps(kind: str, shared_network: bool) -> None:
    settings = {"net__recurrent": kind, "net__recurrent_size": 4, "num_envs": 2, "shared_network": shared_network}
    learner = make_learner(plain=False, entropy_coef=0.1, **settings)
    T, N, rng = 5, 2, torch.Generator().manual_seed(0)
    obs, last = torch.randn(T + 1, N, 1, generator=rng), torch.randn(1, 1, generator=rng)
    ended = torch.zeros(T, N, dtype=torch.bool)
    ended[1, 0] = True  # resets the hidden state of the first environment after its second step
    next_obs = obs[1:].clone()
    next_obs[1, 0] = last
    with torch.no_grad():  # a hidden state from before the rollout
        hidden = learner.net(torch.randn(N, 1, generator=rng)).hidden
    hiddens, actions, next_value, logps, values, entropies = [], [], torch.zeros(T, N), [], [], []
    for t in range(T):
        hiddens.append(tree_map(torch.Tensor.detach, hidden))
        out = learner.net(obs[t], hidden)
        actions.append(out.distribution.sample(rng))
        logps.append(out.distribution.log_prob(actions[-1]))
        values.append(out.value)
        entropies.append(out.distribution.entropy())
        next_value[t] = learner.net(next_obs[t], out.hidden).value.detach()
        keep = (~ended[t]).float()[:, None]
        hidden = tree_map(lambda leaf, keep=keep: leaf * keep, out.hidden)
    logp, value, entropy = torch.stack(logps), torch.stack(values), torch.stack(entropies)
    reward = torch.randn(T, N, generator=rng)
    data = Batch(
        obs=obs[:T],
        next_obs=next_obs,
        action=torch.stack(actions),
        hidden=tree_map(lambda *steps: torch.stack(steps), *hiddens),
        reward=reward,
        value=value.detach(),
        logp=logp.detach(),
        terminated=torch.zeros(T, N, dtype=torch.bool),
        truncated=ended,
    )
    expected_returns, later_return = torch.zeros(T, N), next_value[-1]
    for t in reversed(range(T)):
        later_return = torch.where(ended[t], next_value[t], later_return)
        later_return = expected_returns[t] = reward[t] + 0.5 * later_return
    policy_loss = -(logp * (expected_returns - value.detach())).mean()
    loss = policy_loss + 0.5 * (value - expected_returns).square().mean() - 0.1 * entropy.mean()
    expected = learner.optimizer.compute_gradients(loss)[0].clone()
    data = gradient_step_data(learner, data)
    assert torch.allclose(data.returns, expected_returns, atol=1e-5)
    fresh = make_learner(plain=False, entropy_coef=0.1, **settings)  # with the weights before the update
    assert torch.allclose(probe(fresh, data, "gradient_step").gradients["optimizer"][0], expected, atol=1e-5)
    assert set(fresh.extra_fields) == {"logp", "value", "hidden"}


# --- rejected settings, state and metrics ---


@pytest.mark.parametrize("name", ["a2c", "ac"])
def test_unsupported_settings_and_spaces_are_rejected(name: str) -> None:
    with pytest.raises(UserError, match=r"the action space is Text.*; allowed are"):
        make_learner(name, spaces=Spaces(OBS, Text(5)))
    with pytest.raises(UserError, match=f"{name} needs an environment with one agent"):
        make_learner(name, spaces=Spaces(OBS, Discrete(3), num_agents=2))


def test_value_is_that_of_the_critic() -> None:
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

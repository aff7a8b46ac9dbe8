"""Targets, losses, delayed updates and exploration of TD3 and DDPG, with numbers worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from by_hand import all_equal, check_polyak_update, copy_weights, set_critic_outputs, set_net_output
from gymnasium.spaces import Box, Discrete, MultiDiscrete
from probe import probe

import zhixing as zx
from zhixing.algorithms.td3 import TD3
from zhixing.core.batch import Batch
from zhixing.core.policy import Phase
from zhixing.core.spaces import Spaces
from zhixing.errors import UserError

OBS = Box(-9.0, 9.0, (2,), np.float32)
SPACES = Spaces(OBS, Box(-1.0, 1.0, (1,), np.float32))


def make_learner(name: str = "td3", spaces: Spaces = SPACES, **settings: Any) -> TD3:
    base = {"net__hidden_sizes": [], "target_policy_noise": 0.0}  # one linear layer each
    cfg = zx.config.load(algorithm=name, env="Acrobot-v1", **(base | settings))
    learner = zx.algorithms.get(name).make(cfg, spaces)
    assert isinstance(learner, TD3)
    return learner


def batch(rows: int = 1, **fields: Any) -> Batch:
    """Return `rows` steps of each kind: within an episode, terminated and truncated."""
    base = {
        "obs": torch.zeros(3, 2),
        "next_obs": torch.zeros(3, 2),
        "action": torch.tensor([[0.5], [0.0], [-0.5]]),
        "reward": torch.tensor([1.0, 1.0, 1.0]),
        "terminated": torch.tensor([False, True, False]),
        "truncated": torch.tensor([False, False, True]),
        "discount": torch.tensor([0.9, 0.9, 0.9]),
        "index": torch.arange(3),
    }
    return Batch(**{name: field.repeat_interleave(rows, 0) for name, field in {**base, **fields}.items()})


# --- targets ---


def test_targets_by_hand() -> None:
    learner = make_learner()
    set_critic_outputs(learner.target_critics, (2.0, 10.0), (4.0, 8.0))  # 11 and 10 for the action 0.5
    set_critic_outputs(learner.critics, (0.0, 99.0), (0.0, 99.0))  # not used
    set_net_output(learner.target_actor, math.atanh(0.5))
    set_net_output(learner.actor, math.atanh(-0.9))  # not used
    # minimum of both: 1 + 0.9 * 10 = 10; terminated: 1; truncated, which bootstraps: 10
    assert learner.target_value(batch()).tolist() == pytest.approx([10.0, 1.0, 10.0])


def test_targets_use_the_discount_of_each_row() -> None:
    learner = make_learner()
    set_critic_outputs(learner.target_critics, (0.0, 10.0), (0.0, 50.0))
    # 1 + 0.9 * 10; 2 (terminated); 3 + 0.9³ * 10 = 3 + 7.29
    data = batch(reward=torch.tensor([1.0, 2.0, 3.0]), discount=torch.tensor([0.9, 0.81, 0.729]))
    assert learner.target_value(data).tolist() == pytest.approx([10.0, 2.0, 10.29])


def test_ddpg_has_one_critic_and_no_target_noise() -> None:
    cfg = zx.config.load(algorithm="ddpg", env="Acrobot-v1", net__hidden_sizes=[])
    learner = TD3(cfg, SPACES)
    set_critic_outputs(learner.target_critics, (10.0, 0.0))
    set_net_output(learner.target_actor, math.atanh(0.5))
    assert learner.critics(torch.zeros(4, 2), torch.zeros(4, 1)).shape == (1, 4)
    assert learner.target_value(batch(rows=5)).tolist() == pytest.approx([5.5] * 5 + [1.0] * 5 + [5.5] * 5)
    assert (cfg.policy_delay, cfg.noise_kind) == (1, "ou")


def test_target_noise_is_clipped() -> None:
    learner = make_learner(target_policy_noise=1e6, target_noise_clip=0.5)  # all samples are clipped
    set_critic_outputs(learner.target_critics, (10.0, 0.0), (10.0, 0.0))
    set_net_output(learner.target_actor, math.atanh(0.2))
    result = (learner.target_value(batch(rows=100)) - 1) / 0.9
    # 10 (0.2 + 0.5) = 7 or 10 (0.2 - 0.5) = -3; 0 for terminated steps
    assert result[100:200].abs().max() == 0
    bootstrapped = torch.cat([result[:100], result[200:]])
    assert sorted({round(q, 3) for q in bootstrapped.tolist()}) == [-3.0, 7.0]


def test_noisy_target_actions_are_clipped_to_bounds() -> None:
    learner = make_learner(target_policy_noise=1e6, target_noise_clip=0.5)
    set_critic_outputs(learner.target_critics, (10.0, 0.0), (10.0, 0.0))
    for action, expected in ((0.8, [3.0, 10.0]), (-0.8, [-10.0, -3.0])):  # not 13 and -13
        set_net_output(learner.target_actor, math.atanh(action))
        result = (learner.target_value(batch(rows=100))[:100] - 1) / 0.9
        assert sorted({round(q, 3) for q in result.tolist()}) == expected


def test_target_noise_has_its_std_and_is_independent_per_step() -> None:
    learner = make_learner(target_policy_noise=0.1, target_noise_clip=0.5)
    set_critic_outputs(learner.target_critics, (10.0, 0.0), (10.0, 0.0))
    set_net_output(learner.target_actor, math.atanh(0.2))
    result = (learner.target_value(batch(rows=10_000))[:10_000] - 1) / 0.9
    # std 10 * 0.1; three standard errors are 0.03 and 0.021
    assert result.mean().item() == pytest.approx(2.0, abs=0.03)
    assert result.std().item() == pytest.approx(1.0, abs=0.021)


# --- losses ---


def test_critic_loss_by_hand() -> None:
    learner = make_learner()
    set_critic_outputs(learner.critics, (2.0, 1.0), (0.0, 4.0))
    set_critic_outputs(learner.target_critics, (0.0, 0.0), (0.0, 0.0))
    loss, error, q_mean = learner.critic_loss(batch())
    # targets 1, Q-values 1 + 2 a = 2, 1, 0 and 4, 4, 4: squares 1 + 9, 0 + 9, 1 + 9
    assert loss.item() == pytest.approx(29 / 3)
    assert error.tolist() == pytest.approx([2.0, 1.5, 2.0])  # mean over critics
    assert q_mean.item() == pytest.approx(2.5)


def test_importance_weights_scale_losses_but_not_priorities() -> None:
    learner = make_learner()
    set_critic_outputs(learner.critics, (2.0, 1.0), (0.0, 4.0))
    set_critic_outputs(learner.target_critics, (0.0, 0.0), (0.0, 0.0))
    result = probe(learner, batch(weight=torch.tensor([1.0, 0.5, 0.1])))
    # 10 + 0.5 * 9 + 0.1 * 10
    assert result.metrics["critic_loss"].item() == pytest.approx(15.5 / 3)
    assert result.priority is not None
    assert result.priority.tolist() == pytest.approx([2.0, 1.5, 2.0])


def test_targets_have_no_gradient() -> None:
    learner = make_learner()
    set_critic_outputs(learner.critics, (2.0, 1.0), (0.0, 4.0))
    set_critic_outputs(learner.target_critics, (0.0, 0.0), (0.0, 0.0))
    (gradient,) = torch.autograd.grad(learner.critic_loss(batch())[0], [learner.critics.towers.biases[0]])
    # two times the mean errors, (1 + 0 - 1) / 3 and 3
    assert gradient.flatten().tolist() == pytest.approx([0.0, 6.0], abs=1e-6)


def test_actor_maximizes_the_first_critic() -> None:
    learner = make_learner()
    set_critic_outputs(learner.critics, (3.0, 1.0), (-5.0, 0.0))
    set_net_output(learner.actor, math.atanh(0.5))
    loss = learner.actor_loss(batch())
    assert loss.item() == pytest.approx(-2.5)  # -(3 * 0.5 + 1); the second critic, or the minimum, would give 2.5
    (gradient,) = torch.autograd.grad(loss, [learner.actor.layers.linears[0].bias])
    assert gradient.item() == pytest.approx(-3 * (1 - 0.25))


# --- updates ---


def test_actor_is_updated_every_policy_delay() -> None:
    learner = make_learner(policy_delay=3, net__hidden_sizes=[8])
    moved, actor_losses = [], []
    for _ in range(7):
        before, critics = copy_weights(learner.actor), copy_weights(learner.critics)
        actor_losses.append(learner.update(batch()).metrics["actor_loss"].item())
        moved.append(not all_equal(before, copy_weights(learner.actor)))
        assert not all_equal(critics, copy_weights(learner.critics))
    assert moved == [False, False, True, False, False, True, False]
    # between updates of the actor, its last loss is reported
    assert actor_losses[0] == actor_losses[1] == 0.0
    assert actor_losses[2] == actor_losses[3] == actor_losses[4] != actor_losses[5] == actor_losses[6]


def test_all_targets_are_polyak_averaged_in_every_update() -> None:
    learner = make_learner(tau=0.1, policy_delay=2, net__hidden_sizes=[8])
    pairs = [(learner.target_actor, learner.actor), (learner.target_critics, learner.critics)]
    learner.update(batch())
    for _ in range(2):
        before = [copy_weights(target) for target, _ in pairs]
        learner.update(batch())
        for (target, net), start in zip(pairs, before, strict=True):
            check_polyak_update(target, start, net, tau=0.1)


def test_critic_optimizer_uses_only_the_critic_loss() -> None:
    learner = make_learner(net__hidden_sizes=[8])
    gradient = probe(learner, batch()).gradients["critic_optimizer"][0].clone()
    assert torch.equal(gradient, learner.critic_optimizer.compute_gradients(learner.critic_loss(batch())[0])[0])


def test_actor_lr_applies_only_to_the_actor() -> None:
    learner = make_learner(lr=1e-2, actor_lr=1e-4, net__hidden_sizes=[8], policy_delay=1)
    actor, critics = copy_weights(learner.actor), copy_weights(learner.critics)
    learner.update(batch())
    # the first step of Adam changes a weight by the learning rate
    for net, before, lr in ((learner.actor, actor, 1e-4), (learner.critics, critics, 1e-2)):
        largest = max((p - old).abs().max().item() for p, old in zip(net.parameters(), before, strict=True))
        assert largest == pytest.approx(lr, rel=0.05)


def test_critics_have_different_initial_weights_and_targets_equal_ones() -> None:
    learner = make_learner(net__hidden_sizes=[8])
    first, second = learner.critics(torch.ones(1, 2), torch.ones(1, 1))
    assert first.item() != second.item()
    assert all_equal(copy_weights(learner.critics), copy_weights(learner.target_critics))
    assert all_equal(copy_weights(learner.actor), copy_weights(learner.target_actor))


def test_actor_critics_and_targets_normalize_observations() -> None:
    learner = make_learner(normalize_obs=True)
    learner.update_normalizers(Batch(obs=torch.tensor([[[1.0, 0.0]], [[3.0, 4.0]]])))
    # means 2 and 2, stds 1 and 2
    for net in (learner.actor, learner.critics, learner.target_actor, learner.target_critics):
        assert torch.allclose(net.features(torch.tensor([[3.0, 0.0]])), torch.tensor([[1.0, -1.0]]), atol=1e-5)


# --- acting ---


def test_actions_have_noise_only_while_collecting() -> None:
    learner = make_learner(exploration_noise=0.2)
    set_net_output(learner.actor, math.atanh(0.1))
    rng, obs = torch.Generator().manual_seed(0), torch.zeros(20_000, 2)
    assert learner.policy.act(obs[:1], None, None, Phase.EVAL, rng, 0).action.item() == pytest.approx(0.1)
    action = learner.policy.act(obs, None, None, Phase.COLLECT, rng, 0).action
    assert action.mean().item() == pytest.approx(0.1, abs=0.005)
    assert action.std().item() == pytest.approx(0.2, rel=0.03)
    set_net_output(learner.actor, math.atanh(0.99))
    assert learner.policy.act(obs, None, None, Phase.COLLECT, rng, 0).action.max().item() == 1.0
    uniform = learner.policy.act(obs, None, None, Phase.RANDOM, rng, 0).action
    assert uniform.std().item() == pytest.approx(3**-0.5, rel=0.03)


def test_noise_of_ddpg_is_an_ornstein_uhlenbeck_process() -> None:
    learner = make_learner("ddpg", exploration_noise=0.1, ou_theta=0.2)
    set_net_output(learner.actor, math.atanh(0.0))
    rng, obs = torch.Generator().manual_seed(0), torch.zeros(20_000, 2)
    hidden = learner.policy.initial_hidden(20_000)
    steps = []
    for _ in range(2):
        decision = learner.policy.act(obs, hidden, None, Phase.COLLECT, rng, 0)
        hidden = decision.hidden
        steps.append(decision.action[:, 0])
    # x' = 0.8 x + noise: variances 0.01 and 0.64 * 0.01 + 0.01 = 0.0164, covariance 0.008
    first, second = steps
    assert first.var().item() == pytest.approx(0.01, rel=0.05)
    assert second.var().item() == pytest.approx(0.0164, rel=0.05)
    assert (first * second).mean().item() == pytest.approx(0.008, rel=0.05)
    assert make_learner().policy.initial_hidden(3) is None  # the noise of td3 is independent


def test_value_is_the_minimum_over_critics_for_the_actors_action() -> None:
    learner = make_learner()
    set_critic_outputs(learner.critics, (3.0, 1.0), (-5.0, 0.0))
    set_net_output(learner.actor, math.atanh(0.5))
    assert learner.value(torch.zeros(2, 2)).tolist() == pytest.approx([-2.5] * 2)


# --- rejected settings, state and metrics ---


@pytest.mark.parametrize("name", ["td3", "ddpg"])
def test_unsupported_settings_and_spaces_are_rejected(name: str) -> None:
    spaces = Discrete(3), MultiDiscrete([2, 2]), Box(-np.inf, np.inf, (1,), np.float32), Box(-1, 1, (2, 2), np.float32)
    for space in spaces:
        with pytest.raises(UserError, match=f"{name} needs continuous actions in a bounded one-dimensional Box"):
            make_learner(name, Spaces(OBS, space))
    with pytest.raises(UserError, match=rf"{name} does not support recurrent networks: set net\.recurrent=none"):
        make_learner(name, net__recurrent="lstm")
    with pytest.raises(UserError, match=f"{name} needs an environment with one agent"):
        make_learner(name, Spaces(OBS, SPACES.action, num_agents=2))


def test_q_values_converge_to_the_targets() -> None:
    learner = make_learner(net__hidden_sizes=[8], lr=1e-2)
    data = batch(terminated=torch.ones(3, dtype=torch.bool), reward=torch.tensor([1.0, -2.0, 3.0]))
    first = learner.update(data).metrics["critic_loss"].item()
    for _ in range(400):
        last = learner.update(data).metrics["critic_loss"].item()
    assert last < 0.05 * first


def test_restored_learner_continues_identically() -> None:
    settings = {"net__hidden_sizes": [8], "target_policy_noise": 0.2}
    learner, other = make_learner(**settings), make_learner(**settings, seed=9)
    learner.update(batch())
    other.load_state_dict(learner.state_dict())
    for _ in range(3):
        first, second = learner.update(batch()), other.update(batch())
        assert all(torch.equal(first.metrics[name], second.metrics[name]) for name in first.metrics)
    for name in ("actor", "critics", "target_actor", "target_critics"):
        assert all_equal(copy_weights(getattr(learner, name)), copy_weights(getattr(other, name)))


def test_update_returns_exactly_the_declared_metrics() -> None:
    assert set(make_learner().update(batch()).metrics) == set(TD3.metrics)

"""Joint batches, targets, losses and updates of CrossQ, with numbers worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from by_hand import CONTINUOUS, DISCRETE, all_equal, batch, copy_weights, next_noise
from probe import probe
from torch import Tensor, nn

import zhixing as zx
from zhixing.algorithms.crossq import CrossQ, CrossQConfig
from zhixing.core.batch import Batch
from zhixing.core.spaces import Spaces
from zhixing.errors import UserError


def make_learner(spaces: Spaces = CONTINUOUS, **settings: Any) -> CrossQ:
    base = {"net__hidden_sizes": [], "critic_hidden_sizes": [], "alpha": 0.5}  # one normalized linear layer each
    cfg = zx.config.load(algorithm="crossq", env="Acrobot-v1", **(base | settings))
    assert isinstance(cfg, CrossQConfig)
    return CrossQ(cfg, spaces)


def steps(**fields: Any) -> Batch:
    return batch(**({"action": torch.tensor([[0.5], [0.0], [-0.5]])} | fields))


def set_layer(tower: Any, *rows: tuple[list[float], list[float]]) -> None:
    """Set the weights (of each input) and biases of the only layer; `rows` are those of each network."""
    with torch.no_grad():
        for k, (weight, bias) in enumerate(rows):
            tower.weights[0][k] = torch.tensor(weight).reshape(tower.weights[0][k].shape)
            tower.biases[0][k, 0] = torch.tensor(bias)


def set_policy(learner: CrossQ, mean: float, log_std: float) -> None:
    set_layer(learner.actor.tower, ([0.0] * 4, [mean, log_std]))


def normalized(x: Tensor) -> Tensor:
    return (x - x.mean()) / (x.var(correction=0) + 1e-3).sqrt()


def sampled_action(learner: CrossQ, mean: float, std: float) -> tuple[Tensor, Tensor]:
    """Return the actions of the learner's next sample and their log-densities."""
    z = next_noise(learner)[:, 0]
    action = torch.tanh(mean + std * z)
    logp = -0.5 * z**2 - 0.5 * math.log(2 * math.pi) - math.log(std) - torch.log(1 - action**2)
    return action, logp


def test_targets_come_from_the_joint_forward_pass() -> None:
    learner = make_learner()
    set_policy(learner, 0.3, math.log(0.5))
    # critics of the normalized action: 1 + 2 a and 4 - 3 a
    set_layer(learner.critics.towers, ([0.0, 0.0, 2.0], [1.0]), ([0.0, 0.0, -3.0], [4.0]))
    next_action, next_logp = sampled_action(learner, 0.3, 0.5)
    action = normalized(torch.cat([torch.tensor([0.5, 0.0, -0.5]), next_action]))  # of all six rows
    q = torch.stack([1 + 2 * action, 4 - 3 * action])
    value = q[:, 3:].amin(0) - 0.5 * next_logp
    target = 1 + 0.9 * value * torch.tensor([1.0, 0.0, 1.0])  # terminated: 1; truncated bootstraps
    error = q[:, :3] - target
    loss, td_error, q_mean = learner.critic_loss(steps())
    assert loss.item() == pytest.approx((0.5 * error.square().sum(0)).mean().item(), rel=1e-4)
    assert td_error.tolist() == pytest.approx(error.abs().mean(0).tolist(), rel=1e-4)
    assert q_mean.item() == pytest.approx(q[:, :3].mean().item(), rel=1e-4)


def test_targets_have_no_gradient() -> None:
    learner = make_learner()
    set_policy(learner, 0.3, math.log(0.5))
    set_layer(learner.critics.towers, ([0.0, 0.0, 2.0], [1.0]), ([0.0, 0.0, -3.0], [4.0]))
    rng = learner.rng.get_state()
    loss, _, _ = learner.critic_loss(steps())
    (gradient,) = torch.autograd.grad(loss, [learner.critics.towers.biases[0]])
    learner.rng.set_state(rng)
    next_action, next_logp = sampled_action(learner, 0.3, 0.5)
    action = normalized(torch.cat([torch.tensor([0.5, 0.0, -0.5]), next_action]))
    q = torch.stack([1 + 2 * action, 4 - 3 * action])
    target = 1 + 0.9 * (q[:, 3:].amin(0) - 0.5 * next_logp) * torch.tensor([1.0, 0.0, 1.0])
    # a gradient through the targets would add that of the next values
    assert gradient.flatten().tolist() == pytest.approx((q[:, :3] - target).mean(1).tolist(), rel=1e-4)


def test_importance_weights_scale_losses_but_not_priorities() -> None:
    learner, weight = make_learner(net__hidden_sizes=[8]), torch.tensor([1.0, 0.5, 0.1])
    plain, weighted = probe(learner, steps()), probe(learner, steps(weight=weight))
    assert plain.priority is not None
    assert weighted.priority is not None
    assert torch.equal(plain.priority, weighted.priority)
    assert weighted.metrics["critic_loss"] < plain.metrics["critic_loss"]


def test_actor_loss_uses_the_running_statistics_of_the_critics() -> None:
    learner = make_learner()
    set_policy(learner, 0.3, math.log(0.01))
    set_layer(learner.critics.towers, ([0.0, 0.0, 6.0], [0.0]), ([0.0, 0.0, -4.0], [0.0]))
    with torch.no_grad():
        learner.critics.towers.norms[0].mean[:, 0, 2] = 0.1
        learner.critics.towers.norms[0].var[:, 0, 2] = 0.25 - 1e-3
    action, logp = sampled_action(learner, 0.3, 0.01)
    # normalized (a - 0.1) / 0.5 > 0, of which the second critic is smaller
    q = -4 * (action - 0.1) / 0.5
    before = {name: value.clone() for name, value in learner.critics.state_dict().items()}
    loss, entropy = learner.actor_loss(steps())
    assert loss.item() == pytest.approx((0.5 * logp - q).mean().item(), rel=1e-4)
    assert entropy.item() == pytest.approx(-logp.mean().item(), rel=1e-4)
    assert all(torch.equal(value, before[name]) for name, value in learner.critics.state_dict().items())


def test_updates_move_running_statistics_of_the_network_that_they_train() -> None:
    learner = make_learner(policy_delay=2)
    batches = []
    for _ in range(4):
        learner.update(steps())
        batches.append((learner.critics.towers.norms[0].batches.item(), learner.actor.tower.norms[0].batches.item()))
    assert batches == [(1, 0), (2, 1), (3, 1), (4, 2)]


def test_actor_and_temperature_are_updated_every_policy_delay() -> None:
    learner = make_learner(alpha=None)
    moved = []
    for _ in range(7):
        actor, critics, alpha = copy_weights(learner.actor), copy_weights(learner.critics), learner.alpha.item()
        learner.update(steps())
        moved.append(not all_equal(actor, copy_weights(learner.actor)))
        assert moved[-1] == (alpha != learner.alpha.item())
        assert not all_equal(critics, copy_weights(learner.critics))
    assert moved == [False, False, True, False, False, True, False]


def test_defaults_are_those_of_the_paper() -> None:
    learner = make_learner(alpha=None)
    assert learner.alpha.item() == 1.0
    assert learner.critic_optimizer.betas == learner.actor_optimizer.betas == (0.5, 0.999)
    assert learner.critic_optimizer.lr == 1e-3
    assert (learner.cfg.policy_delay, learner.cfg.renorm_warmup) == (3, 100_000)
    assert {name for name, part in vars(learner).items() if isinstance(part, nn.Module)} == {
        "actor",
        "critics",
        "log_alpha",
        "policy",
    }  # no target networks
    # entropy above the target -1 lowers alpha
    assert learner.alpha_loss(torch.tensor(0.5)).item() == 0.0  # log alpha is 0
    (gradient,) = torch.autograd.grad(learner.alpha_loss(torch.tensor(0.5)), [learner.log_alpha[0]])
    assert gradient.item() == pytest.approx(1.5)


def test_optimizers_without_betas_need_no_other_setting() -> None:
    assert make_learner(optimizer="rmsprop").critic_optimizer.kind == "rmsprop"
    with pytest.raises(UserError, match="optimizer_betas"):
        make_learner(optimizer="rmsprop", optimizer_betas=[0.6, 0.99])


def test_q_values_converge_to_the_targets() -> None:
    learner = make_learner(net__hidden_sizes=[8], critic_hidden_sizes=[16, 16], lr=1e-2)
    obs = torch.randn(3, 2, generator=torch.Generator().manual_seed(0))
    data = steps(obs=obs, terminated=torch.ones(3, dtype=torch.bool), reward=torch.tensor([1.0, -2.0, 3.0]))
    data = data[torch.arange(3).repeat(20)]  # enough rows for stable statistics
    for _ in range(600):
        learner.update(data)
    q = learner.critics(data.obs, data.action)  # with the running statistics
    assert q.flatten().tolist() == pytest.approx([1.0, -2.0, 3.0] * 40, abs=0.3)


def test_discrete_actions_and_recurrent_networks_are_rejected() -> None:
    with pytest.raises(UserError, match="crossq needs continuous actions in a bounded one-dimensional Box"):
        make_learner(DISCRETE)
    with pytest.raises(UserError, match=r"crossq does not support recurrent networks: set net\.recurrent=none"):
        make_learner(net__recurrent="lstm")


def test_restored_learner_continues_identically() -> None:
    learner, other = make_learner(net__hidden_sizes=[8]), make_learner(net__hidden_sizes=[8], seed=9)
    learner.update(steps())
    other.load_state_dict(learner.state_dict())
    for _ in range(3):
        first, second = learner.update(steps()), other.update(steps())
        assert all(torch.equal(first.metrics[name], second.metrics[name]) for name in first.metrics)
    assert set(first.metrics) == set(CrossQ.metrics)

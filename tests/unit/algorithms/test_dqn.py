"""Targets, losses, target network and exploration of DQN, with numbers worked out by hand."""

from __future__ import annotations

from typing import Any

import by_hand
import numpy as np
import pytest
import torch
from by_hand import all_equal, check_polyak_update, copy_weights
from gymnasium.spaces import Box, Discrete, MultiDiscrete
from probe import probe
from torch import Tensor

import zhixing as zx
from zhixing.algorithms.dqn import DQN
from zhixing.core.batch import Batch
from zhixing.core.policy import Phase
from zhixing.core.spaces import Spaces
from zhixing.errors import UserError
from zhixing.nets.heads import DuelingHead
from zhixing.nets.qnet import epsilon_at, forward_obs

SPACES = Spaces(Box(-9.0, 9.0, (3,), np.float32), Discrete(3))


def make_learner(name: str = "dqn", **settings: Any) -> DQN:
    cfg = zx.config.load(algorithm=name, env="Acrobot-v1", **({"net__hidden_sizes": [8]} | settings))
    learner = zx.algorithms.get(name).make(cfg, SPACES)
    assert isinstance(learner, DQN)
    return learner


def set_outputs(dqn: DQN, q: list[float], target: list[float]) -> None:
    """Make both networks return these Q-values for any observation."""
    with torch.no_grad():
        for net, values in ((dqn.net, q), (dqn.target_net, target)):
            net.head.weight.zero_()
            net.head.bias.copy_(torch.tensor(values))


def batch(**fields: Any) -> Batch:
    return by_hand.batch(**({"obs": torch.zeros(3, 3), "next_obs": torch.zeros(3, 3)} | fields))


def targets(dqn: DQN, data: Batch) -> list[float]:
    return dqn.target_value(data, data).tolist()


def test_targets_by_hand() -> None:
    dqn = make_learner()
    set_outputs(dqn, q=[100.0, 0.0, 0.0], target=[5.0, 20.0, 10.0])
    # the target network's maximum is 20: 1 + 0.9 * 20 = 19; terminated: 1; truncated, which bootstraps: 19
    assert targets(dqn, batch()) == pytest.approx([19.0, 1.0, 19.0])


def test_double_dqn_evaluates_the_networks_choice_with_the_target_network() -> None:
    dqn = make_learner("double_dqn")
    set_outputs(dqn, q=[100.0, 0.0, 50.0], target=[5.0, 20.0, 10.0])
    # the network chooses the first action, whose target Q-value is 5: 1 + 0.9 * 5
    assert targets(dqn, batch()) == pytest.approx([5.5, 1.0, 5.5])
    # if this action is invalid it chooses the third, whose target Q-value is 10: 1 + 0.9 * 10
    mask = torch.tensor([[False, True, True]]).expand(3, 3)
    assert targets(dqn, batch(next_mask=mask)) == pytest.approx([10.0, 1.0, 10.0])


def test_mean_of_dueling_q_values_is_the_state_value() -> None:
    head = DuelingHead(4, 3)
    x = torch.randn(5, 4)
    q = head(x)
    # q = v + a - mean(a), so the mean over actions is v, and a constant added to all advantages cancels
    assert torch.allclose(q.mean(1, keepdim=True), head.value(x), atol=1e-6)
    with torch.no_grad():
        head.advantage[-1].bias.add_(7.0)
    assert torch.allclose(head(x), q, atol=1e-5)


def test_targets_use_the_discount_of_each_row() -> None:
    dqn = make_learner()
    set_outputs(dqn, q=[0.0] * 3, target=[10.0, 0.0, 0.0])
    # 1 + 0.9 * 10, 2 (terminated), 3 + 0.9³ * 10 = 3 + 7.29
    data = batch(reward=torch.tensor([1.0, 2.0, 3.0]), discount=torch.tensor([0.9, 0.81, 0.729]))
    assert targets(dqn, data) == pytest.approx([10.0, 2.0, 10.29])


def test_targets_ignore_invalid_actions() -> None:
    dqn = make_learner()
    set_outputs(dqn, q=[0.0] * 3, target=[5.0, 20.0, 10.0])
    mask = torch.tensor([[True, False, True], [False, False, False], [True, False, False]])
    # 1 + 0.9 * 10; terminated, where no action is valid: 1; 1 + 0.9 * 5
    assert targets(dqn, batch(next_mask=mask)) == pytest.approx([10.0, 1.0, 5.5])


# the targets are the rewards 1, 1, 1, the errors 0, 0.5, 3. Huber: 0, 0.125, 3 - 0.5 = 2.5; squares: 0, 0.25, 9
@pytest.mark.parametrize(("loss", "expected"), [("huber", (0.125 + 2.5) / 3), ("mse", 9.25 / 3)])
def test_loss_by_hand(loss: str, expected: float) -> None:
    dqn = make_learner(loss=loss)
    set_outputs(dqn, q=[1.0, 1.5, 4.0], target=[0.0, 0.0, 0.0])
    assert probe(dqn, batch()).metrics["loss"].item() == pytest.approx(expected)


def test_importance_weights_scale_losses_but_not_priorities() -> None:
    dqn = make_learner(loss="mse")
    set_outputs(dqn, q=[1.0, 1.5, 4.0], target=[0.0, 0.0, 0.0])
    result = probe(dqn, batch(weight=torch.tensor([1.0, 0.5, 0.1])))
    assert result.metrics["loss"].item() == pytest.approx((0.5 * 0.25 + 0.1 * 9.0) / 3)
    assert result.priority is not None
    assert result.priority.tolist() == pytest.approx([0.0, 0.5, 3.0])


def test_q_mean_is_over_the_actions_of_the_batch() -> None:
    dqn = make_learner()
    set_outputs(dqn, q=[1.0, 2.0, 6.0], target=[0.0] * 3)
    assert probe(dqn, batch()).metrics["q_mean"].item() == pytest.approx(3.0)


def test_target_network_is_copied_every_target_update_interval() -> None:
    dqn = make_learner(target_update_interval=3)
    first = copy_weights(dqn.target_net)
    assert all_equal(first, copy_weights(dqn.net))
    for _ in range(2):
        dqn.update(batch())
    assert all_equal(copy_weights(dqn.target_net), first)
    dqn.update(batch())
    assert all_equal(copy_weights(dqn.target_net), copy_weights(dqn.net))
    assert not all_equal(copy_weights(dqn.target_net), first)


def test_target_network_is_polyak_averaged_with_tau() -> None:
    dqn = make_learner(target_update_interval=1, tau=0.1)
    start = copy_weights(dqn.target_net)
    dqn.update(batch())
    check_polyak_update(dqn.target_net, start, dqn.net, tau=0.1)


@pytest.mark.parametrize("optimizer", ["adam", "rmsprop"])
def test_q_values_converge_to_the_targets(optimizer: str) -> None:
    dqn = make_learner(optimizer=optimizer, lr=1e-2)
    data = batch(terminated=torch.ones(3, dtype=torch.bool), reward=torch.tensor([1.0, -2.0, 3.0]))
    first = float(dqn.update(data).metrics["loss"])
    for _ in range(200):
        last = float(dqn.update(data).metrics["loss"])
    assert last < 0.01 * first


def test_epsilon_falls_linearly_over_epsilon_fraction() -> None:
    dqn = make_learner(env_steps=1000, epsilon_start=1.0, epsilon_end=0.2, epsilon_fraction=0.5)
    # over the first 500 steps: 1 - 0.8 * steps / 500
    assert [epsilon_at(dqn.cfg, n) for n in (0, 125, 250, 500, 900)] == pytest.approx([1.0, 0.8, 0.6, 0.2, 0.2])
    assert epsilon_at(make_learner(epsilon_fraction=0.0, epsilon_end=0.1).cfg, 1) == pytest.approx(0.1)


def action_fractions(dqn: DQN, phase: Phase, env_steps: int, mask: Tensor | None = None) -> list[float]:
    """Return how often the policy takes each action."""
    obs = torch.zeros(20_000, 3)
    rng = torch.Generator().manual_seed(0)
    action = dqn.policy.act(obs, None, None if mask is None else mask.expand(20_000, 3), phase, rng, env_steps).action
    return (action.bincount(minlength=3) / 20_000).tolist()


def test_random_actions_have_the_probability_epsilon_of_the_phase() -> None:
    dqn = make_learner(env_steps=1000, epsilon_start=1.0, epsilon_end=0.3, epsilon_fraction=0.5, eval_epsilon=0.06)
    set_outputs(dqn, q=[0.0, 9.0, 1.0], target=[0.0] * 3)
    third = 1 / 3  # three standard errors are 0.01
    assert action_fractions(dqn, Phase.RANDOM, 10**9) == pytest.approx([third] * 3, abs=0.011)
    assert action_fractions(dqn, Phase.COLLECT, 1000) == pytest.approx([0.1, 0.8, 0.1], abs=0.011)
    assert action_fractions(dqn, Phase.EVAL, 0) == pytest.approx([0.02, 0.96, 0.02], abs=0.011)


def test_invalid_actions_are_never_taken() -> None:
    dqn = make_learner(env_steps=1000, epsilon_end=0.5, epsilon_fraction=0.5)
    set_outputs(dqn, q=[0.0, 9.0, 1.0], target=[0.0] * 3)
    mask = torch.tensor([True, False, True])
    assert action_fractions(dqn, Phase.RANDOM, 0, mask) == pytest.approx([0.5, 0.0, 0.5], abs=0.011)
    assert action_fractions(dqn, Phase.COLLECT, 1000, mask) == pytest.approx([0.25, 0.0, 0.75], abs=0.011)
    assert action_fractions(dqn, Phase.EVAL, 0, mask) == [0.0, 0.0, 1.0]


def test_value_is_the_highest_q_value() -> None:
    dqn = make_learner()
    set_outputs(dqn, q=[0.0, 9.0, 1.0], target=[0.0] * 3)
    assert dqn.value(torch.zeros(2, 3)).tolist() == [9.0, 9.0]


def test_other_action_spaces_are_rejected() -> None:
    cfg = zx.config.load(algorithm="dqn", env="Acrobot-v1")
    for action in (Box(-1.0, 1.0, (1,), np.float32), MultiDiscrete([2, 2])):
        with pytest.raises(UserError, match=r"dqn needs Discrete actions, but this env has"):
            DQN(cfg, Spaces(SPACES.obs, action))


def test_restored_learner_continues_identically() -> None:
    dqn, other = make_learner(target_update_interval=2), make_learner(target_update_interval=2, seed=9)
    dqn.update(batch())
    other.load_state_dict(dqn.state_dict())
    for _ in range(3):
        dqn.update(batch())
        other.update(batch())
    assert all_equal(copy_weights(dqn.net), copy_weights(other.net))
    assert all_equal(copy_weights(dqn.target_net), copy_weights(other.target_net))


def test_load_networks_loads_neither_counters_nor_moments() -> None:
    dqn, other = make_learner(target_update_interval=3), make_learner(seed=9)
    for _ in range(4):
        dqn.update(batch())
    other.load_networks(dqn.state_dict())
    assert all_equal(copy_weights(dqn.net), copy_weights(other.net))
    assert all_equal(copy_weights(dqn.target_net), copy_weights(other.target_net))
    assert not all_equal(copy_weights(other.net), copy_weights(other.target_net))
    assert other.updates == 0
    assert not other.optimizer.first_moment[0].any()


def test_recurrent_losses_exclude_the_burn_in() -> None:
    dqn = make_learner(
        net__recurrent="gru", net__recurrent_size=4, replay__burn_in=2, replay__sequence_length=3, gamma=0.9
    )
    set_outputs(dqn, q=[1.0, 1.5, 4.0], target=[0.0, 0.0, 10.0])
    never = torch.zeros(2, 5, dtype=torch.bool)
    terminated = never.clone()
    terminated[0, 4] = True
    data = Batch(
        obs=torch.zeros(2, 5, 3),
        next_obs=torch.zeros(2, 5, 3),
        action=torch.tensor([[2] * 5, [0] * 5]),
        reward=torch.tensor([[99.0, 99.0, 1.0, 2.0, 3.0], [99.0, 99.0, 0.0, 0.0, 0.0]]),
        terminated=terminated,
        truncated=never,
        is_first=never,
        hidden=torch.zeros(2, 5, 4),
        index=torch.arange(2),
        weight=torch.ones(2),
    )
    result = probe(dqn, data)
    # targets r + 0.9 * 10: 10, 11 and 3 (terminated), with q = 4; 9, 9, 9, with q = 1; the rewards 99 are burn-in
    # Huber losses: 6 - 0.5, 7 - 0.5, 1 - 0.5, and three times 8 - 0.5: (5.5 + 6.5 + 0.5 + 22.5) / 6
    assert result.metrics["loss"].item() == pytest.approx(35.0 / 6, rel=1e-5)
    # priorities 0.9 max + 0.1 mean: 0.9 * 7 + 0.1 * 14 / 3, and 8
    assert result.priority is not None
    assert result.priority.tolist() == pytest.approx([6.3 + 1.4 / 3, 8.0], rel=1e-5)


def test_unrolled_q_values_equal_those_of_single_steps() -> None:
    dqn = make_learner(net__recurrent="lstm", net__recurrent_size=4)
    obs, is_first = torch.randn(2, 6, 3), torch.zeros(2, 6, dtype=torch.bool)
    is_first[1, 4] = True
    hidden = tuple(torch.randn(2, 6, 4) for _ in range(2))
    rows = forward_obs(dqn.net, Batch(obs=obs, is_first=is_first, hidden=hidden), burn_in=1).view(5, 2, 3)
    for b in range(2):
        state: Any = tuple(leaf[b : b + 1, 0] for leaf in hidden)
        for t in range(6):
            q, state = dqn.net(obs[b : b + 1, t], None if is_first[b, t] else state)
            if t > 0:
                assert torch.allclose(rows[t - 1, b], q[0], atol=1e-6)

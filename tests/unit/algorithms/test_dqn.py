"""DQN's targets by hand, its loss, its target network and its exploration."""

from __future__ import annotations

from typing import Any

import by_hand
import numpy as np
import pytest
import torch
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


def learner(name: str = "dqn", **settings: Any) -> DQN:
    cfg = zx.config.load(algorithm=name, env="Acrobot-v1", **({"net__hidden_sizes": [8]} | settings))
    made = zx.algorithms.get(name).make(cfg, SPACES)
    assert isinstance(made, DQN)
    return made


def table(dqn: DQN, q: list[float], target: list[float]) -> None:
    """Let the network and its target answer the same for every observation."""
    with torch.no_grad():
        for net, values in ((dqn.net, q), (dqn.target_net, target)):
            net.head.weight.zero_()
            net.head.bias.copy_(torch.tensor(values))


def batch(**fields: Any) -> Batch:
    return by_hand.batch(**({"obs": torch.zeros(3, 3), "next_obs": torch.zeros(3, 3)} | fields))


def targets(dqn: DQN, shown: Batch) -> list[float]:
    return dqn.target_value(shown, shown).tolist()


def weights(net: torch.nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in net.parameters()]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a, b, strict=True))


def test_targets_by_hand() -> None:
    dqn = learner()
    table(dqn, q=[100.0, 0.0, 0.0], target=[5.0, 20.0, 10.0])
    # the target network's best is 20: 1 + 0.9 * 20 = 19; death: 1; truncation bootstraps: 19
    assert targets(dqn, batch()) == pytest.approx([19.0, 1.0, 19.0])


def test_double_dqn_chooses_by_the_network_and_values_by_its_target() -> None:
    dqn = learner("double_dqn")
    table(dqn, q=[100.0, 0.0, 50.0], target=[5.0, 20.0, 10.0])
    # the network's best action is the first, worth 5 to the target: 1 + 0.9 * 5
    assert targets(dqn, batch()) == pytest.approx([5.5, 1.0, 5.5])
    # where that is forbidden the third is, worth 10
    mask = torch.tensor([[False, True, True]]).expand(3, 3)
    assert targets(dqn, batch(next_mask=mask)) == pytest.approx([10.0, 1.0, 10.0])


def test_dueling_values_have_the_mean_of_the_value_stream() -> None:
    head = DuelingHead(4, 3)
    x = torch.randn(5, 4)
    q = head(x)
    # q = v + a - mean(a): the mean over actions is v, so adding a constant to all advantages changes nothing
    assert torch.allclose(q.mean(1, keepdim=True), head.value(x), atol=1e-6)
    with torch.no_grad():
        head.advantage[-1].bias.add_(7.0)
    assert torch.allclose(head(x), q, atol=1e-5)


def test_n_step_targets_use_their_own_discount() -> None:
    dqn = learner()
    table(dqn, q=[0.0] * 3, target=[10.0, 0.0, 0.0])
    # 1 + 0.9 * 10, 2 (died), 3 + 0.9³ * 10 = 3 + 7.29
    shown = batch(reward=torch.tensor([1.0, 2.0, 3.0]), discount=torch.tensor([0.9, 0.81, 0.729]))
    assert targets(dqn, shown) == pytest.approx([10.0, 2.0, 10.29])


def test_targets_never_come_from_a_forbidden_action() -> None:
    dqn = learner()
    table(dqn, q=[0.0] * 3, target=[5.0, 20.0, 10.0])
    mask = torch.tensor([[True, False, True], [False, False, False], [True, False, False]])
    # 1 + 0.9 * 10; death, where nothing is allowed: 1; 1 + 0.9 * 5
    assert targets(dqn, batch(next_mask=mask)) == pytest.approx([10.0, 1.0, 5.5])


# targets are the rewards 1, 1, 1: errors 0, 0.5, 3. Huber: 0, 0.125, 3 - 0.5 = 2.5; squares: 0, 0.25, 9
@pytest.mark.parametrize(("loss", "expected"), [("huber", (0.125 + 2.5) / 3), ("mse", 9.25 / 3)])
def test_loss_by_hand(loss: str, expected: float) -> None:
    dqn = learner(loss=loss)
    table(dqn, q=[1.0, 1.5, 4.0], target=[0.0, 0.0, 0.0])
    assert probe(dqn, batch()).metrics["loss"].item() == pytest.approx(expected)


def test_importance_weights_weigh_each_error() -> None:
    dqn = learner(loss="mse")
    table(dqn, q=[1.0, 1.5, 4.0], target=[0.0, 0.0, 0.0])
    found = probe(dqn, batch(weight=torch.tensor([1.0, 0.5, 0.1])))
    assert found.metrics["loss"].item() == pytest.approx((0.5 * 0.25 + 0.1 * 9.0) / 3)
    assert found.priority is not None
    assert found.priority.tolist() == pytest.approx([0.0, 0.5, 3.0])  # of the errors, not weighted


def test_q_mean_is_of_the_actions_taken() -> None:
    dqn = learner()
    table(dqn, q=[1.0, 2.0, 6.0], target=[0.0] * 3)
    assert probe(dqn, batch()).metrics["q_mean"].item() == pytest.approx(3.0)


def test_the_target_network_is_copied_every_so_many_updates() -> None:
    dqn = learner(target_update_interval=3)
    first = weights(dqn.target_net)
    assert same(first, weights(dqn.net))
    for _ in range(2):
        dqn.update(batch())
    assert same(weights(dqn.target_net), first)
    dqn.update(batch())
    assert same(weights(dqn.target_net), weights(dqn.net))
    assert not same(weights(dqn.target_net), first)


def test_the_target_network_may_follow_slowly() -> None:
    dqn = learner(target_update_interval=1, tau=0.1)
    start = weights(dqn.target_net)
    dqn.update(batch())
    for target, before, net in zip(weights(dqn.target_net), start, weights(dqn.net), strict=True):
        assert torch.allclose(target, 0.9 * before + 0.1 * net, atol=1e-7)


def test_gradients_change_nothing_and_leave_the_target_alone() -> None:
    dqn = learner()
    before = weights(dqn.net) + weights(dqn.target_net)
    probe(dqn, batch())
    assert same(before, weights(dqn.net) + weights(dqn.target_net))
    assert not any(p.requires_grad for p in dqn.target_net.parameters())


@pytest.mark.parametrize("optimizer", ["adam", "rmsprop"])
def test_values_approach_the_targets(optimizer: str) -> None:
    dqn = learner(optimizer=optimizer, lr=1e-2)
    shown = batch(terminated=torch.ones(3, dtype=torch.bool), reward=torch.tensor([1.0, -2.0, 3.0]))
    first = float(dqn.update(shown).metrics["loss"])
    for _ in range(200):
        last = float(dqn.update(shown).metrics["loss"])
    assert last < 0.01 * first


def test_epsilon_falls_over_its_share_of_the_budget() -> None:
    dqn = learner(env_steps=1000, epsilon_start=1.0, epsilon_end=0.2, epsilon_fraction=0.5)
    # over the first 500 steps: 1 - 0.8 * steps / 500
    assert [epsilon_at(dqn.cfg, n) for n in (0, 125, 250, 500, 900)] == pytest.approx([1.0, 0.8, 0.6, 0.2, 0.2])
    assert epsilon_at(learner(epsilon_fraction=0.0, epsilon_end=0.1).cfg, 1) == pytest.approx(0.1)


def shares(dqn: DQN, phase: Phase, env_steps: int, mask: Tensor | None = None) -> list[float]:
    obs = torch.zeros(20_000, 3)
    rng = torch.Generator().manual_seed(0)
    action = dqn.policy.act(obs, None, None if mask is None else mask.expand(20_000, 3), phase, rng, env_steps).action
    return (action.bincount(minlength=3) / 20_000).tolist()


def test_actions_are_greedy_or_random_by_phase() -> None:
    dqn = learner(env_steps=1000, epsilon_start=1.0, epsilon_end=0.3, epsilon_fraction=0.5, eval_epsilon=0.06)
    table(dqn, q=[0.0, 9.0, 1.0], target=[0.0] * 3)
    third = 1 / 3  # of what is random; three standard errors are 0.01
    assert shares(dqn, Phase.RANDOM, 10**9) == pytest.approx([third] * 3, abs=0.011)
    assert shares(dqn, Phase.COLLECT, 1000) == pytest.approx([0.1, 0.8, 0.1], abs=0.011)
    assert shares(dqn, Phase.EVAL, 0) == pytest.approx([0.02, 0.96, 0.02], abs=0.011)


def test_forbidden_actions_are_never_taken() -> None:
    dqn = learner(env_steps=1000, epsilon_end=0.5, epsilon_fraction=0.5)
    table(dqn, q=[0.0, 9.0, 1.0], target=[0.0] * 3)
    mask = torch.tensor([True, False, True])
    assert shares(dqn, Phase.RANDOM, 0, mask) == pytest.approx([0.5, 0.0, 0.5], abs=0.011)
    assert shares(dqn, Phase.COLLECT, 1000, mask) == pytest.approx([0.25, 0.0, 0.75], abs=0.011)
    assert shares(dqn, Phase.EVAL, 0, mask) == [0.0, 0.0, 1.0]


def test_value_is_the_best_actions() -> None:
    dqn = learner()
    table(dqn, q=[0.0, 9.0, 1.0], target=[0.0] * 3)
    assert dqn.value(torch.zeros(2, 3)).tolist() == [9.0, 9.0]


def test_what_it_cannot_do_is_refused_by_name() -> None:
    cfg = zx.config.load(algorithm="dqn", env="Acrobot-v1")
    for action in (Box(-1.0, 1.0, (1,), np.float32), MultiDiscrete([2, 2])):
        with pytest.raises(UserError, match=r"dqn needs Discrete actions, but this env has"):
            DQN(cfg, Spaces(SPACES.obs, action))


def test_state_round_trip_gives_the_same_next_update() -> None:
    dqn, other = learner(target_update_interval=2), learner(target_update_interval=2, seed=9)
    dqn.update(batch())
    other.load_state_dict(dqn.state_dict())
    for _ in range(3):
        dqn.update(batch())
        other.update(batch())
    assert same(weights(dqn.net), weights(other.net))
    assert same(weights(dqn.target_net), weights(other.target_net))


def test_start_from_takes_the_networks_and_not_the_moments() -> None:
    dqn, other = learner(target_update_interval=3), learner(seed=9)
    for _ in range(4):
        dqn.update(batch())
    other.load_networks(dqn.state_dict())
    assert same(weights(dqn.net), weights(other.net))
    assert same(weights(dqn.target_net), weights(other.target_net))
    assert not same(weights(other.net), weights(other.target_net))
    assert other.updates == 0
    assert not other.optimizer.first_moment[0].any()


def test_recurrent_targets_and_losses_leave_out_the_burn_in() -> None:
    dqn = learner(net__recurrent="gru", net__recurrent_size=4, replay__burn_in=2, replay__sequence_length=3, gamma=0.9)
    table(dqn, q=[1.0, 1.5, 4.0], target=[0.0, 0.0, 10.0])
    never = torch.zeros(2, 5, dtype=torch.bool)
    died = never.clone()
    died[0, 4] = True
    shown = Batch(
        obs=torch.zeros(2, 5, 3),
        next_obs=torch.zeros(2, 5, 3),
        action=torch.tensor([[2] * 5, [0] * 5]),
        reward=torch.tensor([[99.0, 99.0, 1.0, 2.0, 3.0], [99.0, 99.0, 0.0, 0.0, 0.0]]),
        terminated=died,
        truncated=never,
        is_first=never,
        hidden=torch.zeros(2, 5, 4),
        index=torch.arange(2),
        weight=torch.ones(2),
    )
    found = probe(dqn, shown)
    # targets r + 0.9 * 10: 10, 11 and 3 (died) against q = 4; 9, 9, 9 against 1. The rewards of 99 don't enter.
    # huber: 6 - .5, 7 - .5, 1 - .5 = 0.5, and three times 8 - .5: (5.5 + 6.5 + 0.5 + 22.5) / 6
    assert found.metrics["loss"].item() == pytest.approx(35.0 / 6, rel=1e-5)
    # 0.9 of the largest error and 0.1 of the mean: 0.9 * 7 + 0.1 * 14 / 3, and 8
    assert found.priority is not None
    assert found.priority.tolist() == pytest.approx([6.3 + 1.4 / 3, 8.0], rel=1e-5)


def test_recurrent_values_are_those_of_stepping_through_the_sequence() -> None:
    dqn = learner(net__recurrent="lstm", net__recurrent_size=4)
    obs, is_first = torch.randn(2, 6, 3), torch.zeros(2, 6, dtype=torch.bool)
    is_first[1, 4] = True
    hidden = tuple(torch.randn(2, 6, 4) for _ in range(2))
    rows = forward_obs(dqn.net, Batch(obs=obs, is_first=is_first, hidden=hidden), burn_in=1).view(5, 2, 3)
    for b in range(2):
        memory: Any = tuple(leaf[b : b + 1, 0] for leaf in hidden)
        for t in range(6):
            q, memory = dqn.net(obs[b : b + 1, t], None if is_first[b, t] else memory)
            if t > 0:
                assert torch.allclose(rows[t - 1, b], q[0], atol=1e-6)

"""Targets, losses and updates of PQN, with numbers worked out by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from by_hand import CONTINUOUS, DISCRETE, OBS, collect_greedy_rollout, column, copy_weights, flag_at
from gymnasium.spaces import Discrete, MultiDiscrete
from probe import gradient_step_data, probe

import zhixing as zx
from zhixing.algorithms.pqn import PQN, PQNConfig
from zhixing.core.batch import Batch
from zhixing.core.policy import Phase
from zhixing.core.spaces import Spaces
from zhixing.errors import UserError


def make_learner(spaces: Spaces = DISCRETE, **settings: Any) -> PQN:
    base = {"net__hidden_sizes": [], "gamma": 0.5, "td_lambda": 0.5}  # one linear layer
    cfg = zx.config.load(algorithm="pqn", env="Acrobot-v1", **(base | settings))
    assert isinstance(cfg, PQNConfig)
    return PQN(cfg, spaces)


def set_q(learner: PQN) -> None:
    """Let Q be x, -x and 0, where x is the first number of the observation."""
    with torch.no_grad():
        learner.net.head.weight.copy_(torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 0.0]]))
        learner.net.head.bias.zero_()


def rollout(terminated: Any = (), truncated: Any = (), **fields: Any) -> Batch:
    """Return three steps of one environment: x is 4, -8, 2, and 16 after the last step; episodes end in x = 6."""
    x, next_x = torch.tensor([4.0, -8.0, 2.0]), torch.tensor([-8.0, 2.0, 16.0])
    for t in (*terminated, *truncated):
        next_x[t] = 6.0
    obs, next_obs = (torch.stack([value, torch.zeros(3)], -1)[:, None] for value in (x, next_x))
    base = {"obs": obs, "next_obs": next_obs, "action": column(0, 0, 2), "reward": column(1.0, 2.0, 3.0)}
    return Batch(**base, terminated=flag_at(*terminated), truncated=flag_at(*truncated), **fields)


def targets(learner: PQN, batch: Batch) -> list[float]:
    returns: list[float] = learner.add_targets(batch).returns[:, 0].tolist()
    return returns


def test_targets_mix_the_next_target_and_the_next_maximum() -> None:
    learner = make_learner()
    set_q(learner)
    # maxima |x|: 4, 8, 2, and 16 at the end. G_2 = 3 + 16 / 2 = 11; G_1 = 2 + (11 + 2) / 2 / 2 = 5.25;
    # G_0 = 1 + (5.25 + 8) / 2 / 2 = 4.3125
    assert targets(learner, rollout()) == pytest.approx([4.3125, 5.25, 11.0])


def test_terminated_step_has_no_future() -> None:
    learner = make_learner()
    set_q(learner)
    # G_1 = 2; G_0 = 1 + (2 + 8) / 2 / 2
    assert targets(learner, rollout(terminated=[1])) == pytest.approx([3.5, 2.0, 11.0])


def test_truncated_step_bootstraps_from_the_final_observation() -> None:
    learner = make_learner()
    set_q(learner)
    # G_1 = 2 + 6 / 2 = 5, not from the next row, which is another episode; G_0 = 1 + (5 + 8) / 2 / 2
    assert targets(learner, rollout(truncated=[1])) == pytest.approx([4.25, 5.0, 11.0])


@pytest.mark.parametrize(("lam", "expected"), [(0.0, [5.0, 3.0, 11.0]), (1.0, [4.75, 7.5, 11.0])])
def test_extreme_lambdas_are_one_step_targets_and_full_returns(lam: float, expected: list[float]) -> None:
    learner = make_learner(td_lambda=lam)
    set_q(learner)
    # 0: 1 + 8 / 2, 2 + 2 / 2; 1: 2 + 11 / 2, 1 + 7.5 / 2
    assert targets(learner, rollout()) == pytest.approx(expected)


def test_targets_ignore_invalid_actions() -> None:
    learner = make_learner(Spaces(OBS, Discrete(3), mask=3))
    set_q(learner)
    only = torch.tensor([[[False, True, False]]])
    # Q of the second action is -x: -4, 8, -2, and -16 at the end
    masked = rollout(mask=only.expand(3, 1, 3), next_mask=only.expand(3, 1, 3))
    # G_2 = 3 - 8 = -5; G_1 = 2 + (-5 - 2) / 4 = 0.25; G_0 = 1 + (0.25 + 8) / 4 = 3.0625
    assert targets(learner, masked) == pytest.approx([3.0625, 0.25, -5.0])


def test_loss_is_half_the_squared_error_of_the_taken_actions() -> None:
    learner = make_learner()
    set_q(learner)
    data = learner.add_targets(rollout()).flatten()
    result = probe(learner, data, "gradient_step")
    # Q of the actions 0, 0, 2: 4, -8, 0; errors 0.3125, 13.25, 11
    errors = [0.3125, 13.25, 11.0]
    assert result.metrics["loss"].item() == pytest.approx(0.5 * sum(e**2 for e in errors) / 3)
    assert result.metrics["q_mean"].item() == pytest.approx((4 - 8) / 3)
    (head,) = [p for p in learner.net.parameters() if p.shape == (3,)]
    loss = 0.5 * (data.returns - learner.q_values(data).gather(-1, data.action[:, None])[:, 0]).square().mean()
    # minus the mean errors of each action
    expected = [-(0.3125 + 13.25) / 3, 0.0, -11 / 3]
    assert torch.autograd.grad(loss, [head])[0].tolist() == pytest.approx(expected)


def test_update_uses_each_step_once_per_epoch() -> None:
    learner = make_learner(epochs=3, minibatch_size=1, lr=1e-9)
    before = learner.updates
    update = learner.update(rollout())
    assert learner.updates - before == 9
    assert set(update.metrics) == set(PQN.metrics)


def test_targets_stay_the_same_in_all_epochs() -> None:
    learner = make_learner(epochs=50, lr=0.05, lr_schedule="constant", minibatch_size=3)
    set_q(learner)
    data, wanted = rollout(), targets(learner, rollout())
    learner.update(data)
    assert gradient_step_data(make_learner(minibatch_size=3), data).returns.shape == (3,)
    flat = data.flatten()
    q = learner.q_values(flat).gather(-1, flat.action[:, None])[:, 0]
    # three steps are fitted by weights of three actions: closer to the targets than at the beginning, 4, -8 and 0
    assert (q - torch.tensor(wanted)).abs().sum() < sum(abs(a - b) for a, b in zip(wanted, (4, -8, 0), strict=True))


def test_layer_norm_by_hand() -> None:
    learner = make_learner(net__hidden_sizes=[2])
    assert learner.net.torso.layer_norm
    parameters = dict(learner.net.torso.named_parameters())
    with torch.no_grad():
        parameters["linears.0.weight"].copy_(torch.tensor([[1.0, 0.0], [3.0, 0.0]]))
        parameters["linears.0.bias"].zero_()
    # [2, 6]: mean 4, std 2, normalized [-1, 1], after relu [0, 1]
    assert learner.net.torso(torch.tensor([[2.0, 0.0]])).tolist() == [pytest.approx([0.0, 1.0], abs=1e-4)]
    assert not make_learner(net__hidden_sizes=[2], layer_norm=False).net.torso.layer_norm


def test_actions_are_epsilon_greedy() -> None:
    learner = make_learner(epsilon_start=1.0, epsilon_end=0.25, epsilon_fraction=0.5, env_steps=1000)
    set_q(learner)
    rng, obs = torch.Generator().manual_seed(0), torch.tensor([[1.0, 0.0]]).expand(20_000, 2)
    for env_steps, epsilon in ((0, 1.0), (250, 0.625), (900, 0.25)):
        action = learner.policy.act(obs, None, None, Phase.COLLECT, rng, env_steps).action
        # random actions are the best one in a third of the cases
        assert (action == 0).float().mean().item() == pytest.approx(1 - epsilon * 2 / 3, abs=0.015)
    assert (learner.policy.act(obs, None, None, Phase.EVAL, rng, 0).action == 0).all()


def test_recurrent_targets_equal_those_of_single_steps() -> None:
    learner = make_learner(net__recurrent="gru", net__recurrent_size=4, td_lambda=0.0)
    batch = collect_greedy_rollout(learner, steps=5, envs=2)
    returns = learner.add_targets(batch).returns
    hidden = learner.policy.initial_hidden(2)
    with torch.no_grad():
        for t in range(5):
            _, hidden = learner.net(batch.obs[t], hidden)
            next_q, _ = learner.net(batch.next_obs[t], hidden)
            torch.testing.assert_close(returns[t], batch.reward[t] + 0.5 * next_q.amax(-1), rtol=1e-4, atol=1e-5)


def test_normalizers_are_updated_after_the_epochs() -> None:
    learner = make_learner(normalize_obs=True)
    learner.update(rollout())
    encoder = learner.net.torso.encoder
    assert encoder.norm.mean[0].item() == pytest.approx((4 - 8 + 2) / 3)


def test_unsupported_action_spaces_are_rejected() -> None:
    for space in (MultiDiscrete([2, 2]), CONTINUOUS.action):
        with pytest.raises(UserError, match="pqn needs Discrete actions"):
            make_learner(Spaces(OBS, space))


def test_restored_learner_continues_identically() -> None:
    learner, other = make_learner(net__hidden_sizes=[8]), make_learner(net__hidden_sizes=[8], seed=9)
    learner.update(rollout())
    other.load_state_dict(learner.state_dict())
    for _ in range(3):
        first, second = learner.update(rollout()), other.update(rollout())
        assert all(torch.equal(first.metrics[name], second.metrics[name]) for name in first.metrics)
    assert all(np.array_equal(a, b) for a, b in zip(copy_weights(learner.net), copy_weights(other.net), strict=True))

"""Advantages and losses of MAPPO and IPPO, also with agents that have left, with numbers worked out by hand."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from by_hand import ENTROPY, LOGITS, all_equal, copy_weights, flag_at
from gymnasium.spaces import Box, Dict, Discrete, Text
from probe import last_gradients, probe
from torch import Tensor

import zhixing as zx
from zhixing.algorithms.mappo import MAPPO
from zhixing.core.batch import Batch
from zhixing.core.policy import Phase
from zhixing.core.spaces import Spaces
from zhixing.core.tree import tree_map
from zhixing.errors import UserError
from zhixing.ops.policy_gradient import minibatches

OBS = Box(-999.0, 999.0, (1,), np.float32)
SPACES = Spaces(OBS, Discrete(3), num_agents=3, state=1)
INDIVIDUAL = dataclasses.replace(SPACES, alive=True)
SHARED = dataclasses.replace(INDIVIDUAL, reward_kind="shared")
PROBABILITIES = np.exp(LOGITS)


def minibatches_of(learner: MAPPO, data: Batch) -> Iterator[Batch]:
    return minibatches(data, learner.cfg.minibatch_size, learner.rng, learner.actor.recurrent)


def make_learner(name: str = "mappo", spaces: Spaces = SPACES, **settings: Any) -> MAPPO:
    base = {"net__hidden_sizes": [8], "num_envs": 1, "gamma": 0.5, "gae_lambda": 0.0, "max_grad_norm": None}
    cfg = zx.config.load(algorithm=name, env="toy/team-match", **(base | settings))
    learner = zx.algorithms.get(name).make(cfg, spaces)
    assert isinstance(learner, MAPPO)
    return learner


def make_linear_learner(name: str = "mappo", **settings: Any) -> MAPPO:
    """Return linear networks: critics multiply their inputs by 1, 10 and 100, actors have the policy of `LOGITS`."""
    off = {"share_weights": False, "normalize_value": False, "normalize_advantage": False, "entropy_coef": 0.0}
    learner = make_learner(name, **({"net__hidden_sizes": []} | off | settings))
    with torch.no_grad():
        for i in range(3):
            critic: Any = learner.critic.agent_nets[i].head
            critic.linear.weight.fill_(10.0**i)
            actor: Any = learner.actor.agent_nets[i].head
            actor.weight.zero_()
            actor.bias.copy_(torch.tensor(LOGITS))
    return learner


def states(*numbers: float) -> Tensor:
    """Return states `[T,1,1]` of one environment."""
    return torch.tensor(numbers)[:, None, None]


def rollout(**fields: Any) -> Batch:
    """Return three steps in states 1, 2 and 3, which are also the observations, with rewards 1, 2 and 3 of the agents.

    The next state of the second step is 7, that of the last is 8.
    """
    never = torch.zeros(3, 1, dtype=torch.bool)
    state, next_state = states(1.0, 2.0, 3.0), states(2.0, 7.0, 8.0)
    base = {
        "obs": state[..., None].expand(3, 1, 3, 1),
        "next_obs": next_state[..., None].expand(3, 1, 3, 1),
        "state": state,
        "next_state": next_state,
        "action": torch.tensor([0, 1, 2]).expand(3, 1, 3),
        "logp": torch.tensor(LOGITS).expand(3, 1, 3),
        "reward": torch.tensor([1.0, 2.0, 3.0]).expand(3, 1, 3),
        "terminated": never,
        "truncated": never,
    }
    return Batch(**{**base, **fields})


def alive_until(t: int, agent: int = 1) -> dict[str, Tensor]:
    """Return the fields of a rollout in which one agent leaves with step `t`."""
    alive = torch.ones(4, 1, 3, dtype=torch.bool)
    alive[t + 1 :, :, agent] = False
    return {"alive": alive[:-1], "next_alive": alive[1:]}


def advantages(learner: MAPPO, **fields: Any) -> list[list[float]]:
    """Return the advantages of each agent `[A,T]`."""
    data = learner.add_advantages(rollout(**fields))
    assert torch.allclose(data.returns, data.advantage + data.value)
    return data.advantage[:, 0].T.tolist()


def losses(**fields: Any) -> Batch:
    """Return one time step of three agents, with probability ratios 1.5, 0.5 and 1 and advantages 1, 1 and 2."""
    base = {
        "obs": torch.zeros(1, 3, 1),
        "critic_obs": torch.ones(1, 3, 1),
        "action": torch.tensor([[0, 1, 2]]),
        "logp": torch.tensor([LOGITS]) - torch.tensor([[1.5, 0.5, 1.0]]).log(),
        "advantage": torch.tensor([[1.0, 1.0, 2.0]]),
        "returns": torch.tensor([[3.0, 10.0, 90.0]]),
    }
    return Batch(**{**base, **fields})


ALIVE = torch.tensor([[True, True, False]])


def logits_gradient(learner: MAPPO, agent: int) -> list[float]:
    return last_gradients(learner.actor_optimizer)[learner.actor.agent_nets[agent].head.bias].tolist()


def logp_gradient(action: int) -> Any:
    """Return the gradient of the log-probability of an action with respect to the logits."""
    return np.eye(3)[action] - PROBABILITIES


# --- advantages ---


def test_advantages_are_per_agent() -> None:
    result = advantages(make_linear_learner())
    # r + 0.5 V' - V: 1 + 1 - 1, 1 + 1.5 - 2, and 1 + 4 - 3, which bootstraps from the state after the rollout
    assert result[0] == pytest.approx([1.0, 0.5, 2.0])
    assert result[1] == pytest.approx([2.0, -3.0, 12.0])  # 2 + 10 - 10, 2 + 15 - 20, 2 + 40 - 30
    assert result[2] == pytest.approx([3.0, -47.0, 103.0])


@pytest.mark.parametrize("name", ["mappo", "ippo"])
def test_truncation_bootstraps_from_the_final_state_and_termination_does_not(name: str) -> None:
    result = advantages(make_linear_learner(name), truncated=flag_at(1))
    assert [agent[1] for agent in result] == pytest.approx([1 + 3.5 - 2, 2 + 35 - 20, 3 + 350 - 200])
    result = advantages(make_linear_learner(name), terminated=flag_at(1))
    assert [agent[1] for agent in result] == pytest.approx([1 - 2, 2 - 20, 3 - 200])
    assert [agent[0] for agent in result] == pytest.approx([1.0, 2.0, 3.0])  # one-step advantages before are the same


def test_gae_by_hand() -> None:
    # TD errors 1, 0.5, 2, each plus 0.25 of the following advantage: 2, 0.5 + 0.5, 1 + 0.25
    assert advantages(make_linear_learner(gae_lambda=0.5))[0] == pytest.approx([1.25, 1.0, 2.0])
    # the trace ends with the episode: 1 + 0.25 * 2.5
    assert advantages(make_linear_learner(gae_lambda=0.5), truncated=flag_at(1))[0] == pytest.approx([1.625, 2.5, 2.0])


def test_critic_input_is_the_state_in_mappo_and_the_agents_observation_in_ippo() -> None:
    obs = torch.tensor([4.0, 5.0, 6.0]).view(1, 1, 3, 1).expand(3, 1, 3, 1)
    data = rollout(obs=obs)
    assert make_linear_learner().add_advantages(data).value[0, 0].tolist() == pytest.approx([1.0, 10.0, 100.0])
    assert make_linear_learner("ippo").add_advantages(data).value[0, 0].tolist() == pytest.approx([4.0, 50.0, 600.0])


def test_critic_uses_all_observations_if_there_is_no_state() -> None:
    learner = make_learner(spaces=Spaces(OBS, Discrete(3), num_agents=3))
    obs = torch.tensor([[[4.0], [5.0], [6.0]]])
    assert learner.critic_obs(Batch(obs=obs)).tolist() == [[[4.0, 5.0, 6.0]] * 3]
    assert learner.critic_obs(Batch(obs=obs, next_obs=obs + 1), use_next=True).tolist() == [[[5.0, 6.0, 7.0]] * 3]


# --- values of agents that have left ---


@pytest.mark.parametrize("name", ["mappo", "ippo"])
def test_with_shared_rewards_the_value_of_a_dead_agent_is_the_mean_of_the_others(name: str) -> None:
    learner = make_linear_learner(name, spaces=SHARED)
    data = learner.add_advantages(rollout(**alive_until(0)))
    # means of 2 and 200, and of 3 and 300
    assert data.value[:, 0, 1].tolist() == pytest.approx([10.0, 101.0, 151.5])
    result = data.advantage[:, 0].T.tolist()
    # after its last action, its value is the others' mean 101: 2 + 50.5 - 10. After the rollout that is 404
    assert result[1] == pytest.approx([42.5, 2 + 75.75 - 101, 2 + 202 - 151.5])
    assert result[0] == pytest.approx([1.0, 0.5, 2.0])  # unchanged


@pytest.mark.parametrize("name", ["mappo", "ippo"])
def test_shared_rewards_count_in_the_return_of_a_dead_agent(name: str) -> None:
    learner = make_linear_learner(name, spaces=SHARED, gae_lambda=1.0)
    result = learner.add_advantages(rollout(terminated=flag_at(2), **alive_until(0))).returns[:, 0, 1]
    # reward 2 at each of three steps: 2 + 0.5 (2 + 0.5 * 2)
    assert result.tolist() == pytest.approx([3.5, 3.0, 2.0])


@pytest.mark.parametrize("name", ["mappo", "ippo"])
def test_with_shared_rewards_a_dead_agent_bootstraps_from_the_others_at_truncation(name: str) -> None:
    result = advantages(make_linear_learner(name, spaces=SHARED), truncated=flag_at(1), **alive_until(1))
    # the others' values are 7 and 700: 2 + 0.5 * 353.5 - 20
    assert result[1][1] == pytest.approx(158.75)


@pytest.mark.parametrize("name", ["mappo", "ippo"])
def test_value_is_zero_if_all_agents_are_dead(name: str) -> None:
    dead = torch.zeros(3, 1, 3, dtype=torch.bool)
    data = make_linear_learner(name, spaces=SHARED).add_advantages(rollout(alive=dead, next_alive=dead))
    assert data.value.abs().max() == 0


@pytest.mark.parametrize("name", ["mappo", "ippo"])
def test_with_individual_rewards_a_dead_agent_has_no_value_and_no_rewards(name: str) -> None:
    learner = make_linear_learner(name, spaces=INDIVIDUAL)
    data = learner.add_advantages(rollout(**alive_until(0)))
    assert data.value[:, 0, 1].tolist() == [10.0, 0.0, 0.0]
    # its last action has the reward 2 and no bootstrap value
    result = data.advantage[:, 0].T.tolist()
    assert result[1] == pytest.approx([2.0 - 10, 0.0, 0.0])
    assert result[0] == pytest.approx([1.0, 0.5, 2.0])
    # the same at truncation, in the last step of the rollout, and with long traces
    assert advantages(learner, truncated=flag_at(1), **alive_until(1))[1][1] == pytest.approx(2 - 20)
    assert advantages(learner, **alive_until(2))[1][2] == pytest.approx(2 - 30)
    assert advantages(make_linear_learner(name, spaces=INDIVIDUAL, gae_lambda=1.0), **alive_until(0))[1][
        0
    ] == pytest.approx(2 - 10)


# --- losses ---


def test_losses_by_hand() -> None:
    learner = make_linear_learner(clip_range=0.2)
    metrics = probe(learner, losses(), "gradient_step").metrics
    # min(1.5, 1.2) + min(0.5, 0.8) + 2
    assert metrics["policy_loss"].item() == pytest.approx(-3.7 / 3, rel=1e-5)
    # values 1, 10 and 100, returns 3, 10 and 90
    assert metrics["value_loss"].item() == pytest.approx(104 / 3)
    assert metrics["entropy"].item() == pytest.approx(ENTROPY)
    assert metrics["clip_fraction"].item() == pytest.approx(2 / 3)
    # mean of r - 1 - ln r
    assert metrics["kl"].item() == pytest.approx((0.5 - math.log(1.5) - 0.5 - math.log(0.5)) / 3, rel=1e-4)
    # the first is clipped; the others have -r A / 3 times the gradient of the log-probability
    assert logits_gradient(learner, 0) == pytest.approx([0.0] * 3)
    assert logits_gradient(learner, 1) == pytest.approx((-0.5 / 3 * logp_gradient(1)).tolist(), rel=1e-4)
    assert logits_gradient(learner, 2) == pytest.approx((-2 / 3 * logp_gradient(2)).tolist(), rel=1e-4)
    critics = last_gradients(learner.critic_optimizer)
    errors = [critics[agent_net.head.linear.bias].item() for agent_net in learner.critic.agent_nets]
    assert errors == pytest.approx([-4 / 3, 0.0, 20 / 3])


def test_losses_are_means_over_alive_agents() -> None:
    learner = make_linear_learner(clip_range=0.2)
    metrics = probe(learner, losses(alive=ALIVE), "gradient_step").metrics
    assert metrics["policy_loss"].item() == pytest.approx(-1.7 / 2, rel=1e-5)
    assert metrics["value_loss"].item() == pytest.approx(4 / 2)
    assert logits_gradient(learner, 1) == pytest.approx((-0.5 / 2 * logp_gradient(1)).tolist(), rel=1e-4)


def test_entropy_bonus_is_the_weighted_mean_over_alive_agents() -> None:
    learner = make_linear_learner(entropy_coef=0.3)
    with torch.no_grad():
        learner.actor.agent_nets[2].head.bias.zero_()
    metrics = probe(learner, losses(advantage=torch.zeros(1, 3), alive=ALIVE), "gradient_step").metrics
    assert metrics["entropy"].item() == pytest.approx(ENTROPY)  # the third agent's is higher
    # half of the gradient of the entropy, -p (ln p + H)
    expected = 0.3 / 2 * PROBABILITIES * (np.log(PROBABILITIES) + ENTROPY)
    assert logits_gradient(learner, 0) == pytest.approx(expected.tolist(), abs=1e-6)
    assert logits_gradient(learner, 2) == [0.0] * 3


def test_advantages_are_normalized_over_alive_agents() -> None:
    learner = make_linear_learner(normalize_advantage=True, clip_range=9.0)
    data = losses(advantage=torch.tensor([[4.0, 1.0, 1e6]]), alive=ALIVE, logp=torch.tensor([LOGITS]))
    probe(learner, data, "gradient_step")
    # mean 2.5, std 1.5: 1 and -1
    assert logits_gradient(learner, 0) == pytest.approx((-0.5 * logp_gradient(0)).tolist(), rel=1e-4)
    assert logits_gradient(learner, 1) == pytest.approx((0.5 * logp_gradient(1)).tolist(), rel=1e-4)


def test_invalid_actions_get_no_gradient_and_are_never_taken() -> None:
    learner = make_linear_learner(entropy_coef=0.1)
    mask = torch.tensor([[True, True, False], [False, True, True], [True, True, True]])
    metrics = probe(
        learner, losses(mask=mask[None], logp=torch.tensor([[2 / 3, 0.5, 0.25]]).log()), "gradient_step"
    ).metrics
    assert metrics["policy_loss"].item() == pytest.approx(-4 / 3)  # probabilities 2/3, 1/2 and 1/4: all ratios are 1
    entropies = (math.log(3) - 2 / 3 * math.log(2)) + math.log(2) + ENTROPY
    assert metrics["entropy"].item() == pytest.approx(entropies / 3)
    assert logits_gradient(learner, 0)[2] == logits_gradient(learner, 1)[0] == 0.0
    for phase in Phase:
        rng, masks = torch.Generator().manual_seed(0), mask.expand(999, 3, 3)
        action = learner.policy.act(torch.zeros(999, 3, 1), None, masks, phase, rng, 0).action
        assert masks.gather(-1, action.unsqueeze(-1)).all()


def test_losses_use_the_masks_of_the_rollout() -> None:
    mask = torch.tensor([True, True, False]).expand(3, 1, 3, 3)
    assert torch.equal(make_linear_learner().add_advantages(rollout(mask=mask)).mask, mask)


# --- agents that have left have no effect ---


@pytest.mark.parametrize("name", ["mappo", "ippo"])
def test_agents_that_have_left_get_no_gradient(name: str) -> None:
    learner = make_learner(name, share_weights=False, entropy_coef=0.1)
    alive = torch.tensor([True, False, True]).expand(3, 1, 3)
    probe(learner, learner.add_advantages(rollout(alive=alive, next_alive=alive)).flatten(), "gradient_step")
    for net, optimizer in ((learner.actor, learner.actor_optimizer), (learner.critic, learner.critic_optimizer)):
        gradients = last_gradients(optimizer)
        for agent_net, trained in zip(net.agent_nets, (True, False, True), strict=True):
            assert all((gradients[parameter].abs().sum() > 0) == trained for parameter in agent_net.head.parameters())


@pytest.mark.parametrize("name", ["mappo", "ippo"])
@pytest.mark.parametrize("share_weights", [True, False])
@pytest.mark.parametrize("recurrent", ["none", "gru"])
def test_observations_and_actions_of_dead_agents_have_no_effect(name: str, share_weights: bool, recurrent: str) -> None:
    settings = {"share_weights": share_weights, "net__recurrent": recurrent, "net__recurrent_size": 4, "epochs": 2}
    settings |= {"gae_lambda": 0.9, "minibatch_size": 2}
    learner = make_learner(name, INDIVIDUAL, **settings)
    initial = copy_weights(learner.actor, learner.critic)
    hidden = learner.policy.initial_hidden(1)
    fields = {} if hidden is None else {"hidden": tree_map(lambda leaf: leaf.expand(3, 1, 3, 4), hidden)}
    data = rollout(**alive_until(0), **fields)
    obs, next_obs, action, logp, reward = (
        getattr(data, name).clone() for name in ("obs", "next_obs", "action", "logp", "reward")
    )
    obs[1:, :, 1], next_obs[:, :, 1], action[1:, :, 1], logp[1:, :, 1], reward[1:, :, 1] = 55.0, -77.0, 2, -9.0, 1e3
    learner.update(data)
    updated = copy_weights(learner.actor, learner.critic)
    assert not all_equal(updated, initial)
    other = make_learner(name, INDIVIDUAL, **settings)
    other.update(data.replace(obs=obs, next_obs=next_obs, action=action, logp=logp, reward=reward))
    assert all_equal(updated, copy_weights(other.actor, other.critic))
    # the observations of an alive agent do have an effect
    other = make_learner(name, INDIVIDUAL, **settings)
    obs[1:, :, 2] = 55.0
    other.update(data.replace(obs=obs))
    assert not all_equal(updated, copy_weights(other.actor, other.critic))


# --- normalization of values ---


def test_value_loss_is_on_the_normalized_scale() -> None:
    learner = make_linear_learner(normalize_value=True)
    assert learner.value_norm is not None
    learner.value_norm.update(torch.tensor([8.0, 12.0]))  # mean 10, std 2
    # outputs of the critics 1, 10 and 100: 10 + 2 * 1, ...
    assert learner.values(torch.ones(1, 3, 1)).tolist() == [pytest.approx([12.0, 30.0, 210.0])]
    # returns equal to these values give no loss; the normalized return 16 is 3, and the output 1 has the error 2
    exact = losses(returns=torch.tensor([[12.0, 30.0, 10.0 + 2 * 9.0]]), alive=ALIVE)
    assert probe(learner, exact, "gradient_step").metrics["value_loss"].item() == pytest.approx(0.0, abs=1e-6)
    off = losses(returns=torch.tensor([[16.0, 30.0, 0.0]]), alive=ALIVE)
    assert probe(learner, off, "gradient_step").metrics["value_loss"].item() == pytest.approx(4 / 2, rel=1e-5)


def test_inverse_undoes_the_normalization() -> None:
    learner = make_learner()
    assert learner.value_norm is not None
    learner.value_norm.update(torch.tensor([-3.0, 4.0, 50.0]))
    x = torch.tensor([-20.0, 0.0, 7.0, 90.0])
    assert torch.allclose(learner.value_norm.inverse(learner.value_norm(x)), x, atol=1e-4)


def test_return_statistics_are_updated_before_the_gradient_steps() -> None:
    learner = make_linear_learner(normalize_value=True, epochs=1, lr=1e-9)
    data = rollout()
    returns = learner.add_advantages(data).returns  # there are no statistics yet, so values are the critics' outputs
    value_loss = learner.update(data).metrics["value_loss"]
    assert learner.value_norm is not None
    assert learner.value_norm.mean.item() == pytest.approx(returns.mean().item())
    assert learner.value_norm.var.item() == pytest.approx(returns.var(unbiased=False).item())
    raw = torch.tensor([[1.0, 10.0, 100.0], [2.0, 20.0, 200.0], [3.0, 30.0, 300.0]])
    target = (returns[:, 0] - returns.mean()) / returns.std(unbiased=False)
    assert value_loss.item() == pytest.approx((raw - target).square().mean().item(), rel=1e-4)


def test_normalize_value_false_leaves_values_unchanged() -> None:
    learner = make_linear_learner()
    assert learner.value_norm is None
    assert learner.values(torch.ones(1, 3, 1)).tolist() == [pytest.approx([1.0, 10.0, 100.0])]


# --- shared and separate weights ---


def test_agents_with_shared_weights_get_their_index_as_input() -> None:
    learner = make_learner(net__hidden_sizes=[])
    assert len(learner.actor.agent_nets) == len(learner.critic.agent_nets) == 1
    with torch.no_grad():
        head: Any = learner.actor.agent_nets[0].head
        head.weight.zero_()
        head.weight[0] = torch.tensor([1.0, 2.0, 3.0, 10.0])  # inputs are [one-hot index, observation]
    out = learner.actor(learner.actor.build_inputs(torch.tensor([[[5.0], [5.0], [6.0]]]), None))[0]
    assert out[0, :, 0].tolist() == pytest.approx([51.0, 52.0, 63.0])


def test_gradients_of_agents_with_separate_weights_are_independent() -> None:
    learner = make_learner(share_weights=False)
    assert len(learner.actor.agent_nets) == len(learner.critic.agent_nets) == 3
    out = learner.actor(learner.actor.build_inputs(torch.ones(1, 3, 1), None))[0]
    assert not torch.equal(out[0, 0], out[0, 1])
    probe(learner, losses(), "gradient_step")
    first = {p: g.clone() for p, g in last_gradients(learner.actor_optimizer).items()}
    probe(learner, losses(obs=torch.tensor([[[0.0], [3.0], [0.0]]]), action=torch.tensor([[0, 0, 2]])), "gradient_step")
    second = last_gradients(learner.actor_optimizer)
    nets = learner.actor.agent_nets
    changed = [any(not torch.equal(first[p], second[p]) for p in net.parameters()) for net in nets]
    assert changed == [False, True, False]


def test_gradient_of_shared_weights_is_the_mean_over_agents() -> None:
    learner = make_learner(normalize_advantage=False, entropy_coef=0.0, clip_range=9.0)
    data = losses(logp=torch.zeros(1, 3), obs=torch.tensor([[[1.0], [2.0], [3.0]]]))
    gradient = probe(learner, data, "gradient_step").gradients["actor_optimizer"][0].clone()
    parts = []
    for agent in range(3):
        single = losses(logp=torch.zeros(1, 3), obs=data.obs, alive=torch.eye(3, dtype=torch.bool)[agent][None])
        parts.append(probe(learner, single, "gradient_step").gradients["actor_optimizer"][0].clone())
    assert all(part.abs().sum() > 0 for part in parts)
    assert torch.allclose(gradient, torch.stack(parts).mean(0), atol=1e-7)


# --- minibatches and recurrent networks ---


def numbered_data(length: int, envs: int) -> Batch:
    """Return data `[T,N,A]` whose advantages are the numbers of the time steps, equal for all agents."""
    numbers = torch.arange(float(length * envs)).view(length, envs, 1).expand(length, envs, 3)
    return Batch(obs=numbers[..., None], advantage=numbers, returns=numbers)


def test_minibatches_contain_each_time_step_once_with_all_agents() -> None:
    learner = make_learner(minibatch_size=4)
    parts = [part.advantage for part in minibatches_of(learner, numbered_data(6, 2))]
    assert [part.shape for part in parts] == [(4, 3)] * 3
    assert all(torch.equal(part[:, 0], part[:, agent]) for part in parts for agent in (1, 2))
    assert torch.cat(parts)[:, 0].sort().values.tolist() == list(range(12))


def test_number_of_updates_is_epochs_times_minibatches() -> None:
    for size, updates in ((1, 3 * 3), (2, 3), (100, 3)):  # minibatches of three steps: 1 + 1 + 1, 3, 3
        learner = make_learner(epochs=3, minibatch_size=size)
        learner.update(rollout())
        assert learner.updates == updates


@pytest.mark.parametrize("last_action", [True, False])
@pytest.mark.parametrize("share_weights", [True, False])
@pytest.mark.parametrize("kind", ["gru", "lstm"])
def test_recurrent_minibatches_equal_single_steps(kind: str, share_weights: bool, last_action: bool) -> None:
    settings = {"net__recurrent": kind, "net__recurrent_size": 4, "num_envs": 4, "minibatch_size": 10}
    learner = make_learner(**settings, share_weights=share_weights, last_action=last_action, entropy_coef=0.1)
    T, N, rng = 5, 4, torch.Generator().manual_seed(0)
    obs = torch.randn(T, N, 3, 1, generator=rng)
    ended = torch.zeros(T, N, dtype=torch.bool)
    ended[1, 2] = True  # resets the hidden state of the third environment after its second step
    logps, entropies, actions, hiddens = [], [], [], []
    hidden = learner.policy.initial_hidden(N)
    hidden = tree_map(lambda leaf: torch.randn(leaf.shape, generator=rng), hidden)  # from before the rollout
    for t in range(T):
        hiddens.append(tree_map(torch.Tensor.detach, hidden))
        out, _ = learner.policy.run_net(obs[t], hidden)
        decision = learner.policy.act(obs[t], hidden, None, Phase.COLLECT, rng, 0)
        distribution = learner.distribution(out)
        actions.append(decision.action)
        logps.append(distribution.log_prob(decision.action))
        entropies.append(distribution.entropy())
        keep = (~ended[t]).float().view(N, 1, 1)
        hidden = tree_map(lambda leaf, keep=keep: leaf * keep, decision.hidden)
    logp, entropy = torch.stack(logps), torch.stack(entropies)
    data = Batch(
        obs=obs,
        next_obs=obs,
        state=obs[..., 0, :],
        next_state=obs[..., 0, :],
        action=torch.stack(actions),
        logp=logp.detach(),
        hidden=tree_map(lambda *parts: torch.stack(parts), *hiddens),
        reward=torch.randn(T, N, 3, generator=rng),
        terminated=torch.zeros(T, N, dtype=torch.bool),
        truncated=ended,
    )
    data = learner.add_advantages(data)
    columns = []
    for part in minibatches_of(learner, data):
        assert part.returns.shape == (5, 2, 3)  # 10 steps are two whole sequences of 5
        n = [int((data.obs[0, :, 0, 0] == first).nonzero()) for first in part.obs[0, :, 0, 0]]
        columns += n
        part_logp, part_entropy = learner.evaluate_actions(part)
        assert torch.allclose(part_logp, logp[:, n], atol=1e-6)
        assert torch.allclose(part_entropy, entropy[:, n], atol=1e-6)
        # the critic is not recurrent
        value = learner.critic(learner.critic.build_inputs(part.critic_obs.flatten(0, 1), None))[0]
        expected = (value - part.returns.flatten(0, 1)).square().mean()
        assert learner.value_loss(part, None).item() == pytest.approx(expected.item(), rel=1e-4)
    assert sorted(columns) == [0, 1, 2, 3]
    # the gradient through all steps
    advantage = (data.advantage - data.advantage.mean()) / data.advantage.std()
    loss = -((logp - logp.detach()).exp() * advantage).mean() - 0.1 * entropy.mean()
    expected = learner.actor_optimizer.compute_gradients(loss)[0].clone()
    assert torch.allclose(probe(learner, data, "gradient_step").gradients["actor_optimizer"][0], expected, atol=1e-6)


def test_only_actors_are_recurrent() -> None:
    learner = make_learner(net__recurrent="gru")
    assert learner.actor.recurrent
    assert not learner.critic.recurrent
    assert set(learner.extra_fields) == {"logp", "hidden"}
    assert set(make_learner().extra_fields) == {"logp"}


# --- updates ---


def test_critic_lr_applies_only_to_the_critic() -> None:
    learner = make_learner(lr=1e-4, critic_lr=1e-2, epochs=1)
    nets = (learner.actor, learner.critic)
    before = [copy_weights(net) for net in nets]
    learner.update(rollout())
    # the first step of Adam changes a weight by the learning rate
    for net, start, lr in zip(nets, before, (1e-4, 1e-2), strict=True):
        largest = max((p - old).abs().max().item() for p, old in zip(net.parameters(), start, strict=True))
        assert largest == pytest.approx(lr, rel=0.05)


def test_gradients_of_actor_and_critic_are_clipped_separately() -> None:
    learner = make_learner(max_grad_norm=0.01, epochs=1)
    assert learner.update(rollout()).metrics["grad_norm"].item() > 0.01  # the metric is the norm before clipping
    for optimizer in (learner.actor_optimizer, learner.critic_optimizer):
        # the first moment of Adam is a tenth of the gradient
        assert optimizer.first_moment[0].norm().item() == pytest.approx(0.1 * 0.01, rel=1e-3)


def test_observation_statistics_are_updated_after_the_gradient_steps() -> None:
    learner = make_learner(normalize_obs=True)
    norms = [net.agent_nets[0].torso.encoder.part("obs").norm for net in (learner.actor, learner.critic)]
    counts: list[float] = []
    with mock.patch.object(learner, "gradient_step", wraps=learner.gradient_step) as calls:
        calls.side_effect = lambda data: counts.extend(norm.count.item() for norm in norms) or mock.DEFAULT
        learner.update(rollout())
    assert set(counts) == {0.0}
    for norm in norms:
        # three steps of three agents
        assert (norm.mean.item(), norm.count.item()) == (2.0, 9.0)


def test_std_of_continuous_actions_is_learned() -> None:
    spaces = Spaces(OBS, Box(-1.0, 1.0, (2,), np.float32), num_agents=3, state=1)
    learner = make_learner(spaces=spaces, lr=1e-3, epochs=1)
    action = torch.tensor([0.3, -0.2]).expand(3, 1, 3, 2)
    assert learner.distribution.log_std.tolist() == [0.0, 0.0]
    learner.update(rollout(action=action))
    assert learner.distribution.log_std.abs().tolist() == pytest.approx([1e-3] * 2, rel=0.05)


@pytest.mark.parametrize("name", ["mappo", "ippo"])
def test_agents_with_separate_weights_have_separate_stds(name: str) -> None:
    spaces = Spaces(OBS, Box(-1.0, 1.0, (2,), np.float32), num_agents=3, state=1, alive=True)
    learner = make_learner(name, spaces, lr=1e-3, epochs=1, share_weights=False, normalize_advantage=False)
    assert learner.distribution.log_std.tolist() == [[0.0, 0.0]] * 3
    alive = torch.tensor([True, False, True]).expand(3, 1, 3)
    # the first agent's action is likely under its policy, the third's is not. Both have high rewards, so the std of the
    # first falls and that of the third grows
    action = torch.tensor([[0.0, 0.0], [0.0, 0.0], [3.0, 3.0]]).expand(3, 1, 3, 2)
    logp = learner.evaluate_actions(rollout(action=action).flatten())[0].detach().unsqueeze(1)
    learner.update(rollout(action=action, logp=logp, alive=alive, next_alive=alive, reward=torch.full((3, 1, 3), 1e3)))
    first, second, third = learner.distribution.log_std.tolist()
    assert first == pytest.approx([-1e-3] * 2, rel=0.05)
    assert second == [0.0, 0.0]
    assert third == pytest.approx([1e-3] * 2, rel=0.05)
    # the policy contains the stds
    assert any(torch.equal(part, learner.distribution.log_std) for part in learner.policy.state_dict().values())


def test_value_is_per_agent_and_none_if_the_critic_needs_the_state() -> None:
    result = make_linear_learner("ippo").value(torch.tensor([[[4.0], [5.0], [6.0]]]))
    assert result is not None
    assert result.tolist() == [pytest.approx([4.0, 50.0, 600.0])]
    assert make_learner().value(torch.zeros(1, 3, 1)) is None
    value = make_learner(spaces=Spaces(OBS, Discrete(3), num_agents=3)).value(torch.zeros(2, 3, 1))
    assert value is not None
    assert value.shape == (2, 3)


# --- rejected settings, state and metrics ---


def test_unsupported_settings_and_spaces_are_rejected() -> None:
    spaces = Spaces(Dict({"a": OBS}), Discrete(3), num_agents=3)
    with pytest.raises(UserError, match="mappo needs a global state, but the env provides none"):
        make_learner(spaces=spaces)
    assert make_learner("ippo", spaces).value({"a": torch.zeros(2, 3, 1)}) is not None  # needs no state
    for name in ("mappo", "ippo"):
        with pytest.raises(UserError, match=f"{name} needs an environment with several agents"):
            make_learner(name, Spaces(OBS, Discrete(3)))
        with pytest.raises(UserError, match=r"the action space is Text.*; allowed are"):
            make_learner(name, Spaces(OBS, Text(5), num_agents=3, state=1))


@pytest.mark.parametrize("name", ["mappo", "ippo"])
def test_restored_learner_continues_identically(name: str) -> None:
    settings = {"normalize_obs": True, "minibatch_size": 2, "epochs": 2}
    learner, other = make_learner(name, **settings), make_learner(name, **settings, seed=9)
    learner.update(rollout(**alive_until(1)))
    other.load_state_dict(learner.state_dict())
    for _ in range(2):
        first, second = learner.update(rollout()), other.update(rollout())
        assert all(torch.equal(first.metrics[name], second.metrics[name]) for name in first.metrics)
    assert all_equal(copy_weights(learner.actor, learner.critic), copy_weights(other.actor, other.critic))


def test_update_returns_exactly_the_declared_metrics() -> None:
    assert set(make_learner().update(rollout()).metrics) == set(MAPPO.metrics)


def test_explained_variance_by_hand() -> None:
    learner = make_linear_learner(gamma=0.0, epochs=1)
    # the returns are the rewards, twice the values, which are 1, 10 and 100 times the state
    value = torch.tensor([1.0, 10.0, 100.0]) * states(1.0, 2.0, 3.0)
    explained_variance = learner.update(rollout(reward=2 * value)).metrics["explained_variance"]
    # the residual has the variance of the value, the return four times as much
    assert explained_variance.item() == pytest.approx(0.75, rel=1e-5)

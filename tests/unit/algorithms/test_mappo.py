"""MAPPO's and IPPO's advantages and losses by hand, what agents that have left are worth, and that they don't count."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from by_hand import all_equal, flag_at
from gymnasium.spaces import Box, Dict, Discrete
from probe import probe
from torch import Tensor

import zhixing as zx
from zhixing.algorithms.mappo import MAPPO
from zhixing.core.batch import Batch
from zhixing.core.optimizer import Optimizer
from zhixing.core.policy import Phase
from zhixing.core.spaces import Spaces
from zhixing.core.tree import tree_map
from zhixing.errors import UserError
from zhixing.ops.policy_gradient import minibatches

OBS = Box(-999.0, 999.0, (1,), np.float32)
SPACES = Spaces(OBS, Discrete(3), num_agents=3, state=1)
LEAVING = dataclasses.replace(SPACES, alive=True)
TEAM = dataclasses.replace(LEAVING, reward_kind="shared")
HALVES = [math.log(0.5), math.log(0.25), math.log(0.25)]  # logits of a policy with entropy 1.5 ln 2
ENTROPY = 1.5 * math.log(2)
CHANCES = np.array([0.5, 0.25, 0.25])


def minibatches_of(learner: MAPPO, data: Batch) -> Iterator[Batch]:
    return minibatches(data, learner.cfg.minibatch_size, learner.rng, learner.actor.recurrent)


def make_learner(name: str = "mappo", spaces: Spaces = SPACES, **settings: Any) -> MAPPO:
    base = {"net__hidden_sizes": [8], "num_envs": 1, "gamma": 0.5, "gae_lambda": 0.0, "max_grad_norm": None}
    cfg = zx.config.load(algorithm=name, env="toy/team-match", **(base | settings))
    learner = zx.algorithms.get(name).make(cfg, spaces)
    assert isinstance(learner, MAPPO)
    return learner


def plain(name: str = "mappo", **settings: Any) -> MAPPO:
    """A linear network for each agent. Critics say 1, 10 and 100 times what they see, actors like the first action."""
    off = {"share_weights": False, "normalize_value": False, "normalize_advantage": False, "entropy_coef": 0.0}
    learner = make_learner(name, **({"net__hidden_sizes": []} | off | settings))
    with torch.no_grad():
        for i in range(3):
            critic: Any = learner.critic.agent_nets[i].head
            critic.linear.weight.fill_(10.0**i)
            actor: Any = learner.actor.agent_nets[i].head
            actor.weight.zero_()
            actor.bias.copy_(torch.tensor(HALVES))
    return learner


def steps(*numbers: float) -> Tensor:
    """`[T,1,1]`: a state, of one environment."""
    return torch.tensor(numbers)[:, None, None]


def rollout(**fields: Any) -> Batch:
    """Three steps through 1, 2 and 3, which is the state and what each agent sees. The second led to 7, the last to 8.
    The agents are paid 1, 2 and 3 at each step."""
    never = torch.zeros(3, 1, dtype=torch.bool)
    now, then = steps(1.0, 2.0, 3.0), steps(2.0, 7.0, 8.0)
    base = {
        "obs": now[..., None].expand(3, 1, 3, 1),
        "next_obs": then[..., None].expand(3, 1, 3, 1),
        "state": now,
        "next_state": then,
        "action": torch.tensor([0, 1, 2]).expand(3, 1, 3),
        "logp": torch.tensor(HALVES).expand(3, 1, 3),
        "reward": torch.tensor([1.0, 2.0, 3.0]).expand(3, 1, 3),
        "terminated": never,
        "truncated": never,
    }
    return Batch(**{**base, **fields})


def leaving(t: int, agent: int = 1) -> dict[str, Tensor]:
    """One agent leaves with step `t`."""
    alive = torch.ones(4, 1, 3, dtype=torch.bool)
    alive[t + 1 :, :, agent] = False
    return {"alive": alive[:-1], "next_alive": alive[1:]}


def advantages(learner: MAPPO, **fields: Any) -> list[list[float]]:
    """Of each agent, step by step."""
    data = learner.add_advantages(rollout(**fields))
    assert torch.allclose(data.returns, data.advantage + data.value)
    return data.advantage[:, 0].T.tolist()


def losses(**fields: Any) -> Batch:
    """One time step of three agents, with ratios of 1.5, 0.5 and 1 and advantages 1, 1 and 2."""
    base = {
        "obs": torch.zeros(1, 3, 1),
        "critic_obs": torch.ones(1, 3, 1),
        "action": torch.tensor([[0, 1, 2]]),
        "logp": torch.tensor([HALVES]) - torch.tensor([[1.5, 0.5, 1.0]]).log(),
        "advantage": torch.tensor([[1.0, 1.0, 2.0]]),
        "returns": torch.tensor([[3.0, 10.0, 90.0]]),
    }
    return Batch(**{**base, **fields})


LEFT = torch.tensor([[True, True, False]])


def by_parameter(optimizer: Optimizer) -> dict[Tensor, Tensor]:
    """What `gradient` result last."""
    return dict(zip(optimizer.parameters, optimizer._gradient_views, strict=True))


def of_the_logits(learner: MAPPO, agent: int) -> list[float]:
    return by_parameter(learner.actor_optimizer)[learner.actor.agent_nets[agent].head.bias].tolist()


def taken(action: int) -> Any:
    """The gradient of its log-probability by the logits."""
    return np.eye(3)[action] - CHANCES


def weights(learner: MAPPO) -> list[Tensor]:
    return [p.detach().clone() for net in (learner.actor, learner.critic) for p in net.parameters()]


# --- advantages ---


def test_advantages_are_each_agents_own() -> None:
    result = advantages(plain())
    # r + 0.5 V' - V: 1 + 1 - 1, 1 + 1.5 - 2, and after the rollout 1 + 4 - 3
    assert result[0] == pytest.approx([1.0, 0.5, 2.0])
    assert result[1] == pytest.approx([2.0, -3.0, 12.0])  # 2 + 10 - 10, 2 + 15 - 20, 2 + 40 - 30
    assert result[2] == pytest.approx([3.0, -47.0, 103.0])


@pytest.mark.parametrize("name", ["mappo", "ippo"])
def test_truncation_bootstraps_from_what_it_led_to_and_death_ends_the_future(name: str) -> None:
    result = advantages(plain(name), truncated=flag_at(1))
    assert [own[1] for own in result] == pytest.approx([1 + 3.5 - 2, 2 + 35 - 20, 3 + 350 - 200])
    result = advantages(plain(name), terminated=flag_at(1))
    assert [own[1] for own in result] == pytest.approx([1 - 2, 2 - 20, 3 - 200])
    assert [own[0] for own in result] == pytest.approx([1.0, 2.0, 3.0])  # before it all is as it was


def test_gae_weighs_steps_ahead_less_and_less() -> None:
    # errors 1, 0.5, 2, each with 0.5 * 0.5 of what follows: 2, 0.5 + 0.5, 1 + 0.25
    assert advantages(plain(gae_lambda=0.5))[0] == pytest.approx([1.25, 1.0, 2.0])
    # the trace ends with the episode: 1 + 0.25 * 2.5
    assert advantages(plain(gae_lambda=0.5), truncated=flag_at(1))[0] == pytest.approx([1.625, 2.5, 2.0])


def test_mappos_critic_sees_the_state_and_ippos_what_its_agent_sees() -> None:
    obs = torch.tensor([4.0, 5.0, 6.0]).view(1, 1, 3, 1).expand(3, 1, 3, 1)
    data = rollout(obs=obs)
    assert plain().add_advantages(data).value[0, 0].tolist() == pytest.approx([1.0, 10.0, 100.0])
    assert plain("ippo").add_advantages(data).value[0, 0].tolist() == pytest.approx([4.0, 50.0, 600.0])


def test_the_critic_of_a_task_without_a_state_sees_all_observations() -> None:
    learner = make_learner(spaces=Spaces(OBS, Discrete(3), num_agents=3))
    obs = torch.tensor([[[4.0], [5.0], [6.0]]])
    assert learner.critic_obs(Batch(obs=obs)).tolist() == [[[4.0, 5.0, 6.0]] * 3]
    assert learner.critic_obs(Batch(obs=obs, next_obs=obs + 1), use_next=True).tolist() == [[[5.0, 6.0, 7.0]] * 3]


# --- what those who have left are worth ---


@pytest.mark.parametrize("name", ["mappo", "ippo"])
def test_to_a_team_who_has_left_is_worth_what_the_others_are_on_average(name: str) -> None:
    learner = plain(name, spaces=TEAM)
    data = learner.add_advantages(rollout(**leaving(0)))
    # of 2 and 200, 3 and 300
    assert data.value[:, 0, 1].tolist() == pytest.approx([10.0, 101.0, 151.5])
    result = data.advantage[:, 0].T.tolist()
    # its last action is followed by the others' 101: 2 + 50.5 - 10. After the rollout they are worth 8 and 800
    assert result[1] == pytest.approx([42.5, 2 + 75.75 - 101, 2 + 202 - 151.5])
    assert result[0] == pytest.approx([1.0, 0.5, 2.0])  # they are worth what they were


@pytest.mark.parametrize("name", ["mappo", "ippo"])
def test_a_shared_reward_counts_in_the_return_of_who_has_left(name: str) -> None:
    learner = plain(name, spaces=TEAM, gae_lambda=1.0)
    result = learner.add_advantages(rollout(terminated=flag_at(2), **leaving(0))).returns[:, 0, 1]
    # 2 at each of three steps: 2 + 0.5 (2 + 0.5 * 2)
    assert result.tolist() == pytest.approx([3.5, 3.0, 2.0])


@pytest.mark.parametrize("name", ["mappo", "ippo"])
def test_to_a_team_who_has_left_by_a_truncated_step_is_worth_what_the_others_are_then(name: str) -> None:
    result = advantages(plain(name, spaces=TEAM), truncated=flag_at(1), **leaving(1))
    # 7 and 700: 2 + 0.5 * 353.5 - 20
    assert result[1][1] == pytest.approx(158.75)


@pytest.mark.parametrize("name", ["mappo", "ippo"])
def test_a_team_that_has_left_is_worth_nothing(name: str) -> None:
    nobody = torch.zeros(3, 1, 3, dtype=torch.bool)
    assert plain(name, spaces=TEAM).add_advantages(rollout(alive=nobody, next_alive=nobody)).value.abs().max() == 0


@pytest.mark.parametrize("name", ["mappo", "ippo"])
def test_for_itself_who_has_left_is_worth_nothing_and_paid_nothing(name: str) -> None:
    learner = plain(name, spaces=LEAVING)
    data = learner.add_advantages(rollout(**leaving(0)))
    assert data.value[:, 0, 1].tolist() == [10.0, 0.0, 0.0]
    # its last action is still paid 2, and nothing follows
    result = data.advantage[:, 0].T.tolist()
    assert result[1] == pytest.approx([2.0 - 10, 0.0, 0.0])
    assert result[0] == pytest.approx([1.0, 0.5, 2.0])
    # also where it leaves by a truncated step, or by the rollout's last, or where traces are long
    assert advantages(learner, truncated=flag_at(1), **leaving(1))[1][1] == pytest.approx(2 - 20)
    assert advantages(learner, **leaving(2))[1][2] == pytest.approx(2 - 30)
    assert advantages(plain(name, spaces=LEAVING, gae_lambda=1.0), **leaving(0))[1][0] == pytest.approx(2 - 10)


# --- losses ---


def test_losses_by_hand() -> None:
    learner = plain(clip_range=0.2)
    told = probe(learner, losses(), "gradient_step").metrics
    # min(1.5, 1.2) + min(0.5, 0.8) + 2
    assert told["policy_loss"].item() == pytest.approx(-3.7 / 3, rel=1e-5)
    # 1, 10 and 100 against 3, 10 and 90
    assert told["value_loss"].item() == pytest.approx(104 / 3)
    assert told["entropy"].item() == pytest.approx(ENTROPY)
    assert told["clip_fraction"].item() == pytest.approx(2 / 3)
    # the mean of r - 1 - ln r
    assert told["kl"].item() == pytest.approx((0.5 - math.log(1.5) - 0.5 - math.log(0.5)) / 3, rel=1e-4)
    # the first is clipped; the others have -r A / 3 of their log-probability's gradient
    assert of_the_logits(learner, 0) == pytest.approx([0.0] * 3)
    assert of_the_logits(learner, 1) == pytest.approx((-0.5 / 3 * taken(1)).tolist(), rel=1e-4)
    assert of_the_logits(learner, 2) == pytest.approx((-2 / 3 * taken(2)).tolist(), rel=1e-4)
    critics = by_parameter(learner.critic_optimizer)
    errors = [critics[member.head.linear.bias].item() for member in learner.critic.agent_nets]
    assert errors == pytest.approx([-4 / 3, 0.0, 20 / 3])


def test_losses_are_means_over_the_living() -> None:
    learner = plain(clip_range=0.2)
    told = probe(learner, losses(alive=LEFT), "gradient_step").metrics
    assert told["policy_loss"].item() == pytest.approx(-1.7 / 2, rel=1e-5)
    assert told["value_loss"].item() == pytest.approx(4 / 2)
    assert of_the_logits(learner, 1) == pytest.approx((-0.5 / 2 * taken(1)).tolist(), rel=1e-4)


def test_entropy_is_weighed_and_that_of_the_living_only() -> None:
    learner = plain(entropy_coef=0.3)
    with torch.no_grad():
        learner.actor.agent_nets[2].head.bias.zero_()
    told = probe(learner, losses(advantage=torch.zeros(1, 3), alive=LEFT), "gradient_step").metrics
    assert told["entropy"].item() == pytest.approx(ENTROPY)  # with the third it would be more
    # half of the entropy's gradient, -p (ln p + H)
    expected = 0.3 / 2 * CHANCES * (np.log(CHANCES) + ENTROPY)
    assert of_the_logits(learner, 0) == pytest.approx(expected.tolist(), abs=1e-6)
    assert of_the_logits(learner, 2) == [0.0] * 3


def test_advantages_are_normalised_over_the_living() -> None:
    learner = plain(normalize_advantage=True, clip_range=9.0)
    data = losses(advantage=torch.tensor([[4.0, 1.0, 1e6]]), alive=LEFT, logp=torch.tensor([HALVES]))
    probe(learner, data, "gradient_step")
    # mean 2.5, spread 1.5: 1 and -1
    assert of_the_logits(learner, 0) == pytest.approx((-0.5 * taken(0)).tolist(), rel=1e-4)
    assert of_the_logits(learner, 1) == pytest.approx((0.5 * taken(1)).tolist(), rel=1e-4)


def test_a_forbidden_action_gets_no_gradient_and_is_never_taken() -> None:
    learner = plain(entropy_coef=0.1)
    mask = torch.tensor([[True, True, False], [False, True, True], [True, True, True]])
    told = probe(
        learner, losses(mask=mask[None], logp=torch.tensor([[2 / 3, 0.5, 0.25]]).log()), "gradient_step"
    ).metrics
    assert told["policy_loss"].item() == pytest.approx(-4 / 3)  # probabilities 2/3, 1/2 and 1/4: all ratios are 1
    entropies = (math.log(3) - 2 / 3 * math.log(2)) + math.log(2) + ENTROPY
    assert told["entropy"].item() == pytest.approx(entropies / 3)
    assert of_the_logits(learner, 0)[2] == of_the_logits(learner, 1)[0] == 0.0
    for phase in Phase:
        rng, many = torch.Generator().manual_seed(0), mask.expand(999, 3, 3)
        action = learner.policy.act(torch.zeros(999, 3, 1), None, many, phase, rng, 0).action
        assert many.gather(-1, action.unsqueeze(-1)).all()


def test_masks_of_a_rollout_reach_the_losses() -> None:
    mask = torch.tensor([True, True, False]).expand(3, 1, 3, 3)
    assert torch.equal(plain().add_advantages(rollout(mask=mask)).mask, mask)


# --- who has left doesn't count ---


@pytest.mark.parametrize("name", ["mappo", "ippo"])
def test_who_has_left_gets_no_gradient(name: str) -> None:
    learner = make_learner(name, share_weights=False, entropy_coef=0.1)
    gone = torch.tensor([True, False, True]).expand(3, 1, 3)
    probe(learner, learner.add_advantages(rollout(alive=gone, next_alive=gone)).flatten(), "gradient_step")
    for net, optimizer in ((learner.actor, learner.actor_optimizer), (learner.critic, learner.critic_optimizer)):
        result = by_parameter(optimizer)
        for member, counts in zip(net.agent_nets, (True, False, True), strict=True):
            assert all((result[parameter].abs().sum() > 0) == counts for parameter in member.head.parameters())


@pytest.mark.parametrize("name", ["mappo", "ippo"])
@pytest.mark.parametrize("share_weights", [True, False])
@pytest.mark.parametrize("recurrent", ["none", "gru"])
def test_what_is_shown_to_and_done_by_who_has_left_changes_nothing(
    name: str, share_weights: bool, recurrent: str
) -> None:
    settings = {"share_weights": share_weights, "net__recurrent": recurrent, "net__recurrent_size": 4, "epochs": 2}
    one, other = (make_learner(name, LEAVING, **settings, gae_lambda=0.9, minibatch_size=2) for _ in range(2))
    hidden = {} if recurrent == "none" else {"hidden": tree_map(lambda leaf: leaf.expand(3, 1, 3, 4), memory(one))}
    data = rollout(**leaving(0), **hidden)
    obs, following, action, logp = (getattr(data, n).clone() for n in ("obs", "next_obs", "action", "logp"))
    obs[1:, :, 1], following[:, :, 1], action[1:, :, 1], logp[1:, :, 1] = 55.0, -77.0, 2, -9.0
    reward = data.reward.clone()
    reward[1:, :, 1] = 1e3
    one.update(data)
    other.update(data.replace(obs=obs, next_obs=following, action=action, logp=logp, reward=reward))
    assert all_equal(weights(one), weights(other))
    assert not all_equal(weights(one), weights(make_learner(name, LEAVING, **settings)))
    # what a living one is data does change something
    third = make_learner(name, LEAVING, **settings, gae_lambda=0.9, minibatch_size=2)
    obs[1:, :, 2] = 55.0
    third.update(data.replace(obs=obs))
    assert not all_equal(weights(one), weights(third))


def memory(learner: MAPPO) -> Any:
    return learner.policy.initial_hidden(1)


# --- values are normalised ---


def test_values_are_learned_on_the_scale_of_returns() -> None:
    learner = plain(normalize_value=True)
    assert learner.value_norm is not None
    learner.value_norm.update(torch.tensor([8.0, 12.0]))  # mean 10, spread 2
    # the critics say 1, 10 and 100: 10 + 2 * 1, ...
    assert learner.values(torch.ones(1, 3, 1)).tolist() == [pytest.approx([12.0, 30.0, 210.0])]
    # returns that these values foretell leave no error; 16 is 3 on the critics' scale, two too many
    exact = losses(returns=torch.tensor([[12.0, 30.0, 10.0 + 2 * 9.0]]), alive=LEFT)
    assert probe(learner, exact, "gradient_step").metrics["value_loss"].item() == pytest.approx(0.0, abs=1e-6)
    off = losses(returns=torch.tensor([[16.0, 30.0, 0.0]]), alive=LEFT)
    assert probe(learner, off, "gradient_step").metrics["value_loss"].item() == pytest.approx(4 / 2, rel=1e-5)


def test_normalising_and_back_gives_the_same_values() -> None:
    learner = make_learner()
    assert learner.value_norm is not None
    learner.value_norm.update(torch.tensor([-3.0, 4.0, 50.0]))
    x = torch.tensor([-20.0, 0.0, 7.0, 90.0])
    assert torch.allclose(learner.value_norm.inverse(learner.value_norm(x)), x, atol=1e-4)


def test_the_statistics_of_returns_are_taken_before_learning() -> None:
    learner = plain(normalize_value=True, epochs=1, lr=1e-9)
    data = rollout()
    ret = learner.add_advantages(data).returns  # the norm has seen nothing: values are what the critics say
    told = learner.update(data).metrics["value_loss"]
    assert learner.value_norm is not None
    assert learner.value_norm.mean.item() == pytest.approx(ret.mean().item())
    assert learner.value_norm.var.item() == pytest.approx(ret.var(unbiased=False).item())
    raw = torch.tensor([[1.0, 10.0, 100.0], [2.0, 20.0, 200.0], [3.0, 30.0, 300.0]])
    target = (ret[:, 0] - ret.mean()) / ret.std(unbiased=False)
    assert told.item() == pytest.approx((raw - target).square().mean().item(), rel=1e-4)


def test_values_are_as_they_are_without_normalising() -> None:
    learner = plain()
    assert learner.value_norm is None
    assert learner.values(torch.ones(1, 3, 1)).tolist() == [pytest.approx([1.0, 10.0, 100.0])]


# --- weights shared or not ---


def test_agents_that_share_weights_are_told_their_numbers() -> None:
    learner = make_learner(net__hidden_sizes=[])
    assert len(learner.actor.agent_nets) == len(learner.critic.agent_nets) == 1
    with torch.no_grad():
        head: Any = learner.actor.agent_nets[0].head
        head.weight.zero_()
        head.weight[0] = torch.tensor([1.0, 2.0, 3.0, 10.0])  # of [number, observation]
    out = learner.actor(learner.actor.build_inputs(torch.tensor([[[5.0], [5.0], [6.0]]]), None))[0]
    assert out[0, :, 0].tolist() == pytest.approx([51.0, 52.0, 63.0])


def test_agents_with_their_own_weights_learn_nothing_from_each_other() -> None:
    learner = make_learner(share_weights=False)
    assert len(learner.actor.agent_nets) == len(learner.critic.agent_nets) == 3
    out = learner.actor(learner.actor.build_inputs(torch.ones(1, 3, 1), None))[0]
    assert not torch.equal(out[0, 0], out[0, 1])
    probe(learner, losses(), "gradient_step")
    first = {p: g.clone() for p, g in by_parameter(learner.actor_optimizer).items()}
    probe(learner, losses(obs=torch.tensor([[[0.0], [3.0], [0.0]]]), action=torch.tensor([[0, 0, 2]])), "gradient_step")
    second = by_parameter(learner.actor_optimizer)
    changed = [
        any(not torch.equal(first[p], second[p]) for p in member.parameters()) for member in learner.actor.agent_nets
    ]
    assert changed == [False, True, False]


def test_agents_that_share_weights_learn_from_all() -> None:
    learner = make_learner(normalize_advantage=False, entropy_coef=0.0, clip_range=9.0)
    data = losses(logp=torch.zeros(1, 3), obs=torch.tensor([[[1.0], [2.0], [3.0]]]))
    whole = probe(learner, data, "gradient_step").gradients["actor_optimizer"][0].clone()
    parts = []
    for agent in range(3):
        alone = losses(logp=torch.zeros(1, 3), obs=data.obs, alive=torch.eye(3, dtype=torch.bool)[agent][None])
        parts.append(probe(learner, alone, "gradient_step").gradients["actor_optimizer"][0].clone())
    assert all(part.abs().sum() > 0 for part in parts)
    assert torch.allclose(whole, torch.stack(parts).mean(0), atol=1e-7)


# --- minibatches and memory ---


def wide(length: int, envs: int) -> Batch:
    """A rollout whose advantages number its steps: `[T,N,A]`, all agents of a step have the same."""
    numbers = torch.arange(float(length * envs)).view(length, envs, 1).expand(length, envs, 3)
    return Batch(obs=numbers[..., None], advantage=numbers, returns=numbers)


def test_minibatches_cover_each_step_once_with_all_its_agents() -> None:
    learner = make_learner(minibatch_size=4)
    parts = [part.advantage for part in minibatches_of(learner, wide(6, 2))]
    assert [part.shape for part in parts] == [(4, 3)] * 3
    assert all(torch.equal(part[:, 0], part[:, agent]) for part in parts for agent in (1, 2))
    assert torch.cat(parts)[:, 0].sort().values.tolist() == list(range(12))


def test_the_number_of_updates_is_epochs_times_minibatches() -> None:
    for size, updates in ((1, 3 * 3), (2, 3), (100, 3)):  # of three steps two and one would be no minibatches
        learner = make_learner(epochs=3, minibatch_size=size)
        learner.update(rollout())
        assert learner.updates == updates


@pytest.mark.parametrize("last_action", [True, False])
@pytest.mark.parametrize("share_weights", [True, False])
@pytest.mark.parametrize("kind", ["gru", "lstm"])
def test_recurrent_minibatches_say_what_stepping_through_them_says(
    kind: str, share_weights: bool, last_action: bool
) -> None:
    settings = {"net__recurrent": kind, "net__recurrent_size": 4, "num_envs": 4, "minibatch_size": 10}
    learner = make_learner(**settings, share_weights=share_weights, last_action=last_action, entropy_coef=0.1)
    T, N, rng = 5, 4, torch.Generator().manual_seed(0)
    obs = torch.randn(T, N, 3, 1, generator=rng)
    ended = torch.zeros(T, N, dtype=torch.bool)
    ended[1, 2] = True  # the agents of the third environment forget after their second step
    logps, entropies, actions, memories = [], [], [], []
    hidden = learner.policy.initial_hidden(N)
    hidden = tree_map(lambda leaf: torch.randn(leaf.shape, generator=rng), hidden)  # of what was before
    for t in range(T):
        memories.append(tree_map(torch.Tensor.detach, hidden))
        out, _ = learner.policy.run_net(obs[t], hidden)
        decision = learner.policy.act(obs[t], hidden, None, Phase.COLLECT, rng, 0)
        chances = learner.distribution(out)
        actions.append(decision.action)
        logps.append(chances.log_prob(decision.action))
        entropies.append(chances.entropy())
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
        hidden=tree_map(lambda *parts: torch.stack(parts), *memories),
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
        said, spread = learner.evaluate_actions(part)
        assert torch.allclose(said, logp[:, n], atol=1e-6)
        assert torch.allclose(spread, entropy[:, n], atol=1e-6)
        # the critic has no memory: its loss is that of all rows alike
        expected = (
            learner.critic(learner.critic.build_inputs(part.critic_obs.flatten(0, 1), None))[0]
            - part.returns.flatten(0, 1)
        ) ** 2
        assert learner.value_loss(part, None).item() == pytest.approx(expected.mean().item(), rel=1e-4)
    assert sorted(columns) == [0, 1, 2, 3]
    # and so is the gradient through all steps
    advantage = (data.advantage - data.advantage.mean()) / data.advantage.std()
    loss = -((logp - logp.detach()).exp() * advantage).mean() - 0.1 * entropy.mean()
    expected = learner.actor_optimizer.compute_gradients(loss)[0].clone()
    assert torch.allclose(probe(learner, data, "gradient_step").gradients["actor_optimizer"][0], expected, atol=1e-6)


def test_only_actors_have_memory() -> None:
    learner = make_learner(net__recurrent="gru")
    assert learner.actor.recurrent
    assert not learner.critic.recurrent
    assert set(learner.extra_fields) == {"logp", "hidden"}
    assert set(make_learner().extra_fields) == {"logp"}


# --- updates ---


def test_critic_lr_is_the_critics_alone() -> None:
    learner = make_learner(lr=1e-4, critic_lr=1e-2, epochs=1)
    nets = (learner.actor, learner.critic)
    before = [[p.detach().clone() for p in net.parameters()] for net in nets]
    learner.update(rollout())
    # the first step of Adam changes a weight by the learning rate
    for net, start, lr in zip(nets, before, (1e-4, 1e-2), strict=True):
        largest = max((p - old).abs().max().item() for p, old in zip(net.parameters(), start, strict=True))
        assert largest == pytest.approx(lr, rel=0.05)


def test_actor_and_critic_are_clipped_each_to_the_norm() -> None:
    learner = make_learner(max_grad_norm=0.01, epochs=1)
    assert learner.update(rollout()).metrics["grad_norm"].item() > 0.01  # what is told is the norm before clipping
    for optimizer in (learner.actor_optimizer, learner.critic_optimizer):
        # Adam's first moment is a tenth of what it was given
        assert optimizer.first_moment[0].norm().item() == pytest.approx(0.1 * 0.01, rel=1e-3)


def test_observations_are_taken_into_the_statistics_after_learning() -> None:
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


def test_the_spread_of_continuous_actions_is_learned() -> None:
    spaces = Spaces(OBS, Box(-1.0, 1.0, (2,), np.float32), num_agents=3, state=1)
    learner = make_learner(spaces=spaces, lr=1e-3, epochs=1)
    action = torch.tensor([0.3, -0.2]).expand(3, 1, 3, 2)
    assert learner.distribution.log_std.tolist() == [0.0, 0.0]
    learner.update(rollout(action=action))
    assert learner.distribution.log_std.abs().tolist() == pytest.approx([1e-3] * 2, rel=0.05)


@pytest.mark.parametrize("name", ["mappo", "ippo"])
def test_agents_with_own_weights_have_own_spreads(name: str) -> None:
    spaces = Spaces(OBS, Box(-1.0, 1.0, (2,), np.float32), num_agents=3, state=1, alive=True)
    learner = make_learner(name, spaces, lr=1e-3, epochs=1, share_weights=False, normalize_advantage=False)
    assert learner.distribution.log_std.tolist() == [[0.0, 0.0]] * 3
    gone = torch.tensor([True, False, True]).expand(3, 1, 3)
    # the first agent's action is likely under its policy, the third's isn't; both paid well: less spread, and more
    action = torch.tensor([[0.0, 0.0], [0.0, 0.0], [3.0, 3.0]]).expand(3, 1, 3, 2)
    logp = learner.evaluate_actions(rollout(action=action).flatten())[0].detach().unsqueeze(1)
    learner.update(rollout(action=action, logp=logp, alive=gone, next_alive=gone, reward=torch.full((3, 1, 3), 1e3)))
    first, second, third = learner.distribution.log_std.tolist()
    assert first == pytest.approx([-1e-3] * 2, rel=0.05)
    assert second == [0.0, 0.0]
    assert third == pytest.approx([1e-3] * 2, rel=0.05)
    # all of it is in what a policy elsewhere needs to act
    assert any(torch.equal(part, learner.distribution.log_std) for part in learner.policy.state_dict().values())


def test_value_is_each_agents_and_unknown_where_only_the_state_tells_it() -> None:
    result = plain("ippo").value(torch.tensor([[[4.0], [5.0], [6.0]]]))
    assert result is not None
    assert result.tolist() == [pytest.approx([4.0, 50.0, 600.0])]
    assert make_learner().value(torch.zeros(1, 3, 1)) is None
    joined = make_learner(spaces=Spaces(OBS, Discrete(3), num_agents=3)).value(torch.zeros(2, 3, 1))
    assert joined is not None
    assert joined.shape == (2, 3)


# --- rejected settings, state and metrics ---


def test_unsupported_settings_and_spaces_are_rejected() -> None:
    parts = Spaces(Dict({"a": OBS}), Discrete(3), num_agents=3)
    with pytest.raises(UserError, match="mappo needs a global state, but the env provides none"):
        make_learner(spaces=parts)
    assert make_learner("ippo", parts).value({"a": torch.zeros(2, 3, 1)}) is not None  # its critics need none
    for name in ("mappo", "ippo"):
        with pytest.raises(UserError, match=f"{name} needs an environment with several agents"):
            make_learner(name, Spaces(OBS, Discrete(3)))
        with pytest.raises(UserError, match=r"action space .* is not supported; use Discrete, MultiDiscrete or a"):
            make_learner(name, Spaces(OBS, Dict({"a": Discrete(2)}), num_agents=3, state=1))


@pytest.mark.parametrize("name", ["mappo", "ippo"])
def test_restored_learner_continues_identically(name: str) -> None:
    settings = {"normalize_obs": True, "minibatch_size": 2, "epochs": 2}
    learner, other = make_learner(name, **settings), make_learner(name, **settings, seed=9)
    learner.update(rollout(**leaving(1)))
    other.load_state_dict(learner.state_dict())
    for _ in range(2):
        first, second = learner.update(rollout()), other.update(rollout())
        assert all(torch.equal(first.metrics[name], second.metrics[name]) for name in first.metrics)
    assert all_equal(weights(learner), weights(other))


def test_update_returns_exactly_the_declared_metrics() -> None:
    assert set(make_learner().update(rollout()).metrics) == set(MAPPO.metrics)


def test_explained_variance_by_hand() -> None:
    learner = plain(gamma=0.0, epochs=1)
    # the return is the reward: twice the value, 1, 10 and 100 times the state
    value = torch.tensor([1.0, 10.0, 100.0]) * steps(1.0, 2.0, 3.0)
    told = learner.update(rollout(reward=2 * value)).metrics["explained_variance"]
    # what is left has the variance of the value, the return four times that
    assert told.item() == pytest.approx(0.75, rel=1e-5)

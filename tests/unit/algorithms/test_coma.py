"""Advantages, targets and losses of COMA, also with agents that have left, with numbers worked out by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from by_hand import all_equal, check_polyak_update, copy_weights, flag_at
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete
from probe import last_gradients, probe
from torch import nn

import zhixing as zx
from zhixing.algorithms.coma import COMA, counterfactual_advantage, expected_q, team_value
from zhixing.core.batch import Batch
from zhixing.core.policy import Phase
from zhixing.core.spaces import Spaces
from zhixing.core.tree import tree_map
from zhixing.errors import UserError
from zhixing.ops.distributions import Categorical

OBS = Box(-9.0, 9.0, (1,), np.float32)
SPACES = Spaces(OBS, Discrete(3), num_agents=2, state=1)
OBS_INPUT, OTHERS_INPUT, STATE_INPUT = slice(0, 1), slice(1, 7), slice(7, 8)  # inputs of unshared critics


def make_learner(spaces: Spaces = SPACES, **settings: Any) -> COMA:
    """Return a learner with one linear layer per agent."""
    base = {"net__hidden_sizes": [], "share_weights": False, "gamma": 0.5, "td_lambda": 0.5, "entropy_coef": 0.0}
    base |= {"num_envs": 1, "max_grad_norm": None}
    cfg = zx.config.load(algorithm="coma", env="toy/team-match", **(base | settings))
    learner = zx.algorithms.get("coma").make(cfg, spaces)
    assert isinstance(learner, COMA)
    return learner


def set_agent_outputs(net: Any, *biases: list[float], **columns: float) -> None:
    """Make each agent's outputs its biases, plus `others` or `state` times the sum of these inputs."""
    with torch.no_grad():
        for agent_net, bias in zip(net.agent_nets, biases, strict=True):
            agent_net.head.weight.zero_()
            agent_net.head.bias.copy_(torch.tensor(bias))
            for name, factor in columns.items():
                agent_net.head.weight[:, {"others": OTHERS_INPUT, "state": STATE_INPUT}[name]] = factor


def logits_of(*probabilities: float) -> list[float]:
    return [float(np.log(p)) for p in probabilities]


def rollout(steps: int = 3, **fields: Any) -> Batch:
    """Return a rollout `[T,1]` of zeros without episode ends."""
    never = torch.zeros(steps, 1, dtype=torch.bool)
    base = {
        "obs": torch.zeros(steps, 1, 2, 1),
        "next_obs": torch.zeros(steps, 1, 2, 1),
        "state": torch.zeros(steps, 1, 1),
        "next_state": torch.zeros(steps, 1, 1),
        "action": torch.zeros(steps, 1, 2, dtype=torch.int64),
        "reward": torch.zeros(steps, 1, 2),
        "terminated": never,
        "truncated": never,
    }
    return Batch(**{**base, **fields})


def test_counterfactual_advantages_by_hand() -> None:
    q = torch.tensor([[1.0, 2.0, 6.0], [4.0, 0.0, 0.0]])
    policy = Categorical(torch.tensor([logits_of(0.5, 0.25, 0.25), logits_of(0.25, 0.5, 0.25)]))
    # baselines 0.5 + 0.5 + 1.5 = 2.5 and 1; Q-values of the actions 6 and 4
    assert expected_q(q, policy).tolist() == pytest.approx([2.5, 1.0])
    assert counterfactual_advantage(q, policy, torch.tensor([2, 0])).tolist() == pytest.approx([3.5, 3.0])
    assert team_value(q, policy).item() == pytest.approx(1.75)
    assert team_value(q, policy, torch.tensor([True, False])).item() == pytest.approx(2.5)
    assert team_value(q, policy, torch.tensor([False, False])).item() == 0.0


def test_expected_advantage_under_the_policy_is_zero() -> None:
    q, policy = torch.randn(5, 2, 3), Categorical(torch.randn(5, 2, 3))
    advantages = torch.stack([counterfactual_advantage(q, policy, torch.full((5, 2), a)) for a in range(3)], -1)
    assert torch.allclose((policy.logp.exp() * advantages).sum(-1), torch.zeros(5, 2), atol=1e-6)


def test_baseline_ignores_invalid_actions() -> None:
    q = torch.tensor([[1.0, 1e6, 6.0]])
    policy = Categorical(torch.tensor([[0.0, 9.0, 0.0]]), torch.tensor([[True, False, True]]))
    assert expected_q(q, policy).tolist() == [3.5]


def test_critic_inputs_contain_the_other_agents_actions_but_not_the_agents_own() -> None:
    learner = make_learner()
    data = rollout(1, state=torch.tensor([[[5.0]]]), obs=torch.tensor([[[[1.0], [2.0]]]]))
    inputs = learner.critic_obs(data, torch.tensor([[[0, 2]]]))
    first, second = [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]
    assert inputs["others"][0, 0].tolist() == [[0.0] * 3 + second, first + [0.0] * 3]
    assert inputs["obs"][0, 0].tolist() == [[1.0], [2.0]]
    assert inputs["state"][0, 0].tolist() == [[5.0], [5.0]]
    # check the order of inputs that set_agent_outputs assumes
    x = learner.critic.agent_nets[0].torso({"obs": {name: part[0, :, 0] for name, part in inputs.items()}})[0]
    assert [x[part].tolist() for part in (OBS_INPUT, OTHERS_INPUT, STATE_INPUT)] == [[1.0], [0.0] * 3 + second, [5.0]]


def test_critic_uses_all_observations_if_there_is_no_state() -> None:
    learner = make_learner(Spaces(OBS, Discrete(3), num_agents=2))
    inputs = learner.critic_obs(Batch(obs=torch.tensor([[[1.0], [2.0]]])), torch.tensor([[0, 2]]))
    assert inputs["state"].tolist() == [[[1.0, 2.0], [1.0, 2.0]]]


def set_values_to_state(learner: COMA) -> None:
    """Make all Q-values equal the state."""
    set_agent_outputs(learner.target_critic, [0.0] * 3, [0.0] * 3, state=1.0)


STATES = {
    "state": torch.tensor([1.0, 2.0, 10.0]).view(3, 1, 1),
    "next_state": torch.tensor([2.0, 5.0, 20.0]).view(3, 1, 1),
}
REWARD = {"reward": torch.tensor([[[1.0, 3.0]]]).expand(3, 1, 2)}  # team reward 2


def test_truncation_bootstraps_from_the_true_last_state() -> None:
    learner = make_learner()
    set_values_to_state(learner)
    result = learner.add_returns(rollout(truncated=flag_at(1), **STATES, **REWARD))
    # last row: 2 + 0.5 * 20 = 12; truncated: 2 + 0.5 * 5 = 4.5, where 10 would be of the next episode;
    # first row: 2 + 0.5 (0.5 V + 0.5 G) = 2 + 0.5 (1 + 2.25)
    assert result.returns.flatten().tolist() == pytest.approx([3.625, 4.5, 12.0])
    assert result.value.flatten().tolist() == pytest.approx([1.0, 2.0, 10.0])


def test_termination_stops_bootstrapping() -> None:
    learner = make_learner()
    set_values_to_state(learner)
    result = learner.add_returns(rollout(terminated=flag_at(1), **STATES, **REWARD))
    # terminated: 2; before that: 2 + 0.5 (0.5 * 2 + 0.5 * 2)
    assert result.returns.flatten().tolist() == pytest.approx([3.0, 2.0, 12.0])


def test_td_lambda_returns_by_hand() -> None:
    learner = make_learner()
    set_values_to_state(learner)
    result = learner.add_returns(rollout(**STATES, **REWARD))
    # 12; 2 + 0.5 (0.5 * 10 + 0.5 * 12) = 7.5; 2 + 0.5 (0.5 * 2 + 0.5 * 7.5)
    assert result.returns.flatten().tolist() == pytest.approx([4.375, 7.5, 12.0])


def test_team_value_is_the_mean_over_agents_of_the_expectation_over_actions() -> None:
    learner = make_learner(td_lambda=0.0)
    set_agent_outputs(learner.actor, logits_of(0.5, 0.25, 0.25), logits_of(0.25, 0.5, 0.25))
    set_agent_outputs(learner.target_critic, [1.0, 2.0, 6.0], [4.0, 0.0, 0.0], others=10.0)
    # 2.5 and 1, plus 10 times the one-hot action of the other agent, which sums to 1: mean 11.75
    result = learner.add_returns(rollout())
    assert result.value.flatten().tolist() == pytest.approx([11.75] * 3)
    assert result.returns.flatten().tolist() == pytest.approx([11.75 / 2] * 3)


def test_targets_ignore_invalid_actions() -> None:
    learner = make_learner(td_lambda=0.0)
    set_agent_outputs(learner.actor, [0.0, 9.0, 0.0], [0.0, 9.0, 0.0])
    set_agent_outputs(learner.target_critic, [1.0, 1e6, 6.0], [4.0, 1e6, 0.0])
    with torch.no_grad():  # the second action of the other agent adds 1e6
        for agent_net, column in zip(learner.target_critic.agent_nets, (5, 2), strict=True):
            agent_net.head.weight[:, column] = 1e6
    mask = torch.tensor([[[[True, False, True], [True, False, False]]]]).expand(3, 1, 2, 3)
    result = learner.add_returns(rollout(mask=mask, next_mask=mask, action=torch.tensor([[[2, 0]]]).expand(3, 1, 2)))
    # 3.5 for the first agent, 4 for the second
    assert result.value.flatten().tolist() == pytest.approx([3.75] * 3)
    assert result.returns.flatten().tolist() == pytest.approx([1.875] * 3)


def test_team_value_excludes_agents_that_have_left() -> None:
    learner = make_learner(td_lambda=0.0)
    set_agent_outputs(learner.actor, [0.0] * 3, [0.0] * 3)
    set_agent_outputs(learner.target_critic, [3.0] * 3, [1e6] * 3, others=10.0)
    alive = torch.tensor([[[True, False]]]).expand(3, 1, 2)
    # 3, plus 10 times the other agent's action, which is zero
    result = learner.add_returns(rollout(alive=alive, next_alive=alive))
    assert result.value.flatten().tolist() == pytest.approx([3.0] * 3)
    assert result.returns.flatten().tolist() == pytest.approx([1.5] * 3)


def test_critic_loss_by_hand() -> None:
    learner = make_learner()
    set_agent_outputs(learner.critic, [1.0, 2.0, 6.0], [4.0, 0.0, 0.0])
    minibatch = Batch(
        critic_obs=learner.critic_obs(rollout(1)[0], torch.tensor([[2, 0]])),
        action=torch.tensor([[2, 0]]),
        returns=torch.tensor([5.0]),
    )
    # Q-values 6 and 4, returns 5
    assert probe(learner, minibatch, "critic_step").metrics["critic_loss"].item() == pytest.approx(1.0)
    fields = {name: getattr(minibatch, name) for name in minibatch.fields}
    minibatch = Batch(**fields, alive=torch.tensor([[True, False]]))
    set_agent_outputs(learner.critic, [1.0, 2.0, 8.0], [4.0, 0.0, 0.0])
    assert probe(learner, minibatch, "critic_step").metrics["critic_loss"].item() == pytest.approx(9.0)


def test_policy_loss_by_hand() -> None:
    learner = make_learner(entropy_coef=0.1)
    set_agent_outputs(learner.actor, logits_of(0.5, 0.25, 0.25), logits_of(0.25, 0.5, 0.25))
    set_agent_outputs(learner.critic, [1.0, 2.0, 6.0], [4.0, 0.0, 0.0])
    data = rollout(1, action=torch.tensor([[[2, 0]]]))
    result = probe(learner, data, "actor_step")
    # advantages 3.5 and 3 of actions with probability 1/4: the mean of -3.5 ln(1/4) and -3 ln(1/4)
    assert result.metrics["policy_loss"].item() == pytest.approx(3.25 * np.log(4))
    assert result.metrics["entropy"].item() == pytest.approx(0.5 * np.log(2) + 0.5 * np.log(4))
    gradient = last_gradients(learner.actor_optimizer)[learner.actor.agent_nets[0].head.bias]
    # gradient of the first agent's logits: half of -3.5 (1{third} - p) - 0.1 dH,  dH = -p (ln p + H)
    p, H = np.array([0.5, 0.25, 0.25]), 1.5 * np.log(2)
    expected = 0.5 * (-3.5 * (np.array([0.0, 0.0, 1.0]) - p) + 0.1 * p * (np.log(p) + H))
    assert gradient.tolist() == pytest.approx(expected.tolist(), abs=1e-6)


def test_agents_that_have_left_get_no_gradient() -> None:
    learner = make_learner(entropy_coef=0.1, net__hidden_sizes=[8])
    alive = torch.tensor([[[True, False]]]).expand(3, 1, 2)
    data = rollout(obs=torch.randn(3, 1, 2, 1), alive=alive, next_alive=alive, **REWARD)
    probe(learner, learner.add_returns(data).flatten(), "critic_step")
    probe(learner, data, "actor_step")
    for net, optimizer in ((learner.critic, learner.critic_optimizer), (learner.actor, learner.actor_optimizer)):
        gradients = last_gradients(optimizer)
        assert all(gradients[parameter].abs().sum() == 0 for parameter in net.agent_nets[1].parameters())
        assert all(gradients[parameter].abs().sum() > 0 for parameter in net.agent_nets[0].head.parameters())


def test_update_takes_many_critic_steps_and_one_actor_step() -> None:
    learner = make_learner(critic_epochs=3, minibatch_size=2)
    actor, critic, steps = copy_weights(learner.actor), copy_weights(learner.critic), learner.actor_optimizer.steps[0]
    learner.update(rollout(4, **{"reward": torch.ones(4, 1, 2), "action": torch.tensor([[[2, 0]]]).expand(4, 1, 2)}))
    assert learner.updates == 3 * 2 + 1
    assert steps.item() == 1
    assert learner.critic_optimizer.steps[0].item() == 6
    assert not all_equal(copy_weights(learner.actor), actor)
    assert not all_equal(copy_weights(learner.critic), critic)


def test_target_critic_is_polyak_averaged() -> None:
    learner = make_learner(tau=0.1, critic_epochs=1)
    start = copy_weights(learner.target_critic)
    learner.critic_step(learner.add_returns(rollout(**REWARD)).flatten())
    check_polyak_update(learner.target_critic, start, learner.critic, tau=0.1)


@pytest.mark.parametrize("share_weights", [True, False])
@pytest.mark.parametrize("recurrent", ["none", "gru", "lstm"])
def test_policies_of_a_rollout_equal_those_while_acting(recurrent: str, share_weights: bool) -> None:
    learner = make_learner(
        net__recurrent=recurrent,
        net__recurrent_size=4,
        net__hidden_sizes=[8],
        last_action=True,
        share_weights=share_weights,
    )
    T, obs, rng = 5, torch.randn(6, 1, 2, 1), torch.Generator().manual_seed(0)
    last = torch.randn(1, 2, 1)  # final observation of the episode that ends with the second step
    hidden = learner.policy.initial_hidden(1)
    actions, logps, hiddens, boundary_policies = [], [], [], []
    for t in range(T + 1):
        out, _ = learner.policy.run_net(obs[t], hidden)
        if t == T:
            boundary_policies.append(Categorical(out))
            break
        decision = learner.policy.act(obs[t], hidden, None, Phase.COLLECT, rng, 0)
        actions.append(decision.action)
        logps.append(Categorical(out).logp)
        hiddens.append(hidden)
        hidden = decision.hidden
        if t == 1:
            boundary_policies.append(Categorical(learner.policy.run_net(last, hidden)[0]))
            hidden = learner.policy.initial_hidden(1)
    stored = tree_map(lambda *steps: torch.stack(steps), *hiddens)
    next_obs = obs[1:].clone()
    next_obs[1] = last
    truncated = flag_at(1, length=T)
    data = rollout(T, obs=obs[:T], next_obs=next_obs, action=torch.stack(actions), truncated=truncated, hidden=stored)
    assert torch.allclose(learner.policies(data).logp, torch.stack(logps), atol=1e-6)
    q = torch.tensor([1.0, 2.0, 4.0])  # of the actions, for any inputs
    for agent_net in learner.target_critic.agent_nets:
        nn.init.zeros_(agent_net.head.weight)
        agent_net.head.bias.data = q.clone()
    expected = [team_value(q, policy).item() for policy in boundary_policies]
    rows = flag_at(1, T - 1, length=T)
    assert learner.bootstrap_values(data[rows]).tolist() == pytest.approx(expected, abs=1e-6)


def test_invalid_actions_are_never_taken() -> None:
    learner = make_learner()
    set_agent_outputs(learner.actor, [0.0, 9.0, 1.0], [9.0, 0.0, 0.0])
    mask = torch.tensor([[True, False, True], [False, True, True]]).expand(5000, 2, 3)
    for phase in Phase:
        action = learner.policy.act(
            torch.zeros(5000, 2, 1), None, mask, phase, torch.Generator().manual_seed(0), 0
        ).action
        assert mask.gather(-1, action.unsqueeze(-1)).all()


def test_actors_critic_and_target_normalize_observations() -> None:
    learner = make_learner(normalize_obs=True)
    learner.update(rollout(2, obs=torch.tensor([1.0, 3.0]).view(2, 1, 1, 1).expand(2, 1, 2, 1)))
    for net in (learner.actor, learner.critic, learner.target_critic):
        encoder = net.agent_nets[0].torso.encoder.part("obs")
        norm = encoder.norm if net is learner.actor else encoder.part("obs").norm
        assert (norm.mean.item(), norm.var.item(), norm.count.item()) == (2.0, 1.0, 4.0)


def test_value_is_the_team_value_of_first_observations() -> None:
    learner = make_learner(Spaces(OBS, Discrete(3), num_agents=2))
    set_agent_outputs(learner.actor, logits_of(0.5, 0.25, 0.25), logits_of(0.25, 0.5, 0.25))
    set_agent_outputs(learner.critic, [1.0, 2.0, 6.0], [4.0, 0.0, 0.0])
    result = learner.value(torch.zeros(2, 2, 1))
    assert result is not None
    assert result.tolist() == pytest.approx([1.75, 1.75])
    assert make_learner().value(torch.zeros(2, 2, 1)) is None  # the critic needs a state


def test_unsupported_settings_and_spaces_are_rejected() -> None:
    for space in (Box(-1.0, 1.0, (1,), np.float32), MultiDiscrete([2, 2])):
        with pytest.raises(UserError, match="coma needs Discrete actions, but this environment has"):
            make_learner(Spaces(OBS, space, num_agents=2))
    with pytest.raises(UserError, match="coma needs a global state"):
        make_learner(Spaces(Dict({"a": OBS}), Discrete(3), num_agents=2))
    with pytest.raises(UserError, match="coma needs an environment with several agents"):
        make_learner(Spaces(OBS, Discrete(3)))


def test_opposed_agents_are_rejected() -> None:
    with pytest.raises(UserError, match=r"coma learns one value for the whole team.*use ippo, mappo, maddpg or idqn"):
        make_learner(Spaces(OBS, Discrete(3), num_agents=2, state=1, reward_kind="opposed"))
    zero_sum = torch.tensor([[[1.0, -1.0]]])
    learner = make_learner()
    with pytest.raises(UserError, match="they sum to zero in each of the first 12 steps with rewards"):
        learner.update(rollout(12, reward=zero_sum.expand(12, 1, 2)))
    learner = make_learner()
    for _ in range(4):  # one step with rewards per rollout
        learner.update(rollout(3, reward=torch.cat([zero_sum, torch.zeros(2, 1, 2)])))
    assert (learner.team_reward.undecided, learner.team_reward.rewarded_steps) == (True, 4)
    learner.update(rollout(**REWARD))  # rewards 1 and 3 are not opposed
    learner.update(rollout(12, reward=zero_sum.expand(12, 1, 2)))


def test_restored_learner_continues_identically() -> None:
    learner, other = make_learner(net__hidden_sizes=[8]), make_learner(net__hidden_sizes=[8], seed=9)
    learner.update(rollout(**REWARD))
    other.load_state_dict(learner.state_dict())
    for _ in range(3):
        learner.update(rollout(**REWARD))
        other.update(rollout(**REWARD))
    for name in ("actor", "critic", "target_critic"):
        assert all_equal(copy_weights(getattr(learner, name)), copy_weights(getattr(other, name)))

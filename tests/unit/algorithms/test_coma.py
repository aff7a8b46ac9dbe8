"""COMA's counterfactual advantages, its targets at every kind of end, and what those who have left don't do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete
from probe import probe
from torch import Tensor, nn

import zhixing as zx
from zhixing.algorithms.coma import COMA, counterfactual_advantage, expected_q, team_value
from zhixing.core.batch import Batch
from zhixing.core.optimizer import Optimizer
from zhixing.core.policy import Phase
from zhixing.core.spaces import Spaces
from zhixing.core.tree import tree_map
from zhixing.errors import UserError
from zhixing.ops.distributions import Categorical

OBS = Box(-9.0, 9.0, (1,), np.float32)
SPACES = Spaces(OBS, Discrete(3), num_agents=2, state=1)
OWN, OTHERS, STATE = slice(0, 1), slice(1, 7), slice(7, 8)  # what the critic sees, where weights aren't shared


def learner(spaces: Spaces = SPACES, **settings: Any) -> COMA:
    """Without hidden layers, and a network for each agent: heads see what is shown."""
    base = {"net__hidden_sizes": [], "share_weights": False, "gamma": 0.5, "td_lambda": 0.5, "entropy_coef": 0.0}
    base |= {"num_envs": 1, "max_grad_norm": None}
    cfg = zx.config.load(algorithm="coma", env="toy/team-match", **(base | settings))
    made = zx.algorithms.get("coma").make(cfg, spaces)
    assert isinstance(made, COMA)
    return made


def saying(net: Any, *biases: list[float], **columns: float) -> None:
    """Each agent's head says its bias, whatever is shown, plus `others` or `state` times the sum of what these show."""
    with torch.no_grad():
        for member, bias in zip(net.agent_nets, biases, strict=True):
            member.head.weight.zero_()
            member.head.bias.copy_(torch.tensor(bias))
            for name, factor in columns.items():
                member.head.weight[:, {"others": OTHERS, "state": STATE}[name]] = factor


def likely(*chances: float) -> list[float]:
    return [float(np.log(chance)) for chance in chances]


def rollout(steps: int = 3, **fields: Any) -> Batch:
    """`[T,1]` steps; all is zero, and nothing ends."""
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


def at(t: int, steps: int = 3) -> Tensor:
    flag = torch.zeros(steps, 1, dtype=torch.bool)
    flag[t] = True
    return flag


def weights(net: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in net.parameters()]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a, b, strict=True))


def gradients_by(optimizer: Optimizer) -> dict[Tensor, Tensor]:
    """What `gradient` found last, by parameter."""
    return dict(zip(optimizer.parameters, optimizer._gradient_views, strict=True))


def test_counterfactual_advantages_by_hand() -> None:
    q = torch.tensor([[1.0, 2.0, 6.0], [4.0, 0.0, 0.0]])
    policy = Categorical(torch.tensor([likely(0.5, 0.25, 0.25), likely(0.25, 0.5, 0.25)]))
    # baselines 0.5 + 0.5 + 1.5 = 2.5 and 1; the third action is worth 6, the first 4
    assert expected_q(q, policy).tolist() == pytest.approx([2.5, 1.0])
    assert counterfactual_advantage(q, policy, torch.tensor([2, 0])).tolist() == pytest.approx([3.5, 3.0])
    assert team_value(q, policy).item() == pytest.approx(1.75)
    assert team_value(q, policy, torch.tensor([True, False])).item() == pytest.approx(2.5)
    assert team_value(q, policy, torch.tensor([False, False])).item() == 0.0


def test_advantages_average_to_zero_under_the_policy() -> None:
    q, policy = torch.randn(5, 2, 3), Categorical(torch.randn(5, 2, 3))
    each = torch.stack([counterfactual_advantage(q, policy, torch.full((5, 2), a)) for a in range(3)], -1)
    assert torch.allclose((policy.logp.exp() * each).sum(-1), torch.zeros(5, 2), atol=1e-6)


def test_a_forbidden_action_is_in_no_baseline() -> None:
    q = torch.tensor([[1.0, 1e6, 6.0]])
    policy = Categorical(torch.tensor([[0.0, 9.0, 0.0]]), torch.tensor([[True, False, True]]))
    assert expected_q(q, policy).tolist() == [3.5]


def test_the_critic_sees_what_the_others_do_and_never_what_the_agent_itself_does() -> None:
    made = learner()
    shown = rollout(1, state=torch.tensor([[[5.0]]]), obs=torch.tensor([[[[1.0], [2.0]]]]))
    seen = made.critic_obs(shown, torch.tensor([[[0, 2]]]))
    first, second = [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]
    assert seen["others"][0, 0].tolist() == [[0.0] * 3 + second, first + [0.0] * 3]
    assert seen["obs"][0, 0].tolist() == [[1.0], [2.0]]
    assert seen["state"][0, 0].tolist() == [[5.0], [5.0]]
    # in the order in which the networks here are given weights
    q = made.critic.agent_nets[0].torso({"obs": {name: part[0, :, 0] for name, part in seen.items()}})
    assert q[0, OWN].tolist() + q[0, OTHERS].tolist() + q[0, STATE].tolist() == [1.0] + [0.0] * 3 + second + [5.0]


def test_the_critic_of_a_task_without_a_state_sees_all_observations() -> None:
    made = learner(Spaces(OBS, Discrete(3), num_agents=2))
    seen = made.critic_obs(Batch(obs=torch.tensor([[[1.0], [2.0]]])), torch.tensor([[0, 2]]))
    assert seen["state"].tolist() == [[[1.0, 2.0], [1.0, 2.0]]]


def values_of_the_state(made: COMA) -> None:
    """Every action is worth what the state tells."""
    saying(made.target_critic, [0.0] * 3, [0.0] * 3, state=1.0)


STATES = {
    "state": torch.tensor([1.0, 2.0, 10.0]).view(3, 1, 1),
    "next_state": torch.tensor([2.0, 5.0, 20.0]).view(3, 1, 1),
}
PAID = {"reward": torch.tensor([[[1.0, 3.0]]]).expand(3, 1, 2)}  # 2 to the team


def test_truncation_bootstraps_from_the_true_last_state() -> None:
    made = learner()
    values_of_the_state(made)
    found = made.add_returns(rollout(truncated=at(1), **STATES, **PAID))
    # the last row: 2 + 0.5 * 20 = 12; truncated: 2 + 0.5 * 5 = 4.5, not the next episode's 10;
    # the first: 2 + 0.5 (0.5 * V + 0.5 * G) = 2 + 0.5 (1 + 2.25)
    assert found.returns.flatten().tolist() == pytest.approx([3.625, 4.5, 12.0])
    assert found.value.flatten().tolist() == pytest.approx([1.0, 2.0, 10.0])


def test_termination_ends_the_future() -> None:
    made = learner()
    values_of_the_state(made)
    found = made.add_returns(rollout(terminated=at(1), **STATES, **PAID))
    # 2 at the end; before it 2 + 0.5 (0.5 * 2 + 0.5 * 2)
    assert found.returns.flatten().tolist() == pytest.approx([3.0, 2.0, 12.0])


def test_within_an_episode_returns_mix_all_later_values() -> None:
    made = learner()
    values_of_the_state(made)
    found = made.add_returns(rollout(**STATES, **PAID))
    # 12; 2 + 0.5 (0.5 * 10 + 0.5 * 12) = 7.5; 2 + 0.5 (0.5 * 2 + 0.5 * 7.5)
    assert found.returns.flatten().tolist() == pytest.approx([4.375, 7.5, 12.0])


def test_values_are_averaged_over_own_actions_and_agents() -> None:
    made = learner(td_lambda=0.0)
    saying(made.actor, likely(0.5, 0.25, 0.25), likely(0.25, 0.5, 0.25))
    saying(made.target_critic, [1.0, 2.0, 6.0], [4.0, 0.0, 0.0], others=10.0)
    # 2.5 and 1, and 10 for the one action that the other takes, whichever: mean 11.75
    found = made.add_returns(rollout())
    assert found.value.flatten().tolist() == pytest.approx([11.75] * 3)
    assert found.returns.flatten().tolist() == pytest.approx([11.75 / 2] * 3)


def test_targets_never_come_from_a_forbidden_action() -> None:
    made = learner(td_lambda=0.0)
    saying(made.actor, [0.0, 9.0, 0.0], [0.0, 9.0, 0.0])
    saying(made.target_critic, [1.0, 1e6, 6.0], [4.0, 1e6, 0.0])
    with torch.no_grad():  # the other's second action is worth as much again
        for member, place in zip(made.target_critic.agent_nets, (5, 2), strict=True):
            member.head.weight[:, place] = 1e6
    mask = torch.tensor([[[[True, False, True], [True, False, False]]]]).expand(3, 1, 2, 3)
    found = made.add_returns(rollout(mask=mask, next_mask=mask, action=torch.tensor([[[2, 0]]]).expand(3, 1, 2)))
    # 3.5 for the first agent, 4 for the second
    assert found.value.flatten().tolist() == pytest.approx([3.75] * 3)
    assert found.returns.flatten().tolist() == pytest.approx([1.875] * 3)


def test_who_has_left_has_no_say_in_the_teams_value() -> None:
    made = learner(td_lambda=0.0)
    saying(made.actor, [0.0] * 3, [0.0] * 3)
    saying(made.target_critic, [3.0] * 3, [1e6] * 3, others=10.0)
    alive = torch.tensor([[[True, False]]]).expand(3, 1, 2)
    # 3, and nothing for what the other does, for it does nothing
    found = made.add_returns(rollout(alive=alive, next_alive=alive))
    assert found.value.flatten().tolist() == pytest.approx([3.0] * 3)
    assert found.returns.flatten().tolist() == pytest.approx([1.5] * 3)


def test_critic_loss_by_hand() -> None:
    made = learner()
    saying(made.critic, [1.0, 2.0, 6.0], [4.0, 0.0, 0.0])
    both = Batch(
        critic_obs=made.critic_obs(rollout(1)[0], torch.tensor([[2, 0]])),
        action=torch.tensor([[2, 0]]),
        returns=torch.tensor([5.0]),
    )
    # 6 and 4 against 5
    assert probe(made, both, "critic_step").metrics["critic_loss"].item() == pytest.approx(1.0)
    one = Batch(**{name: getattr(both, name) for name in both.fields}, alive=torch.tensor([[True, False]]))
    saying(made.critic, [1.0, 2.0, 8.0], [4.0, 0.0, 0.0])
    assert probe(made, one, "critic_step").metrics["critic_loss"].item() == pytest.approx(9.0)


def test_policy_loss_by_hand() -> None:
    made = learner(entropy_coef=0.1)
    saying(made.actor, likely(0.5, 0.25, 0.25), likely(0.25, 0.5, 0.25))
    saying(made.critic, [1.0, 2.0, 6.0], [4.0, 0.0, 0.0])
    shown = rollout(1, action=torch.tensor([[[2, 0]]]))
    found = probe(made, shown, "actor_step")
    # advantages 3.5 and 3 of actions with chance 1/4: mean of -(3.5 + 3) ln(1/4)
    assert found.metrics["policy_loss"].item() == pytest.approx(3.25 * np.log(4))
    assert found.metrics["entropy"].item() == pytest.approx(0.5 * np.log(2) + 0.5 * np.log(4))
    of_the_logits = gradients_by(made.actor_optimizer)[made.actor.agent_nets[0].head.bias]
    # by the logits of the first agent, half of: -3.5 (1{third} - p) - 0.1 dH,  dH = -p (ln p + H)
    p, H = np.array([0.5, 0.25, 0.25]), 1.5 * np.log(2)
    expected = 0.5 * (-3.5 * (np.array([0.0, 0.0, 1.0]) - p) + 0.1 * p * (np.log(p) + H))
    assert of_the_logits.tolist() == pytest.approx(expected.tolist(), abs=1e-6)


def test_who_has_left_gets_no_gradient() -> None:
    made = learner(entropy_coef=0.1, net__hidden_sizes=[8])
    alive = torch.tensor([[[True, False]]]).expand(3, 1, 2)
    shown = rollout(obs=torch.randn(3, 1, 2, 1), alive=alive, next_alive=alive, **PAID)
    data = made.add_returns(shown).flatten()
    for net, optimizer, gradients in (
        (made.critic, made.critic_optimizer, probe(made, data, "critic_step")),
        (made.actor, made.actor_optimizer, probe(made, shown, "actor_step")),
    ):
        assert gradients.gradients
        gradient = gradients_by(optimizer)
        assert all(gradient[parameter].abs().sum() == 0 for parameter in net.agent_nets[1].parameters())
        assert all(gradient[parameter].abs().sum() > 0 for parameter in net.agent_nets[0].head.parameters())


def test_the_critic_takes_many_steps_and_the_actors_one() -> None:
    made = learner(critic_epochs=3, minibatch_size=2)
    actor, critic, steps = weights(made.actor), weights(made.critic), made.actor_optimizer.steps[0]
    made.update(rollout(4, **{"reward": torch.ones(4, 1, 2), "action": torch.tensor([[[2, 0]]]).expand(4, 1, 2)}))
    assert made.updates == 3 * 2 + 1
    assert steps.item() == 1
    assert made.critic_optimizer.steps[0].item() == 6
    assert not same(weights(made.actor), actor)
    assert not same(weights(made.critic), critic)


def test_the_target_follows_slowly() -> None:
    made = learner(tau=0.1, critic_epochs=1)
    start = weights(made.target_critic)
    made.critic_step(made.add_returns(rollout(**PAID)).flatten())
    for target, before, net in zip(weights(made.target_critic), start, weights(made.critic), strict=True):
        assert torch.allclose(target, 0.9 * before + 0.1 * net, atol=1e-7)
    assert not any(p.requires_grad for p in made.target_critic.parameters())


@pytest.mark.parametrize("share_weights", [True, False])
@pytest.mark.parametrize("recurrent", ["none", "gru", "lstm"])
def test_chances_over_a_rollout_and_beyond_it_are_those_of_acting(recurrent: str, share_weights: bool) -> None:
    made = learner(
        net__recurrent=recurrent,
        net__recurrent_size=4,
        net__hidden_sizes=[8],
        last_action=True,
        share_weights=share_weights,
    )
    T, obs, rng = 5, torch.randn(6, 1, 2, 1), torch.Generator().manual_seed(0)
    last = torch.randn(1, 2, 1)  # what the episode that ends with the second step showed at last
    hidden = made.policy.initial_hidden(1)
    actions, logps, memories, beyond = [], [], [], []
    for t in range(T + 1):
        out, _ = made.policy.run_net(obs[t], hidden)
        if t == T:
            beyond.append(Categorical(out))
            break
        decision = made.policy.act(obs[t], hidden, None, Phase.COLLECT, rng, 0)
        actions.append(decision.action)
        logps.append(Categorical(out).logp)
        memories.append(hidden)
        hidden = decision.hidden
        if t == 1:
            beyond.append(Categorical(made.policy.run_net(last, hidden)[0]))
            hidden = made.policy.initial_hidden(1)
    kept = tree_map(lambda *steps: torch.stack(steps), *memories)
    following = obs[1:].clone()
    following[1] = last
    shown = rollout(T, obs=obs[:T], next_obs=following, action=torch.stack(actions), truncated=at(1, T), hidden=kept)
    assert torch.allclose(made.policies(shown).logp, torch.stack(logps), atol=1e-6)
    for member in made.target_critic.agent_nets:  # each action has a worth of its own, nothing else counts
        nn.init.zeros_(member.head.weight)
        member.head.bias.data = torch.tensor([1.0, 2.0, 4.0])
    expected = [team_value(torch.tensor([1.0, 2.0, 4.0]), policy).item() for policy in beyond]
    rows = at(1, T) | at(T - 1, T)
    assert made.bootstrap_values(shown[rows]).tolist() == pytest.approx(expected, abs=1e-6)


def test_forbidden_actions_are_never_taken() -> None:
    made = learner()
    saying(made.actor, [0.0, 9.0, 1.0], [9.0, 0.0, 0.0])
    mask = torch.tensor([[True, False, True], [False, True, True]]).expand(5000, 2, 3)
    for phase in Phase:
        action = made.policy.act(torch.zeros(5000, 2, 1), None, mask, phase, torch.Generator().manual_seed(0), 0).action
        assert mask.gather(-1, action.unsqueeze(-1)).all()


def test_normalised_observations_reach_actors_critic_and_target() -> None:
    made = learner(normalize_obs=True)
    made.update(rollout(2, obs=torch.tensor([1.0, 3.0]).view(2, 1, 1, 1).expand(2, 1, 2, 1)))
    for net in (made.actor, made.critic, made.target_critic):
        encoder = net.agent_nets[0].torso.encoder.part("obs")
        norm = encoder.norm if net is made.actor else encoder.part("obs").norm
        assert (norm.mean.item(), norm.var.item(), norm.count.item()) == (2.0, 1.0, 4.0)


def test_value_is_that_of_acting_as_usual() -> None:
    made = learner(Spaces(OBS, Discrete(3), num_agents=2))
    saying(made.actor, likely(0.5, 0.25, 0.25), likely(0.25, 0.5, 0.25))
    saying(made.critic, [1.0, 2.0, 6.0], [4.0, 0.0, 0.0])
    found = made.value(torch.zeros(2, 2, 1))
    assert found is not None
    assert found.tolist() == pytest.approx([1.75, 1.75])
    assert learner().value(torch.zeros(2, 2, 1)) is None  # there the task tells a state


def test_what_it_cannot_do_is_refused_by_name() -> None:
    for space in (Box(-1.0, 1.0, (1,), np.float32), MultiDiscrete([2, 2])):
        with pytest.raises(UserError, match="coma needs Discrete actions, but this environment has"):
            learner(Spaces(OBS, space, num_agents=2))
    with pytest.raises(UserError, match="coma needs a global state"):
        learner(Spaces(Dict({"a": OBS}), Discrete(3), num_agents=2))
    with pytest.raises(UserError, match="coma needs an environment with several agents"):
        learner(Spaces(OBS, Discrete(3)))


def test_opposed_agents_are_rejected() -> None:
    with pytest.raises(UserError, match=r"coma learns one value for the whole team.*use ippo, mappo, maddpg or idqn"):
        learner(Spaces(OBS, Discrete(3), num_agents=2, state=1, reward_kind="opposed"))
    versus = torch.tensor([[[1.0, -1.0]]])
    made = learner()
    with pytest.raises(UserError, match="they sum to zero in each of the first 12 steps with rewards"):
        made.update(rollout(12, reward=versus.expand(12, 1, 2)))
    made = learner()
    for _ in range(4):  # nothing is paid in the others' steps
        made.update(rollout(3, reward=torch.cat([versus, torch.zeros(2, 1, 2)])))
    assert (made.team_reward.undecided, made.team_reward.rewarded_steps) == (True, 4)
    made.update(rollout(**PAID))  # 1 and 3
    made.update(rollout(12, reward=versus.expand(12, 1, 2)))


def test_state_round_trip_gives_the_same_next_update() -> None:
    made, other = learner(net__hidden_sizes=[8]), learner(net__hidden_sizes=[8], seed=9)
    made.update(rollout(**PAID))
    other.load_state_dict(made.state_dict())
    for _ in range(3):
        made.update(rollout(**PAID))
        other.update(rollout(**PAID))
    for name in ("actor", "critic", "target_critic"):
        assert same(weights(getattr(made, name)), weights(getattr(other, name)))

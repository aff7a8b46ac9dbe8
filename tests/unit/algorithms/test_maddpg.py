"""Targets, losses and policies of MADDPG, also with agents that have left, with numbers worked out by hand."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from by_hand import all_equal, check_polyak_update, copy_weights
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete
from torch import Tensor

import zhixing as zx
from zhixing.algorithms.maddpg import MADDPG
from zhixing.buffers import Buffer, NStep
from zhixing.core.batch import Batch
from zhixing.core.policy import Phase
from zhixing.core.spaces import Spaces
from zhixing.errors import UserError

OBS = Box(-9.0, 9.0, (2,), np.float32)
DISCRETE = Spaces(OBS, Discrete(3), num_agents=2)
CONTINUOUS = Spaces(OBS, Box(-1.0, 1.0, (1,), np.float32), num_agents=2)
INDIVIDUAL = dataclasses.replace(DISCRETE, alive=True)
SHARED = dataclasses.replace(INDIVIDUAL, reward_kind="shared")
ALL_ALIVE = torch.ones(3, 2, dtype=torch.bool)


def make_learner(spaces: Spaces = DISCRETE, **settings: Any) -> MADDPG:
    base = {"net__hidden_sizes": [], "output_penalty": 0.0, "max_grad_norm": None}  # one linear layer each
    cfg = zx.config.load(algorithm="maddpg", env="toy/team-match", **(base | settings))
    learner = zx.algorithms.get("maddpg").make(cfg, spaces)
    assert isinstance(learner, MADDPG)
    return learner


def set_towers(net: Any, weight: list[list[float]], bias: list[list[float]]) -> None:
    """Make the outputs of tower k weight[k] · x + bias[k]. All outputs of a tower have the same weights."""
    with torch.no_grad():
        net.towers.weights[0].copy_(torch.tensor(weight).unsqueeze(-1).expand_as(net.towers.weights[0]))
        net.towers.biases[0].copy_(torch.tensor(bias).unsqueeze(1))


def set_actor_outputs(net: Any, first: list[float], second: list[float]) -> None:
    """Make the outputs of the two actors constant."""
    set_towers(net, [[0.0, 0.0]] * 2, [first, second])


# inputs of critics are [o1 o1 o2 o2 | one-hot action 1 | one-hot action 2]. Here values depend only on the actions:
# Q_1 is 1, 2 or 3 for the first agent's action plus 10, 20 or 30 for the second's; Q_2 = 100 - Q_1
WEIGHTS = [0.0, 0.0, 0.0, 0.0, 1.0, 2.0, 3.0, 10.0, 20.0, 30.0]


def set_critics(net: Any) -> None:
    """Make the critics return Q_1 and Q_2 as described above."""
    set_towers(net, [WEIGHTS, [-w for w in WEIGHTS]], [[0.0], [100.0]])


def batch(**fields: Any) -> Batch:
    """Return three equal steps: one within an episode, one that terminates, one that is truncated."""
    base = {
        "obs": torch.zeros(3, 2, 2),
        "next_obs": torch.zeros(3, 2, 2),
        "action": torch.tensor([[0, 1]]).expand(3, 2),
        "reward": torch.tensor([[1.0, -1.0]]).expand(3, 2),
        "terminated": torch.tensor([False, True, False]),
        "truncated": torch.tensor([False, False, True]),
        "discount": torch.tensor([0.9, 0.9, 0.9]),
        "index": torch.arange(3),
    }
    return Batch(**{**base, **fields})


def test_targets_by_hand() -> None:
    learner = make_learner()
    set_critics(learner.target_critics)
    set_actor_outputs(learner.target_actor, [0.0, 0.0, 5.0], [1.0, 0.0, 0.0])  # the third action, and the first
    set_actor_outputs(learner.actor, [9.0, 0.0, 0.0], [0.0, 9.0, 0.0])  # not used
    # Q'_1 = 3 + 10 = 13, Q'_2 = 100 - 13 = 87: 1 + 0.9 * 13 = 12.7 and -1 + 0.9 * 87 = 77.3; terminated: the rewards;
    # truncated bootstraps
    expected = torch.tensor([[12.7, 77.3], [1.0, -1.0], [12.7, 77.3]])
    assert torch.allclose(learner.target_value(batch()), expected)


def test_targets_use_the_discount_of_each_row() -> None:
    learner = make_learner()
    set_critics(learner.target_critics)
    set_actor_outputs(learner.target_actor, [0.0, 0.0, 5.0], [1.0, 0.0, 0.0])
    data = batch(discount=torch.tensor([0.5, 0.9, 0.1]))
    assert torch.allclose(learner.target_value(data)[:, 0], torch.tensor([1 + 6.5, 1.0, 1 + 1.3]))


def test_targets_ignore_invalid_actions() -> None:
    learner = make_learner()
    set_critics(learner.target_critics)
    set_actor_outputs(learner.target_actor, [0.0, 1.0, 5.0], [1.0, 0.0, 0.0])
    next_mask = torch.tensor([[[True, True, False], [False, False, True]]]).expand(3, 2, 3)
    # the second action of the first agent, 2, and the third of the second agent, 30: 1 + 0.9 * 32
    data = batch(mask=torch.ones(3, 2, 3, dtype=torch.bool), next_mask=next_mask)
    assert learner.target_value(data)[0].tolist() == pytest.approx([29.8, -1 + 0.9 * 68])


def test_with_individual_rewards_a_dead_agent_does_not_bootstrap() -> None:
    learner = make_learner(INDIVIDUAL)
    set_critics(learner.target_critics)
    set_actor_outputs(learner.target_actor, [0.0, 0.0, 5.0], [1.0, 0.0, 0.0])
    next_alive = torch.tensor([[True, False]]).expand(3, 2)
    # Q'_1 = 3, without the second agent's 10: 1 + 0.9 * 3; the second agent has its last reward only
    result = learner.target_value(batch(alive=ALL_ALIVE, next_alive=next_alive))
    assert torch.allclose(result, torch.tensor([[3.7, -1.0], [1.0, -1.0], [3.7, -1.0]]))


def test_with_shared_rewards_a_dead_agent_bootstraps() -> None:
    learner = make_learner(SHARED)
    set_critics(learner.target_critics)
    set_actor_outputs(learner.target_actor, [0.0, 0.0, 5.0], [1.0, 0.0, 0.0])
    next_alive = torch.tensor([[True, False]]).expand(3, 2)
    # Q'_1 = 3, without the second agent's 10, Q'_2 = 100 - 3: -1 + 0.9 * 97; termination stops both
    result = learner.target_value(batch(alive=ALL_ALIVE, next_alive=next_alive))
    assert torch.allclose(result, torch.tensor([[3.7, 86.3], [1.0, -1.0], [3.7, 86.3]]))


@pytest.mark.parametrize(("spaces", "second"), [(INDIVIDUAL, 1.0), (SHARED, 9.55)])
def test_n_step_rewards_end_with_the_agent_unless_they_are_shared(spaces: Spaces, second: float) -> None:
    learner = make_learner(spaces, gamma=0.9)
    set_towers(learner.target_critics, [[0.0] * 10] * 2, [[100.0], [100.0]])
    buffer = Buffer(spaces.fields(), 8, view=NStep(3, 0.9, alive_only=spaces.individual_termination))
    for t, reward in enumerate(([2.0, 1.0], [2.0, 5.0], [2.0, 5.0])):
        step = {"obs": np.zeros((1, 2, 2), np.float32), "action": np.zeros((1, 2), np.int64)}
        ends = {"terminated": np.array([t == 2]), "truncated": np.array([False])}
        alive = {"alive": np.array([[True, t == 0]]), "next_alive": np.array([[True, False]])}
        buffer.add(Batch(**step, **ends, **alive, next_obs=step["obs"], reward=np.array([reward], np.float32)))
    data = buffer.sample(64, np.random.default_rng(0))
    # the first agent gets 2 (1 + 0.9 + 0.81). The second leaves with the first step and its reward 1; if the reward is
    # shared, 0.9 * 5 + 0.81 * 5 are added
    targets = learner.target_value(data)[data.index == 0]
    assert targets[0].tolist() == pytest.approx([5.42, second])


@pytest.mark.parametrize(("env", "individual"), [("dummy_envs:MaskedEnv", True), ("skirmish/3m", False)])
def test_replay_sums_rewards_of_alive_agents_only_if_they_are_individual(
    env: str, individual: bool, tmp_path: Path
) -> None:
    options = {"env__agents": 2} if individual else {}
    cfg = zx.config.load(algorithm="maddpg", env=env, replay__n_step=3, tensorboard=False, **options)
    session = zx.Session(cfg, tmp_path / "run", quiet=True)
    assert session.loop.buffer.view == NStep(3, cfg.gamma, alive_only=individual)
    session.close()


def test_continuous_targets_by_hand() -> None:
    learner = make_learner(CONTINUOUS)
    # inputs are [o1 o1 o2 o2 a1 a2]: Q_1 = 2 a1 + 4 a2, Q_2 = 10 a2
    set_towers(learner.target_critics, [[0.0] * 4 + [2.0, 4.0], [0.0] * 4 + [0.0, 10.0]], [[0.0], [0.0]])
    set_actor_outputs(learner.target_actor, [math.atanh(0.5)], [math.atanh(0.2)])
    data = batch(action=torch.zeros(3, 2, 1))
    # 2 * 0.5 + 4 * 0.2 = 1.8 and 10 * 0.2 = 2
    expected = torch.tensor([[1 + 1.62, -1 + 1.8], [1.0, -1.0], [1 + 1.62, -1 + 1.8]])
    assert torch.allclose(learner.target_value(data), expected)


def test_critic_loss_by_hand() -> None:
    learner = make_learner()
    set_critics(learner.critics)
    set_towers(learner.target_critics, [[0.0] * 10] * 2, [[0.0], [0.0]])
    # the targets are the rewards 1 and -1; Q-values of the actions are 1 + 20 and 100 - 21
    loss, error, q_mean = learner.critic_loss(batch())
    assert loss.item() == pytest.approx(20.0**2 + 80.0**2)
    assert error.tolist() == pytest.approx([50.0] * 3)  # mean of 20 and 80
    assert q_mean.item() == pytest.approx(50.0)
    weighted, _, _ = learner.critic_loss(batch(weight=torch.tensor([1.0, 0.5, 0.0])))
    assert weighted.item() == pytest.approx(6800.0 * 1.5 / 3)


def test_with_individual_rewards_the_critic_of_a_dead_agent_is_not_trained() -> None:
    learner = make_learner(INDIVIDUAL)
    set_critics(learner.critics)
    set_towers(learner.target_critics, [[0.0] * 10] * 2, [[0.0], [0.0]])
    alive = torch.tensor([[True, False]]).expand(3, 2)
    # Q_1 = 1, without the second agent's 20, equals its target
    loss, error, q_mean = learner.critic_loss(batch(alive=alive, next_alive=alive))
    assert loss.item() == 0.0
    assert error.tolist() == [0.0] * 3
    assert q_mean.item() == pytest.approx(1.0)


def test_with_shared_rewards_the_critic_of_a_dead_agent_is_trained_but_not_its_actor() -> None:
    learner = make_learner(SHARED)
    set_critics(learner.critics)
    set_towers(learner.target_critics, [[0.0] * 10] * 2, [[0.0], [0.0]])
    alive = torch.tensor([[True, False]]).expand(3, 2)
    # Q_1 = 1 and Q_2 = 100 - 1, targets 1 and -1
    loss, error, q_mean = learner.critic_loss(batch(alive=alive, next_alive=alive))
    assert loss.item() == pytest.approx(100.0**2)
    assert error.tolist() == pytest.approx([50.0] * 3)
    assert q_mean.item() == pytest.approx(50.0)
    actor_loss = learner.actor_loss(batch(alive=alive, next_alive=alive))
    (gradient,) = torch.autograd.grad(actor_loss, [learner.actor.towers.biases[0]])
    assert gradient[1].abs().sum() == 0


def test_default_output_penalty_is_that_of_the_authors_code() -> None:
    cfg = zx.config.load(algorithm="maddpg", env="mpe/simple_spread")
    assert cfg.output_penalty == 1e-3  # type: ignore[attr-defined]


@pytest.mark.parametrize("spaces", [INDIVIDUAL, dataclasses.replace(CONTINUOUS, alive=True)])
def test_agents_that_have_left_get_no_gradient(spaces: Spaces) -> None:
    learner = make_learner(spaces, net__hidden_sizes=[8], output_penalty=1e-2)
    alive = torch.tensor([[True, False]]).expand(3, 2)
    action = torch.tensor([[0, 1]]).expand(3, 2) if spaces is INDIVIDUAL else torch.zeros(3, 2, 1)
    data = batch(obs=torch.randn(3, 2, 2), action=action, alive=alive, next_alive=alive)
    for net, loss in ((learner.actor, learner.actor_loss(data)), (learner.critics, learner.critic_loss(data)[0])):
        for gradient in torch.autograd.grad(loss, list(net.parameters())):
            assert gradient[0].abs().sum() > 0
            assert gradient[1].abs().sum() == 0


def test_each_actor_maximizes_its_critic_given_the_other_actions_of_the_batch() -> None:
    learner = make_learner(CONTINUOUS, net__hidden_sizes=[])
    # Q_1 = 2 a1 + 4 a2, Q_2 = 7 a1 + 10 a2
    set_towers(learner.critics, [[0.0] * 4 + [2.0, 4.0], [0.0] * 4 + [7.0, 10.0]], [[0.0], [0.0]])
    set_actor_outputs(learner.actor, [0.0], [math.atanh(0.5)])
    action = torch.tensor([[[0.3], [-0.2]]]).expand(3, 2, 1)
    loss = learner.actor_loss(batch(action=action))
    # -(2 * 0 + 4 * -0.2) - (7 * 0.3 + 10 * 0.5)
    assert loss.item() == pytest.approx(0.8 - 7.1)
    (gradient,) = torch.autograd.grad(loss, [learner.actor.towers.biases[0]])
    # gradient of the outputs: -2 (1 - 0²) and -10 (1 - 0.5²), without effects on the other agent's critic
    assert gradient.flatten().tolist() == pytest.approx([-2.0, -7.5])


def test_output_penalty_is_on_the_squared_outputs_of_actors() -> None:
    learner = make_learner(output_penalty=0.5)
    set_towers(learner.critics, [[0.0] * 10] * 2, [[0.0], [0.0]])
    set_actor_outputs(learner.actor, [3.0, 0.0, 0.0], [0.0, 0.0, 0.0])
    assert learner.actor_loss(batch()).item() == pytest.approx(0.5 * 9 / 3)


def test_gumbel_softmax_samples_are_one_hot_with_the_gradient_of_the_softmax() -> None:
    learner = make_learner(gumbel_temperature=2.0)
    out = torch.tensor([1.0, 0.0, -1.0]).expand(4000, 2, 3).clone().requires_grad_()
    sample = learner.differentiable_action(out, None)
    assert torch.equal(sample.detach().round(), sample.detach().round().clamp(0, 1))
    assert torch.allclose(sample.detach().sum(-1), torch.ones(4000, 2))
    # softmax: e, 1 and 1/e divided by their sum 4.0862; three standard errors are 0.016
    frequencies = sample.detach().round().flatten(0, 1).mean(0)
    assert frequencies.tolist() == pytest.approx([0.6652, 0.2447, 0.0900], abs=0.016)
    (gradient,) = torch.autograd.grad(sample[..., 0].sum(), out)
    # p (1 - p) / 2 for the same logit, at most 1 / 8; probabilities sum to 1, so the other logits have the opposite
    assert gradient[..., 0].min() > 0
    assert gradient[..., 0].max() <= 0.125
    assert torch.allclose(gradient.sum(-1), torch.zeros(4000, 2), atol=1e-6)


def test_samples_ignore_invalid_actions() -> None:
    learner = make_learner()
    out = torch.tensor([0.0, 9.0, 0.0]).expand(2000, 2, 3).clone().requires_grad_()
    mask = torch.tensor([True, False, True]).expand(2000, 2, 3)
    sample = learner.differentiable_action(out, mask)
    assert sample[..., 1].abs().max() == 0
    assert sample[..., 0].mean().item() == pytest.approx(0.5, abs=0.03)
    (gradient,) = torch.autograd.grad((sample * torch.tensor([1.0, 5.0, 2.0])).sum(), out)
    assert gradient[..., 1].abs().max() == 0
    assert learner.greedy_action(out, mask)[0, 0].tolist() == [1.0, 0.0, 0.0]


def action_fractions(learner: MADDPG, phase: Phase, mask: Tensor | None = None) -> list[list[float]]:
    """Return how often the policy of each agent takes each action."""
    rng = torch.Generator().manual_seed(0)
    mask = None if mask is None else mask.expand(20_000, 2, 3)
    action = learner.policy.act(torch.zeros(20_000, 2, 2), None, mask, phase, rng, 0).action
    return [(action[:, i].bincount(minlength=3) / 20_000).tolist() for i in range(2)]


def test_policy_samples_while_collecting_and_takes_the_mode_in_evaluations() -> None:
    learner = make_learner()
    set_actor_outputs(learner.actor, [0.0, math.log(2.0), 0.0], [math.log(8.0), 0.0, 0.0])
    collected = action_fractions(learner, Phase.COLLECT)  # three standard errors are 0.011
    assert collected[0] == pytest.approx([0.25, 0.5, 0.25], abs=0.011)
    assert collected[1] == pytest.approx([0.8, 0.1, 0.1], abs=0.011)
    assert action_fractions(learner, Phase.RANDOM)[1] == pytest.approx([1 / 3] * 3, abs=0.011)
    assert action_fractions(learner, Phase.EVAL) == [[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]]


def test_invalid_actions_are_never_taken() -> None:
    learner = make_learner()
    set_actor_outputs(learner.actor, [0.0, 9.0, 1.0], [9.0, 0.0, 0.0])
    mask = torch.tensor([[True, False, True], [False, True, True]])
    for phase in Phase:
        first, second = action_fractions(learner, phase, mask)
        assert first[1] == second[0] == 0.0
    assert action_fractions(learner, Phase.EVAL, mask)[0] == [0.0, 0.0, 1.0]


def test_continuous_actions_have_noise_only_while_collecting() -> None:
    learner = make_learner(CONTINUOUS, exploration_noise=0.2)
    set_actor_outputs(learner.actor, [0.0], [9.0])
    rng, obs = torch.Generator().manual_seed(0), torch.zeros(20_000, 2, 2)
    action = learner.policy.act(obs, None, None, Phase.EVAL, rng, 0).action
    assert action[0].flatten().tolist() == pytest.approx([0.0, 1.0], abs=1e-6)
    action = learner.policy.act(obs, None, None, Phase.COLLECT, rng, 0).action
    assert action[:, 0].std().item() == pytest.approx(0.2, rel=0.03)
    assert action.abs().max() <= 1.0
    action = learner.policy.act(obs, None, None, Phase.RANDOM, rng, 0).action
    assert action[:, 1].std().item() == pytest.approx(3**-0.5, rel=0.03)


def test_agents_have_separate_weights() -> None:
    learner = make_learner(net__hidden_sizes=[8])
    out = learner.actor(torch.ones(1, 2, 2))
    assert not torch.equal(out[0, 0], out[0, 1])
    # an agent's observation affects the other agent's critic, but not its actor
    obs = torch.ones(1, 2, 2)
    obs[0, 1] = 2.0
    assert torch.equal(learner.actor(obs)[0, 0], out[0, 0])
    action = torch.zeros(1, 2, 3)
    assert not torch.equal(learner.critics(obs, action)[0, 0], learner.critics(torch.ones(1, 2, 2), action)[0, 0])


def test_target_networks_are_polyak_averaged() -> None:
    learner = make_learner(tau=0.1, net__hidden_sizes=[8])
    pairs = [(learner.target_actor, learner.actor), (learner.target_critics, learner.critics)]
    before = [copy_weights(target) for target, _ in pairs]
    learner.update(batch())
    for (target, net), start in zip(pairs, before, strict=True):
        check_polyak_update(target, start, net, tau=0.1)


def test_dict_observations_are_encoded_for_each_agent() -> None:
    spaces = Spaces(Dict({"position": Discrete(3), "velocity": OBS}), Discrete(3), num_agents=2)
    learner = make_learner(spaces)
    obs = {"position": torch.tensor([[0, 2]]), "velocity": torch.tensor([[[1.0, 2.0], [3.0, 4.0]]])}
    # one-hot positions and unchanged velocities of each agent
    expected = [[[1.0, 0.0, 0.0, 1.0, 2.0], [0.0, 0.0, 1.0, 3.0, 4.0]]]
    assert learner.actor.features(obs).tolist() == expected


def test_actors_critics_and_targets_normalize_observations() -> None:
    learner = make_learner(normalize_obs=True)
    learner.update_normalizers(Batch(obs=torch.tensor([[[[1.0, 0.0], [3.0, 4.0]]]])))
    # means 2 and 2, stds 1 and 2, over both agents
    for net in (learner.actor, learner.critics, learner.target_actor, learner.target_critics):
        features = net.features(torch.tensor([[[2.0, 0.0], [3.0, 4.0]]]))
        assert torch.allclose(features, torch.tensor([[[0.0, -1.0], [1.0, 1.0]]]), atol=1e-5)


def test_value_is_that_of_the_greedy_actions() -> None:
    learner = make_learner()
    set_critics(learner.critics)
    set_actor_outputs(learner.actor, [0.0, 0.0, 5.0], [1.0, 0.0, 0.0])
    assert learner.value(torch.zeros(2, 2, 2)).tolist() == [[13.0, 87.0]] * 2


def test_unsupported_settings_and_spaces_are_rejected() -> None:
    for space in (MultiDiscrete([2, 2]), Box(-np.inf, np.inf, (1,), np.float32)):
        with pytest.raises(UserError, match="maddpg needs continuous actions in a bounded one-dimensional Box"):
            make_learner(Spaces(OBS, space, num_agents=2))
    with pytest.raises(UserError, match=r"maddpg does not support recurrent networks: set net\.recurrent=none"):
        make_learner(net__recurrent="gru")
    with pytest.raises(UserError, match="maddpg needs an environment with several agents"):
        make_learner(Spaces(OBS, Discrete(3)))


def test_restored_learner_continues_identically() -> None:
    learner, other = make_learner(net__hidden_sizes=[8]), make_learner(net__hidden_sizes=[8], seed=9)
    learner.update(batch())
    other.load_state_dict(learner.state_dict())
    for _ in range(3):
        learner.update(batch())
        other.update(batch())
    for name in ("actor", "critics", "target_actor", "target_critics"):
        assert all_equal(copy_weights(getattr(learner, name)), copy_weights(getattr(other, name)))

"""MADDPG's targets by hand, its losses, its joint actions, and what those who have left don't do."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete
from probe import probe
from torch import Tensor, nn

import zhixing as zx
from zhixing.algorithms.maddpg import MADDPG
from zhixing.buffers import Buffer, NStep
from zhixing.core.batch import Batch
from zhixing.core.policy import Phase
from zhixing.core.spaces import Spaces
from zhixing.errors import UserError

OBS = Box(-9.0, 9.0, (2,), np.float32)
CHOICES = Spaces(OBS, Discrete(3), num_agents=2)
MOVES = Spaces(OBS, Box(-1.0, 1.0, (1,), np.float32), num_agents=2)
LEAVING = dataclasses.replace(CHOICES, alive=True)
TEAM = dataclasses.replace(LEAVING, reward_kind="shared")


def learner(spaces: Spaces = CHOICES, **settings: Any) -> MADDPG:
    base = {"net__hidden_sizes": [], "output_penalty": 0.0, "max_grad_norm": None}  # one linear layer each
    cfg = zx.config.load(algorithm="maddpg", env="toy/team-match", **(base | settings))
    made = zx.algorithms.get("maddpg").make(cfg, spaces)
    assert isinstance(made, MADDPG)
    return made


def put(net: Any, weight: list[list[float]], bias: list[list[float]]) -> None:
    """Let tower k of a single layer be weight[k] · x + bias[k]; a weight counts for every output."""
    with torch.no_grad():
        net.towers.weights[0].copy_(torch.tensor(weight).unsqueeze(-1).expand_as(net.towers.weights[0]))
        net.towers.biases[0].copy_(torch.tensor(bias).unsqueeze(1))


def acting(net: Any, first: list[float], second: list[float]) -> None:
    """The two actors say the same of every observation."""
    put(net, [[0.0, 0.0]] * 2, [first, second])


# critics of choices see [o1 o1 o2 o2 | 1 2 3 of agent one | 1 2 3 of agent two]; here they count actions alone:
# Q_1 = 1, 2, 3 for the first agent's action plus 10, 20, 30 for the second's; Q_2 = 100 minus that
WORTH = [0.0, 0.0, 0.0, 0.0, 1.0, 2.0, 3.0, 10.0, 20.0, 30.0]


def judging(net: Any) -> None:
    put(net, [WORTH, [-w for w in WORTH]], [[0.0], [100.0]])


def batch(**fields: Any) -> Batch:
    """Three equal steps: one that goes on, one that terminates, one that is truncated."""
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


def everybody(here: bool = True) -> Tensor:
    return torch.full((3, 2), here)


def weights(net: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in net.parameters()]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a, b, strict=True))


def test_targets_by_hand() -> None:
    made = learner()
    judging(made.target_critics)
    acting(made.target_actor, [0.0, 0.0, 5.0], [1.0, 0.0, 0.0])  # the third action, and the first
    acting(made.actor, [9.0, 0.0, 0.0], [0.0, 9.0, 0.0])  # not asked
    # Q'_1 = 3 + 10 = 13, Q'_2 = 100 - 13 = 87: 1 + 0.9 * 13 = 12.7 and -1 + 0.9 * 87 = 77.3; death leaves the rewards;
    # truncation bootstraps
    expected = torch.tensor([[12.7, 77.3], [1.0, -1.0], [12.7, 77.3]])
    assert torch.allclose(made.target_value(batch()), expected)


def test_targets_use_the_discount_of_their_steps() -> None:
    made = learner()
    judging(made.target_critics)
    acting(made.target_actor, [0.0, 0.0, 5.0], [1.0, 0.0, 0.0])
    shown = batch(discount=torch.tensor([0.5, 0.9, 0.1]))
    assert torch.allclose(made.target_value(shown)[:, 0], torch.tensor([1 + 6.5, 1.0, 1 + 1.3]))


def test_targets_never_come_from_a_forbidden_action() -> None:
    made = learner()
    judging(made.target_critics)
    acting(made.target_actor, [0.0, 1.0, 5.0], [1.0, 0.0, 0.0])
    allowed = torch.tensor([[[True, True, False], [False, False, True]]]).expand(3, 2, 3)
    # the first agent's second best, 2, and the only one that the second has, 30: 1 + 0.9 * 32
    shown = batch(mask=torch.ones(3, 2, 3, dtype=torch.bool), next_mask=allowed)
    assert made.target_value(shown)[0].tolist() == pytest.approx([29.8, -1 + 0.9 * 68])


def test_who_has_left_has_no_future_and_does_nothing_in_that_of_others() -> None:
    made = learner(LEAVING)
    judging(made.target_critics)
    acting(made.target_actor, [0.0, 0.0, 5.0], [1.0, 0.0, 0.0])
    left = torch.tensor([[True, False]]).expand(3, 2)
    # Q'_1 = 3 without the second agent's 10: 1 + 0.9 * 3; the second keeps its last reward
    found = made.target_value(batch(alive=everybody(), next_alive=left))
    assert torch.allclose(found, torch.tensor([[3.7, -1.0], [1.0, -1.0], [3.7, -1.0]]))


def test_a_shared_reward_has_a_future_for_who_has_left() -> None:
    made = learner(TEAM)
    judging(made.target_critics)
    acting(made.target_actor, [0.0, 0.0, 5.0], [1.0, 0.0, 0.0])
    left = torch.tensor([[True, False]]).expand(3, 2)
    # Q'_1 = 3 without the second agent's 10, Q'_2 = 100 - 3: -1 + 0.9 * 97; the episode's end is an end for both
    found = made.target_value(batch(alive=everybody(), next_alive=left))
    assert torch.allclose(found, torch.tensor([[3.7, 86.3], [1.0, -1.0], [3.7, 86.3]]))


@pytest.mark.parametrize(("spaces", "second"), [(LEAVING, 1.0), (TEAM, 9.55)])
def test_rewards_that_come_after_an_agents_end_are_not_added_over_several_steps(spaces: Spaces, second: float) -> None:
    made = learner(spaces, gamma=0.9)
    put(made.target_critics, [[0.0] * 10] * 2, [[100.0], [100.0]])
    buffer = Buffer(spaces.fields(), 8, view=NStep(3, 0.9, alive_only=spaces.individual_termination))
    for t, reward in enumerate(([2.0, 1.0], [2.0, 5.0], [2.0, 5.0])):
        step = {"obs": np.zeros((1, 2, 2), np.float32), "action": np.zeros((1, 2), np.int64)}
        ends = {"terminated": np.array([t == 2]), "truncated": np.array([False])}
        alive = {"alive": np.array([[True, t == 0]]), "next_alive": np.array([[True, False]])}
        buffer.add(Batch(**step, **ends, **alive, next_obs=step["obs"], reward=np.array([reward], np.float32)))
    shown = buffer.sample(64, np.random.default_rng(0))
    # three steps pay the first agent 2 (1 + 0.9 + 0.81). The second left by the first of them, which paid it 1; where
    # the team shares its reward, 0.9 * 5 + 0.81 * 5 follow
    targets = made.target_value(shown)[shown.index == 0]
    assert targets[0].tolist() == pytest.approx([5.42, second])


@pytest.mark.parametrize(("env", "alone"), [("dummy_envs:MaskedEnv", True), ("skirmish/3m", False)])
def test_the_replay_knows_whether_rewards_end_with_an_agent(env: str, alone: bool, tmp_path: Path) -> None:
    options = {"env__agents": 2} if alone else {}
    cfg = zx.config.load(algorithm="maddpg", env=env, replay__n_step=3, tensorboard=False, **options)
    session = zx.Session(cfg, tmp_path / "run", quiet=True)
    assert session.loop.buffer.view == NStep(3, cfg.gamma, alive_only=alone)
    session.close()


def test_continuous_targets_by_hand() -> None:
    made = learner(MOVES)
    # of [o1 o1 o2 o2 a1 a2]: Q_1 = 2 a1 + 4 a2, Q_2 = 10 a2
    put(made.target_critics, [[0.0] * 4 + [2.0, 4.0], [0.0] * 4 + [0.0, 10.0]], [[0.0], [0.0]])
    half, fifth = float(np.arctanh(0.5)), float(np.arctanh(0.2))
    acting(made.target_actor, [half], [fifth])  # before tanh
    shown = batch(action=torch.zeros(3, 2, 1))
    # 2 * 0.5 + 4 * 0.2 = 1.8 and 10 * 0.2 = 2
    expected = torch.tensor([[1 + 1.62, -1 + 1.8], [1.0, -1.0], [1 + 1.62, -1 + 1.8]])
    assert torch.allclose(made.target_value(shown), expected)


def test_critic_loss_by_hand() -> None:
    made = learner()
    judging(made.critics)
    put(made.target_critics, [[0.0] * 10] * 2, [[0.0], [0.0]])
    # targets are the rewards 1 and -1; the actions taken, first and second, are worth 1 + 20 and 100 - 21
    loss, error, q_mean = made.critic_loss(batch())
    assert loss.item() == pytest.approx(20.0**2 + 80.0**2)
    assert error.tolist() == pytest.approx([50.0] * 3)  # the mean of 20 and 80
    assert q_mean.item() == pytest.approx(50.0)
    weighted, _, _ = made.critic_loss(batch(weight=torch.tensor([1.0, 0.5, 0.0])))
    assert weighted.item() == pytest.approx(6800.0 * 1.5 / 3)


def test_critic_loss_leaves_out_who_has_left() -> None:
    made = learner(LEAVING)
    judging(made.critics)
    put(made.target_critics, [[0.0] * 10] * 2, [[0.0], [0.0]])
    alive = torch.tensor([[True, False]]).expand(3, 2)
    # the second agent's 20 isn't in Q_1 = 1 either: no error is left
    loss, error, q_mean = made.critic_loss(batch(alive=alive, next_alive=alive))
    assert loss.item() == 0.0
    assert error.tolist() == [0.0] * 3
    assert q_mean.item() == pytest.approx(1.0)


def test_critics_of_a_shared_reward_learn_of_who_has_left() -> None:
    made = learner(TEAM)
    judging(made.critics)
    put(made.target_critics, [[0.0] * 10] * 2, [[0.0], [0.0]])
    alive = torch.tensor([[True, False]]).expand(3, 2)
    # Q_1 = 1 and Q_2 = 100 - 1 against the rewards 1 and -1
    loss, error, q_mean = made.critic_loss(batch(alive=alive, next_alive=alive))
    assert loss.item() == pytest.approx(100.0**2)
    assert error.tolist() == pytest.approx([50.0] * 3)
    assert q_mean.item() == pytest.approx(50.0)
    # but its actor does nothing that could be better
    (gradient,) = torch.autograd.grad(
        made.actor_loss(batch(alive=alive, next_alive=alive)), [made.actor.towers.biases[0]]
    )
    assert gradient[1].abs().sum() == 0


def test_the_default_penalty_is_the_authors() -> None:
    cfg = zx.config.load(algorithm="maddpg", env="mpe/simple_spread")
    assert cfg.output_penalty == 1e-3  # type: ignore[attr-defined]


@pytest.mark.parametrize("spaces", [LEAVING, dataclasses.replace(MOVES, alive=True)])
def test_who_has_left_gets_no_gradient(spaces: Spaces) -> None:
    made = learner(spaces, net__hidden_sizes=[8], output_penalty=1e-2)
    alive = torch.tensor([[True, False]]).expand(3, 2)
    action = torch.tensor([[0, 1]]).expand(3, 2) if spaces is LEAVING else torch.zeros(3, 2, 1)
    shown = batch(obs=torch.randn(3, 2, 2), action=action, alive=alive, next_alive=alive)
    for net, loss in ((made.actor, made.actor_loss(shown)), (made.critics, made.critic_loss(shown)[0])):
        for gradient in torch.autograd.grad(loss, list(net.parameters())):
            assert gradient[0].abs().sum() > 0
            assert gradient[1].abs().sum() == 0


def test_each_actor_climbs_its_own_critic_with_the_others_actions_of_the_replay() -> None:
    made = learner(MOVES, net__hidden_sizes=[])
    # Q_1 = 2 a1 + 4 a2, Q_2 = 7 a1 + 10 a2
    put(made.critics, [[0.0] * 4 + [2.0, 4.0], [0.0] * 4 + [7.0, 10.0]], [[0.0], [0.0]])
    acting(made.actor, [0.0], [float(np.arctanh(0.5))])
    taken = torch.tensor([[[0.3], [-0.2]]]).expand(3, 2, 1)
    loss = made.actor_loss(batch(action=taken))
    # -(2 * 0 + 4 * -0.2) - (7 * 0.3 + 10 * 0.5)
    assert loss.item() == pytest.approx(0.8 - 7.1)
    (gradient,) = torch.autograd.grad(loss, [made.actor.towers.biases[0]])
    # by the outputs: -2 (1 - 0²) and -10 (1 - 0.5²); what agents do to each other's critics isn't in it
    assert gradient.flatten().tolist() == pytest.approx([-2.0, -7.5])


def test_the_penalty_is_on_the_actors_outputs() -> None:
    made = learner(output_penalty=0.5)
    put(made.critics, [[0.0] * 10] * 2, [[0.0], [0.0]])
    acting(made.actor, [3.0, 0.0, 0.0], [0.0, 0.0, 0.0])
    assert made.actor_loss(batch()).item() == pytest.approx(0.5 * 9 / 3)


def test_samples_are_one_hot_and_their_gradient_is_that_of_the_softmax() -> None:
    made = learner(gumbel_temperature=2.0)
    out = torch.tensor([1.0, 0.0, -1.0]).expand(4000, 2, 3).clone().requires_grad_()
    sample = made.differentiable_action(out, None)
    assert torch.equal(sample.detach().round(), sample.detach().round().clamp(0, 1))
    assert torch.allclose(sample.detach().sum(-1), torch.ones(4000, 2))
    # e, 1 and 1/e of their sum 4.0862; three standard errors are 0.016
    shares = sample.detach().round().flatten(0, 1).mean(0)
    assert shares.tolist() == pytest.approx([0.6652, 0.2447, 0.0900], abs=0.016)
    (gradient,) = torch.autograd.grad(sample[..., 0].sum(), out)
    # p (1 - p) / 2 for the own logit, never more than 1 / 8; probabilities add up to one, so the rest has its opposite
    assert gradient[..., 0].min() > 0
    assert gradient[..., 0].max() <= 0.125
    assert torch.allclose(gradient.sum(-1), torch.zeros(4000, 2), atol=1e-6)


def test_forbidden_actions_are_not_in_samples_and_get_no_gradient() -> None:
    made = learner()
    out = torch.tensor([0.0, 9.0, 0.0]).expand(2000, 2, 3).clone().requires_grad_()
    mask = torch.tensor([True, False, True]).expand(2000, 2, 3)
    sample = made.differentiable_action(out, mask)
    assert sample[..., 1].abs().max() == 0
    assert sample[..., 0].mean().item() == pytest.approx(0.5, abs=0.03)
    (gradient,) = torch.autograd.grad((sample * torch.tensor([1.0, 5.0, 2.0])).sum(), out)
    assert gradient[..., 1].abs().max() == 0
    assert made.greedy_action(out, mask)[0, 0].tolist() == [1.0, 0.0, 0.0]


def shares(made: MADDPG, phase: Phase, mask: Tensor | None = None) -> list[list[float]]:
    rng = torch.Generator().manual_seed(0)
    mask = None if mask is None else mask.expand(20_000, 2, 3)
    action = made.policy.act(torch.zeros(20_000, 2, 2), None, mask, phase, rng, 0).action
    return [(action[:, i].bincount(minlength=3) / 20_000).tolist() for i in range(2)]


def test_choices_are_drawn_while_collecting_and_the_likeliest_in_evaluations() -> None:
    made = learner()
    acting(made.actor, [0.0, float(np.log(2.0)), 0.0], [float(np.log(8.0)), 0.0, 0.0])
    collected = shares(made, Phase.COLLECT)  # three standard errors are 0.011
    assert collected[0] == pytest.approx([0.25, 0.5, 0.25], abs=0.011)
    assert collected[1] == pytest.approx([0.8, 0.1, 0.1], abs=0.011)
    assert shares(made, Phase.RANDOM)[1] == pytest.approx([1 / 3] * 3, abs=0.011)
    assert shares(made, Phase.EVAL) == [[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]]


def test_forbidden_actions_are_never_taken() -> None:
    made = learner()
    acting(made.actor, [0.0, 9.0, 1.0], [9.0, 0.0, 0.0])
    mask = torch.tensor([[True, False, True], [False, True, True]])
    for phase in Phase:
        first, second = shares(made, phase, mask)
        assert first[1] == second[0] == 0.0
    assert shares(made, Phase.EVAL, mask)[0] == [0.0, 0.0, 1.0]


def test_continuous_actions_have_noise_while_collecting_only() -> None:
    made = learner(MOVES, exploration_noise=0.2)
    acting(made.actor, [0.0], [9.0])
    rng, obs = torch.Generator().manual_seed(0), torch.zeros(20_000, 2, 2)
    best = made.policy.act(obs, None, None, Phase.EVAL, rng, 0).action
    assert best[0].flatten().tolist() == pytest.approx([0.0, 1.0], abs=1e-6)
    tried = made.policy.act(obs, None, None, Phase.COLLECT, rng, 0).action
    assert tried[:, 0].std().item() == pytest.approx(0.2, rel=0.03)
    assert tried.abs().max() <= 1.0
    assert made.policy.act(obs, None, None, Phase.RANDOM, rng, 0).action[:, 1].std().item() == pytest.approx(
        3**-0.5, rel=0.03
    )


def test_agents_have_weights_of_their_own() -> None:
    made = learner(net__hidden_sizes=[8])
    out = made.actor(torch.ones(1, 2, 2))
    assert not torch.equal(out[0, 0], out[0, 1])
    # what one sees is nothing to the other's actor, and something to its critic
    other = torch.ones(1, 2, 2)
    other[0, 1] = 2.0
    assert torch.equal(made.actor(other)[0, 0], out[0, 0])
    action = torch.zeros(1, 2, 3)
    assert not torch.equal(made.critics(other, action)[0, 0], made.critics(torch.ones(1, 2, 2), action)[0, 0])


def test_targets_follow_slowly() -> None:
    made = learner(tau=0.1, net__hidden_sizes=[8])
    pairs = [(made.target_actor, made.actor), (made.target_critics, made.critics)]
    before = [weights(target) for target, _ in pairs]
    made.update(batch())
    for (target, net), start in zip(pairs, before, strict=True):
        assert not same(weights(net), start)
        for now, then, new in zip(weights(target), start, weights(net), strict=True):
            assert torch.allclose(now, 0.9 * then + 0.1 * new, atol=1e-7)


def test_gradients_change_nothing() -> None:
    made = learner(net__hidden_sizes=[8])
    before = weights(made.actor) + weights(made.critics)
    probe(made, batch())
    assert same(before, weights(made.actor) + weights(made.critics))
    assert not any(p.requires_grad for p in (*made.target_actor.parameters(), *made.target_critics.parameters()))


def test_dict_observations_are_encoded_for_each_agent() -> None:
    spaces = Spaces(Dict({"place": Discrete(3), "speed": OBS}), Discrete(3), num_agents=2)
    made = learner(spaces)
    place, speed = torch.tensor([[0, 2]]), torch.tensor([[[1.0, 2.0], [3.0, 4.0]]])
    # one-hot and as it is, agent by agent
    expected = [[[1.0, 0.0, 0.0, 1.0, 2.0], [0.0, 0.0, 1.0, 3.0, 4.0]]]
    assert made.actor.features({"place": place, "speed": speed}).tolist() == expected


def test_normalised_observations_reach_actors_critics_and_their_targets() -> None:
    made = learner(normalize_obs=True)
    made.update_normalizers(Batch(obs=torch.tensor([[[[1.0, 0.0], [3.0, 4.0]]]])))
    # means 2 and 2, spreads 1 and 2, over both agents
    for net in (made.actor, made.critics, made.target_actor, made.target_critics):
        seen = net.features(torch.tensor([[[2.0, 0.0], [3.0, 4.0]]]))
        assert torch.allclose(seen, torch.tensor([[[0.0, -1.0], [1.0, 1.0]]]), atol=1e-5)


def test_value_is_that_of_what_the_actors_would_do() -> None:
    made = learner()
    judging(made.critics)
    acting(made.actor, [0.0, 0.0, 5.0], [1.0, 0.0, 0.0])
    assert made.value(torch.zeros(2, 2, 2)).tolist() == [[13.0, 87.0]] * 2


def test_what_it_cannot_do_is_refused_by_name() -> None:
    for space in (MultiDiscrete([2, 2]), Box(-np.inf, np.inf, (1,), np.float32)):
        with pytest.raises(UserError, match="maddpg needs continuous actions in a bounded one-dimensional Box"):
            learner(Spaces(OBS, space, num_agents=2))
    with pytest.raises(UserError, match=r"maddpg does not support recurrent networks: set net\.recurrent=none"):
        learner(net__recurrent="gru")
    with pytest.raises(UserError, match="maddpg needs an environment with several agents"):
        learner(Spaces(OBS, Discrete(3)))


def test_state_round_trip_gives_the_same_next_update() -> None:
    made, other = learner(net__hidden_sizes=[8]), learner(net__hidden_sizes=[8], seed=9)
    made.update(batch())
    other.load_state_dict(made.state_dict())
    for _ in range(3):
        made.update(batch())
        other.update(batch())
    for name in ("actor", "critics", "target_actor", "target_critics"):
        assert same(weights(getattr(made, name)), weights(getattr(other, name)))

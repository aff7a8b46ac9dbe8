"""REINFORCE's returns by hand, with and without a baseline, and which steps of a rollout are learned from."""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from by_hand import column, flag_at, named_weights
from gymnasium.spaces import Box, Dict, Discrete
from probe import probe
from torch import Tensor, nn

import zhixing as zx
from zhixing.algorithms.pg import PG
from zhixing.core.batch import Batch
from zhixing.core.spaces import Spaces
from zhixing.core.tree import tree_map
from zhixing.errors import UserError

OBS = Box(-99.0, 99.0, (1,), np.float32)
SPACES = Spaces(OBS, Discrete(3))
HALVES = [math.log(0.5), math.log(0.25), math.log(0.25)]  # logits of a policy with entropy 1.5 ln 2
ENTROPY = 1.5 * math.log(2)


def make_learner(plain: bool = True, spaces: Spaces = SPACES, **settings: Any) -> PG:
    """A `plain` one has no layers but its heads; its baseline says what is data, its actor likes the first action."""
    base = {"gamma": 0.5, "num_envs": 1, "max_grad_norm": None, "normalize_advantage": False}
    cfg = zx.config.load(algorithm="pg", env="Acrobot-v1", **(base | {"net__hidden_sizes": [8]} | settings))
    learner = PG(cfg, spaces, net=(lambda space: nn.Identity()) if plain else None)
    if plain:
        with torch.no_grad():
            learner.net.value_head.linear.weight.fill_(1.0)
            learner.net.policy_head.linear.weight.zero_()
            learner.net.policy_head.linear.bias.copy_(torch.tensor(HALVES))
    return learner


def rollout(**fields: Any) -> Batch:
    """Four steps from places worth 1, 2, 3, 4. What the second led to was worth 7, what the last led to 8."""
    never = torch.zeros(4, 1, dtype=torch.bool)
    base = {
        "obs": column(1.0, 2.0, 3.0, 4.0)[..., None],
        "next_obs": column(2.0, 7.0, 4.0, 8.0)[..., None],
        "action": torch.tensor([[0], [1], [0], [1]]),
        "reward": column(1.0, 2.0, 3.0, 4.0),
        "value": column(1.0, 2.0, 3.0, 4.0),
        "logp": column(0.0, 0.0, 0.0, 0.0),
        "terminated": never,
        "truncated": never,
    }
    return Batch(**{**base, **fields})


def returns(learner: PG, **fields: Any) -> tuple[list[float], list[bool]]:
    ret, known = learner.returns(rollout(**fields))
    return ret.flatten().tolist(), known.flatten().tolist()


def prepared(learner: PG, data: Batch) -> Batch:
    """What an update hands to the losses."""
    with mock.patch.object(learner, "gradient_step", wraps=learner.gradient_step) as losses:
        learner.update(data)
    return losses.call_args.args[0]


def by_parameter(learner: PG) -> dict[str, Tensor]:
    """What `gradients` result last, by parameter."""
    result = dict(zip(learner.optimizer.parameters, learner.optimizer._gradient_views, strict=True))
    return {name: result[parameter].clone() for name, parameter in learner.net.named_parameters()}


# --- returns ---


def test_returns_with_a_baseline_go_on_with_its_value_where_an_episode_is_cut() -> None:
    # the rollout's end: 4 + 0.5 * 8 = 8; 3 + 4 = 7; 2 + 3.5 = 5.5; 1 + 2.75
    assert returns(make_learner()) == (pytest.approx([3.75, 5.5, 7.0, 8.0]), [True] * 4)
    # truncated: 2 + 0.5 * 7 = 5.5 from what it really led to; the next episode's rewards don't enter: 1 + 2.75
    ret, known = returns(make_learner(), truncated=flag_at(1, length=4), reward=column(1.0, 2.0, 50.0, 4.0))
    assert ret == pytest.approx([3.75, 5.5, 54.0, 8.0])
    assert known == [True] * 4


def test_returns_end_with_death() -> None:
    # 2; 1 + 1
    for baseline in (True, False):
        ret, _ = returns(make_learner(baseline=baseline), terminated=flag_at(1, 3, length=4))
        assert ret == pytest.approx([2.0, 2.0, 5.0, 4.0])


def test_returns_with_a_baseline_dont_depend_on_it_within_an_episode() -> None:
    learner = make_learner()
    plain, _ = returns(learner, terminated=flag_at(3, length=4))
    other, _ = returns(learner, terminated=flag_at(3, length=4), value=column(5.0, -3.0, 20.0, 0.0))
    # 4; 3 + 2; 2 + 2.5; 1 + 2.25
    assert plain == pytest.approx([3.25, 4.5, 5.0, 4.0])
    assert other == pytest.approx(plain)


def test_without_a_baseline_steps_that_no_end_follows_are_unknown() -> None:
    ret, known = returns(make_learner(baseline=False), terminated=flag_at(1, length=4))
    assert ret[:2] == pytest.approx([2.0, 2.0])
    assert known == [True, True, False, False]
    assert returns(make_learner(baseline=False))[1] == [False] * 4
    assert returns(make_learner(baseline=False), truncated=flag_at(3, length=4))[1] == [True] * 4


def test_without_a_baseline_a_truncated_return_is_what_was_paid() -> None:
    # 2, not 2 + 0.5 * 7; 1 + 1; the next episode, to its end: 3 + 2, 4
    ret, known = returns(make_learner(baseline=False), truncated=flag_at(1, length=4), terminated=flag_at(3, length=4))
    assert ret == pytest.approx([2.0, 2.0, 5.0, 4.0])
    assert known == [True] * 4


def test_ends_are_each_environments_own() -> None:
    learner = make_learner(baseline=False, num_envs=2)
    _, known = learner.returns(
        Batch.cat([rollout(terminated=flag_at(2, length=4)), rollout(terminated=flag_at(0, length=4))], 1)
    )
    assert known.tolist() == [[True, True], [True, False], [True, False], [False, False]]


# --- losses ---


def losses(**fields: Any) -> Batch:
    """Returns 4 and 1 are known, 100 isn't; the baseline said 1, 2 and 3."""
    base = {
        "obs": column(1.0, 2.0, 3.0)[..., None],
        "value": column(1.0, 2.0, 3.0),
        "action": torch.tensor([[0], [1], [2]]),
        "returns": column(4.0, 1.0, 100.0),
        "known": column(True, True, False),
    }
    return Batch(**{**base, **fields})


def test_losses_without_a_baseline_by_hand() -> None:
    learner = make_learner(baseline=False)
    told = probe(learner, losses(), "gradient_step").metrics
    # -(4 ln 0.5 + ln 0.25) / 2
    assert told["policy_loss"].item() == pytest.approx(3 * math.log(2))
    assert told["entropy"].item() == pytest.approx(ENTROPY)
    # by the logits: the mean of -G (1{a} - p) over the known two
    p = np.array([0.5, 0.25, 0.25])
    expected = -(4 * (np.array([1.0, 0.0, 0.0]) - p) + (np.array([0.0, 1.0, 0.0]) - p)) / 2
    assert by_parameter(learner)["policy_head.linear.bias"].tolist() == pytest.approx(expected.tolist(), abs=1e-6)


def test_losses_with_a_baseline_by_hand() -> None:
    learner = make_learner(value_coef=0.5)
    told = probe(
        learner, losses(known=column(True, True, True), returns=column(4.0, 1.0, 3.0)), "gradient_step"
    ).metrics
    # advantages 3, -1, 0: -(3 ln 0.5 - ln 0.25) / 3; errors of the baseline -3, 1, 0
    assert told["policy_loss"].item() == pytest.approx(math.log(2) / 3)
    assert told["value_loss"].item() == pytest.approx(10 / 3)
    # by its bias: half of 2 (-3 + 1) / 3
    assert by_parameter(learner)["value_head.linear.bias"].item() == pytest.approx(-2 / 3)


def test_the_baseline_is_what_was_noted_and_has_no_gradient_of_the_policys_loss() -> None:
    learner = make_learner(value_coef=0.0)
    told = probe(learner, losses(known=column(True, True, True), value=column(4.0, 1.0, 99.0)), "gradient_step").metrics
    # advantages 0, 0, 1: -ln 0.25 / 3
    assert told["policy_loss"].item() == pytest.approx(2 / 3 * math.log(2))
    assert by_parameter(learner)["value_head.linear.bias"].item() == 0.0


def test_without_a_baseline_the_critic_learns_nothing() -> None:
    learner = make_learner(plain=False, baseline=False, lr=1e-2)
    before = named_weights(learner.net)
    learner.update(rollout(terminated=flag_at(3, length=4)))
    after = named_weights(learner.net)
    moved = {name for name in after if not torch.equal(after[name], before[name])}
    assert "policy_head.linear.bias" in moved
    assert not any(name.startswith("value_head") for name in moved)
    assert torch.equal(after["towers.weights.0"][1], before["towers.weights.0"][1])
    assert not torch.equal(after["towers.weights.0"][0], before["towers.weights.0"][0])
    assert learner.value(torch.zeros(1, 1)) is None
    value = make_learner().value(torch.tensor([[4.0]]))
    assert value is not None
    assert value.tolist() == [4.0]


def test_an_unknown_step_changes_nothing() -> None:
    learner = make_learner(baseline=False, normalize_advantage=True)
    result = probe(learner, losses(), "gradient_step").gradients["optimizer"][0].clone()
    for changed in ({"returns": column(4.0, 1.0, -7.0)}, {"action": torch.tensor([[0], [1], [0]])}):
        assert torch.equal(probe(learner, losses(**changed), "gradient_step").gradients["optimizer"][0], result)


def test_entropy_is_weighed() -> None:
    learner = make_learner(baseline=False, entropy_coef=0.3)
    probe(learner, losses(returns=column(0.0, 0.0, 0.0)), "gradient_step")
    p = np.array([0.5, 0.25, 0.25])
    # the entropy's gradient by the logits is -p (ln p + H)
    expected = 0.3 * p * (np.log(p) + ENTROPY)
    assert by_parameter(learner)["policy_head.linear.bias"].tolist() == pytest.approx(expected.tolist(), abs=1e-6)


def test_normalised_returns_count_the_known_only() -> None:
    learner = make_learner(baseline=False, normalize_advantage=True)
    told = probe(learner, losses(returns=column(4.0, 1.0, 1e6)), "gradient_step").metrics
    # mean 2.5, spread 1.5: 1 and -1, so -(ln 0.5 - ln 0.25) / 2
    assert told["policy_loss"].item() == pytest.approx(-math.log(2) / 2, rel=1e-5)


def test_normalised_advantages_are_returns_less_the_baseline() -> None:
    learner = make_learner(normalize_advantage=True)
    told = probe(
        learner, losses(known=column(True, True, True), returns=column(4.0, 5.0, 12.0)), "gradient_step"
    ).metrics
    # 3, 3, 9: mean 5, spread √((4 + 4 + 16) / 3) = √8: -(-2 ln 0.5 - 2 ln 0.25 + 4 ln 0.25) / 3 / √8
    assert told["policy_loss"].item() == pytest.approx(2 / 3 * math.log(2) / 8**0.5, rel=1e-5)


def test_a_rollout_of_which_nothing_is_known_moves_nothing() -> None:
    for normalise in (True, False):
        learner = make_learner(baseline=False, normalize_advantage=normalise)
        before = named_weights(learner.net)
        told = learner.update(rollout())
        assert told.metrics["policy_loss"].item() == 0.0
        assert all(torch.equal(p, before[name]) for name, p in named_weights(learner.net).items())
        assert learner.skipped_steps() == 0


def test_better_returns_become_likelier() -> None:
    learner = make_learner(baseline=False, normalize_advantage=True, lr=1e-3)
    learner.update(rollout(terminated=flag_at(0, 1, 2, 3, length=4), reward=column(0.0, 1.0, 0.0, 1.0)))
    chances = learner.net(torch.zeros(1, 1)).distribution.logp.exp()[0]
    assert chances[1].item() > 0.25
    assert chances[0].item() < 0.5


# --- updates ---


def test_an_update_hands_over_returns_and_what_is_known() -> None:
    learner = make_learner(baseline=False)
    mask = torch.tensor([True, True, False]).expand(4, 1, 3)
    data = prepared(learner, rollout(terminated=flag_at(1, length=4), mask=mask))
    assert data.returns[:2].flatten().tolist() == pytest.approx([2.0, 2.0])
    assert data.known.flatten().tolist() == [True, True, False, False]
    assert torch.equal(data.mask, mask)
    assert learner.updates == 1


def test_a_forbidden_action_gets_no_gradient() -> None:
    learner = make_learner(baseline=False, entropy_coef=0.1)
    mask = torch.tensor([True, True, False]).expand(3, 1, 3)
    told = probe(learner, losses(mask=mask), "gradient_step").metrics
    # probabilities 2/3 and 1/3: -(4 ln(2/3) + ln(1/3)) / 2; the third step, unknown, was forbidden too
    assert told["policy_loss"].item() == pytest.approx(-2 * math.log(2 / 3) - 0.5 * math.log(1 / 3), rel=1e-5)
    assert by_parameter(learner)["policy_head.linear.bias"][2].item() == 0.0


def test_gradients_are_clipped_to_the_norm() -> None:
    learner = make_learner(max_grad_norm=0.01)
    norm = learner.update(rollout()).metrics["grad_norm"].item()
    assert norm > 0.01  # what is told is the norm before clipping
    # Adam's first moment is a tenth of what it was given
    assert learner.optimizer.first_moment[0].norm().item() == pytest.approx(0.1 * 0.01, rel=1e-3)


@pytest.mark.parametrize("baseline", [True, False])
@pytest.mark.parametrize("kind", ["gru", "lstm"])
def test_recurrent_gradients_are_those_of_stepping_through_the_rollout(kind: str, baseline: bool) -> None:
    settings = {"net__recurrent": kind, "net__recurrent_size": 4, "num_envs": 2, "baseline": baseline}
    learner = make_learner(plain=False, **settings)
    T, N, rng = 4, 2, torch.Generator().manual_seed(0)
    obs = torch.randn(T, N, 1, generator=rng)
    # the first environment's memory is cleared after its second step; both episodes end with the rollout
    ended = torch.tensor([[False, False], [True, False], [False, False], [True, True]])
    with torch.no_grad():  # some memory of what was before the rollout
        hidden = learner.net(torch.randn(N, 1, generator=rng)).hidden
    memories, actions, logps, values = [], [], [], []
    for t in range(T):
        memories.append(tree_map(torch.Tensor.detach, hidden))
        out = learner.net(obs[t], hidden)
        actions.append(out.distribution.sample(rng))
        logps.append(out.distribution.log_prob(actions[-1]))
        values.append(out.value)
        keep = (~ended[t]).float()[:, None]
        hidden = tree_map(lambda leaf, keep=keep: leaf * keep, out.hidden)
    logp, value = torch.stack(logps), torch.stack(values)
    reward = torch.randn(T, N, generator=rng)
    data = Batch(
        obs=obs,
        next_obs=torch.zeros(T, N, 1),
        action=torch.stack(actions),
        hidden=tree_map(lambda *steps: torch.stack(steps), *memories),
        reward=reward,
        value=value.detach(),
        terminated=ended,
        truncated=torch.zeros(T, N, dtype=torch.bool),
    )
    ret, later = torch.zeros(T, N), torch.zeros(N)
    for t in reversed(range(T)):
        later = ret[t] = reward[t] + 0.5 * later * ~ended[t]
    loss = -(logp * (ret - value.detach() if baseline else ret)).mean()
    if baseline:
        loss = loss + 0.5 * (value - ret).square().mean()
    expected = learner.optimizer.compute_gradients(loss)[0].clone()
    data = prepared(learner, data)
    assert torch.allclose(data.returns, ret, atol=1e-6)
    fresh = make_learner(plain=False, **settings)  # the update has moved the other
    assert torch.allclose(probe(fresh, data, "gradient_step").gradients["optimizer"][0], expected, atol=1e-6)


# --- rejected settings, state and metrics ---


def test_what_it_cannot_do_is_refused() -> None:
    with pytest.raises(UserError, match=r"action space .* is not supported; use Discrete, MultiDiscrete or a"):
        make_learner(spaces=Spaces(OBS, Dict({"a": Discrete(2)})))
    with pytest.raises(UserError, match="pg needs an environment with one agent"):
        make_learner(spaces=Spaces(OBS, Discrete(3), num_agents=2))


def test_restored_learner_continues_identically() -> None:
    learner, other = make_learner(plain=False), make_learner(plain=False, seed=9)
    learner.update(rollout())
    other.load_state_dict(learner.state_dict())
    for _ in range(2):
        first, second = learner.update(rollout()), other.update(rollout())
        assert all(torch.equal(first.metrics[name], second.metrics[name]) for name in first.metrics)
    assert all(torch.equal(p, named_weights(other.net)[name]) for name, p in named_weights(learner.net).items())


def test_update_returns_exactly_the_declared_metrics() -> None:
    for baseline in (True, False):
        assert set(make_learner(baseline=baseline).update(rollout()).metrics) == set(PG.metrics)

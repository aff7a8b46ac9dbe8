"""Returns and losses of REINFORCE with and without a baseline, with numbers worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from by_hand import ENTROPY, LOGITS, column, flag_at, named_weights
from gymnasium.spaces import Box, Discrete, Text
from probe import gradient_step_data, named_gradients, probe
from torch import nn

import zhixing as zx
from zhixing.algorithms.pg import PG
from zhixing.core.batch import Batch
from zhixing.core.spaces import Spaces
from zhixing.core.tree import tree_map
from zhixing.errors import UserError

OBS = Box(-99.0, 99.0, (1,), np.float32)
SPACES = Spaces(OBS, Discrete(3))


def make_learner(plain: bool = True, spaces: Spaces = SPACES, **settings: Any) -> PG:
    """Return a learner. If `plain`, it has no hidden layers, the observation as value, and the policy of `LOGITS`."""
    base = {"gamma": 0.5, "num_envs": 1, "max_grad_norm": None, "normalize_advantage": False}
    cfg = zx.config.load(algorithm="pg", env="Acrobot-v1", **(base | {"net__hidden_sizes": [8]} | settings))
    learner = PG(cfg, spaces, net=(lambda space: nn.Identity()) if plain else None)
    if plain:
        with torch.no_grad():
            learner.net.value_head.linear.weight.fill_(1.0)
            learner.net.policy_head.linear.weight.zero_()
            learner.net.policy_head.linear.bias.copy_(torch.tensor(LOGITS))
    return learner


def rollout(**fields: Any) -> Batch:
    """Return four steps in states with values 1 to 4. The next state of the second has value 7, of the last 8."""
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


# --- returns ---


def test_returns_with_a_baseline_bootstrap_from_it() -> None:
    # end of the rollout: 4 + 0.5 * 8 = 8; before that 3 + 4 = 7; 2 + 3.5 = 5.5; 1 + 2.75
    assert returns(make_learner()) == (pytest.approx([3.75, 5.5, 7.0, 8.0]), [True] * 4)
    # truncated: 2 + 0.5 * 7 = 5.5, from the final observation and without rewards of the next episode; 1 + 2.75
    ret, known = returns(make_learner(), truncated=flag_at(1, length=4), reward=column(1.0, 2.0, 50.0, 4.0))
    assert ret == pytest.approx([3.75, 5.5, 54.0, 8.0])
    assert known == [True] * 4


def test_termination_stops_bootstrapping() -> None:
    # terminated: 2; before that 1 + 1
    for baseline in (True, False):
        ret, _ = returns(make_learner(baseline=baseline), terminated=flag_at(1, 3, length=4))
        assert ret == pytest.approx([2.0, 2.0, 5.0, 4.0])


def test_returns_of_complete_episodes_do_not_depend_on_the_baseline() -> None:
    learner = make_learner()
    first, _ = returns(learner, terminated=flag_at(3, length=4))
    second, _ = returns(learner, terminated=flag_at(3, length=4), value=column(5.0, -3.0, 20.0, 0.0))
    # 4; 3 + 2; 2 + 2.5; 1 + 2.25
    assert first == pytest.approx([3.25, 4.5, 5.0, 4.0])
    assert second == pytest.approx(first)


def test_returns_without_a_baseline_are_unknown_unless_the_episode_ends() -> None:
    ret, known = returns(make_learner(baseline=False), terminated=flag_at(1, length=4))
    assert ret[:2] == pytest.approx([2.0, 2.0])
    assert known == [True, True, False, False]
    assert returns(make_learner(baseline=False))[1] == [False] * 4
    assert returns(make_learner(baseline=False), truncated=flag_at(3, length=4))[1] == [True] * 4


def test_truncated_returns_without_a_baseline_are_sums_of_rewards() -> None:
    # truncated: 2, not 2 + 0.5 * 7; before that 1 + 1; the next episode: 3 + 2, 4
    ret, known = returns(make_learner(baseline=False), truncated=flag_at(1, length=4), terminated=flag_at(3, length=4))
    assert ret == pytest.approx([2.0, 2.0, 5.0, 4.0])
    assert known == [True] * 4


def test_environments_are_independent() -> None:
    learner = make_learner(baseline=False, num_envs=2)
    rollouts = [rollout(terminated=flag_at(t, length=4)) for t in (2, 0)]
    _, known = learner.returns(Batch.cat(rollouts, 1))
    assert known.tolist() == [[True, True], [True, False], [True, False], [False, False]]


# --- losses ---


def losses(**fields: Any) -> Batch:
    """Return three steps with the known returns 4 and 1, the unknown return 100 and the baselines 1, 2 and 3."""
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
    metrics = probe(learner, losses(), "gradient_step").metrics
    # -(4 ln 0.5 + ln 0.25) / 2
    assert metrics["policy_loss"].item() == pytest.approx(3 * math.log(2))
    assert metrics["entropy"].item() == pytest.approx(ENTROPY)
    # gradient of the logits: the mean of -G (1{a} - p) over the two known steps
    p = np.array([0.5, 0.25, 0.25])
    expected = -(4 * (np.array([1.0, 0.0, 0.0]) - p) + (np.array([0.0, 1.0, 0.0]) - p)) / 2
    assert named_gradients(learner.net, learner.optimizer)["policy_head.linear.bias"].tolist() == pytest.approx(
        expected.tolist(), abs=1e-6
    )


def test_losses_with_a_baseline_by_hand() -> None:
    learner = make_learner(value_coef=0.5)
    metrics = probe(
        learner, losses(known=column(True, True, True), returns=column(4.0, 1.0, 3.0)), "gradient_step"
    ).metrics
    # advantages 3, -1, 0: -(3 ln 0.5 - ln 0.25) / 3; value errors -3, 1, 0
    assert metrics["policy_loss"].item() == pytest.approx(math.log(2) / 3)
    assert metrics["value_loss"].item() == pytest.approx(10 / 3)
    # gradient of the value's bias: half of 2 (-3 + 1) / 3
    assert named_gradients(learner.net, learner.optimizer)["value_head.linear.bias"].item() == pytest.approx(-2 / 3)


def test_baseline_is_the_stored_value_and_gets_no_gradient_of_the_policy_loss() -> None:
    learner = make_learner(value_coef=0.0)
    metrics = probe(
        learner, losses(known=column(True, True, True), value=column(4.0, 1.0, 99.0)), "gradient_step"
    ).metrics
    # advantages 0, 0, 1: -ln 0.25 / 3
    assert metrics["policy_loss"].item() == pytest.approx(2 / 3 * math.log(2))
    assert named_gradients(learner.net, learner.optimizer)["value_head.linear.bias"].item() == 0.0


def test_without_a_baseline_the_critic_is_not_trained() -> None:
    learner = make_learner(plain=False, baseline=False, lr=1e-2)
    before = named_weights(learner.net)
    learner.update(rollout(terminated=flag_at(3, length=4)))
    after = named_weights(learner.net)
    changed = {name for name in after if not torch.equal(after[name], before[name])}
    assert "policy_head.linear.bias" in changed
    assert not any(name.startswith("value_head") for name in changed)
    assert torch.equal(after["towers.weights.0"][1], before["towers.weights.0"][1])
    assert not torch.equal(after["towers.weights.0"][0], before["towers.weights.0"][0])
    assert learner.value(torch.zeros(1, 1)) is None
    value = make_learner().value(torch.tensor([[4.0]]))
    assert value is not None
    assert value.tolist() == [4.0]


def test_unknown_steps_have_no_effect() -> None:
    learner = make_learner(baseline=False, normalize_advantage=True)
    expected = probe(learner, losses(), "gradient_step").gradients["optimizer"][0]
    for fields in ({"returns": column(4.0, 1.0, -7.0)}, {"action": torch.tensor([[0], [1], [0]])}):
        assert torch.equal(probe(learner, losses(**fields), "gradient_step").gradients["optimizer"][0], expected)


def test_entropy_coef_is_the_weight_of_the_entropy() -> None:
    learner = make_learner(baseline=False, entropy_coef=0.3)
    probe(learner, losses(returns=column(0.0, 0.0, 0.0)), "gradient_step")
    p = np.array([0.5, 0.25, 0.25])
    # gradient of the entropy with respect to logits: -p (ln p + H)
    expected = 0.3 * p * (np.log(p) + ENTROPY)
    assert named_gradients(learner.net, learner.optimizer)["policy_head.linear.bias"].tolist() == pytest.approx(
        expected.tolist(), abs=1e-6
    )


def test_normalization_uses_only_known_returns() -> None:
    learner = make_learner(baseline=False, normalize_advantage=True)
    metrics = probe(learner, losses(returns=column(4.0, 1.0, 1e6)), "gradient_step").metrics
    # mean 2.5, std 1.5: 1 and -1, so -(ln 0.5 - ln 0.25) / 2
    assert metrics["policy_loss"].item() == pytest.approx(-math.log(2) / 2, rel=1e-5)


def test_advantages_are_normalized_after_the_baseline_is_subtracted() -> None:
    learner = make_learner(normalize_advantage=True)
    metrics = probe(
        learner, losses(known=column(True, True, True), returns=column(4.0, 5.0, 12.0)), "gradient_step"
    ).metrics
    # advantages 3, 3, 9: mean 5, std √((4 + 4 + 16) / 3) = √8: -(-2 ln 0.5 - 2 ln 0.25 + 4 ln 0.25) / 3 / √8
    assert metrics["policy_loss"].item() == pytest.approx(2 / 3 * math.log(2) / 8**0.5, rel=1e-5)


def test_rollout_without_known_returns_changes_no_weights() -> None:
    for normalize in (True, False):
        learner = make_learner(baseline=False, normalize_advantage=normalize)
        before = named_weights(learner.net)
        update = learner.update(rollout())
        assert update.metrics["policy_loss"].item() == 0.0
        assert all(torch.equal(p, before[name]) for name, p in named_weights(learner.net).items())
        assert learner.skipped_steps() == 0


def test_actions_with_better_returns_become_more_likely() -> None:
    learner = make_learner(baseline=False, normalize_advantage=True, lr=1e-3)
    learner.update(rollout(terminated=flag_at(0, 1, 2, 3, length=4), reward=column(0.0, 1.0, 0.0, 1.0)))
    probabilities = learner.net(torch.zeros(1, 1)).distribution.logp.exp()[0]
    assert probabilities[1].item() > 0.25
    assert probabilities[0].item() < 0.5


# --- updates ---


def test_update_passes_returns_known_flags_and_masks_to_the_gradient_step() -> None:
    learner = make_learner(baseline=False)
    mask = torch.tensor([True, True, False]).expand(4, 1, 3)
    data = gradient_step_data(learner, rollout(terminated=flag_at(1, length=4), mask=mask))
    assert data.returns[:2].flatten().tolist() == pytest.approx([2.0, 2.0])
    assert data.known.flatten().tolist() == [True, True, False, False]
    assert torch.equal(data.mask, mask)
    assert learner.updates == 1


def test_invalid_actions_get_no_gradient() -> None:
    learner = make_learner(baseline=False, entropy_coef=0.1)
    mask = torch.tensor([True, True, False]).expand(3, 1, 3)
    metrics = probe(learner, losses(mask=mask), "gradient_step").metrics
    # probabilities 2/3 and 1/3: -(4 ln(2/3) + ln(1/3)) / 2; the third step has an unknown return and an invalid action
    assert metrics["policy_loss"].item() == pytest.approx(-2 * math.log(2 / 3) - 0.5 * math.log(1 / 3), rel=1e-5)
    assert named_gradients(learner.net, learner.optimizer)["policy_head.linear.bias"][2].item() == 0.0


def test_gradients_are_clipped_to_max_grad_norm() -> None:
    learner = make_learner(max_grad_norm=0.01)
    norm = learner.update(rollout()).metrics["grad_norm"].item()
    assert norm > 0.01  # the metric is the norm before clipping
    # the first moment of Adam is a tenth of the gradient
    assert learner.optimizer.first_moment[0].norm().item() == pytest.approx(0.1 * 0.01, rel=1e-3)


@pytest.mark.parametrize("baseline", [True, False])
@pytest.mark.parametrize("kind", ["gru", "lstm"])
def test_recurrent_gradients_equal_those_of_single_steps(kind: str, baseline: bool) -> None:
    settings = {"net__recurrent": kind, "net__recurrent_size": 4, "num_envs": 2, "baseline": baseline}
    learner = make_learner(plain=False, **settings)
    T, N, rng = 4, 2, torch.Generator().manual_seed(0)
    obs = torch.randn(T, N, 1, generator=rng)
    # the hidden state of the first environment is reset after its second step; both episodes end with the rollout
    ended = torch.tensor([[False, False], [True, False], [False, False], [True, True]])
    with torch.no_grad():  # a hidden state from before the rollout
        hidden = learner.net(torch.randn(N, 1, generator=rng)).hidden
    hiddens, actions, logps, values = [], [], [], []
    for t in range(T):
        hiddens.append(tree_map(torch.Tensor.detach, hidden))
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
        hidden=tree_map(lambda *steps: torch.stack(steps), *hiddens),
        reward=reward,
        value=value.detach(),
        terminated=ended,
        truncated=torch.zeros(T, N, dtype=torch.bool),
    )
    expected_returns, later_return = torch.zeros(T, N), torch.zeros(N)
    for t in reversed(range(T)):
        later_return = expected_returns[t] = reward[t] + 0.5 * later_return * ~ended[t]
    loss = -(logp * (expected_returns - value.detach() if baseline else expected_returns)).mean()
    if baseline:
        loss = loss + 0.5 * (value - expected_returns).square().mean()
    expected = learner.optimizer.compute_gradients(loss)[0].clone()
    data = gradient_step_data(learner, data)
    assert torch.allclose(data.returns, expected_returns, atol=1e-6)
    fresh = make_learner(plain=False, **settings)  # with the weights before the update
    assert torch.allclose(probe(fresh, data, "gradient_step").gradients["optimizer"][0], expected, atol=1e-6)


# --- rejected settings, state and metrics ---


def test_unsupported_settings_and_spaces_are_rejected() -> None:
    with pytest.raises(UserError, match=r"the action space is Text.*; allowed are"):
        make_learner(spaces=Spaces(OBS, Text(5)))
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

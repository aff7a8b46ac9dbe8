"""Losses and phases of PPG: when they run and which weights they change."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from by_hand import all_equal, changed_parts, collect_random_rollout, copy_weights, named_weights
from gymnasium.spaces import Box, Dict, Discrete
from probe import probe
from torch import nn

import zhixing as zx
from zhixing.algorithms.ppg import PPG
from zhixing.core.batch import Batch
from zhixing.core.spaces import Spaces

SPACES = Spaces(Box(-1.0, 1.0, (3,), np.float32), Discrete(3))


def make_learner(**settings: Any) -> PPG:
    base = {"net__hidden_sizes": [16], "num_envs": 4, "rollout_steps": 8, "minibatch_size": 16}
    base |= {"epochs": 2, "policy_iterations": 3, "auxiliary_epochs": 2}
    cfg = zx.config.load(algorithm="ppg", env="Acrobot-v1", **(base | settings))
    return PPG(cfg, SPACES)


def rollout(ppg: PPG, seed: int = 0) -> Batch:
    return collect_random_rollout(ppg, 8, 4, seed)


def all_weights(ppg: PPG) -> nn.ModuleDict:
    """Return the networks as one module with the parts of `ppg.net` and `auxiliary_head`."""
    return nn.ModuleDict({**dict(ppg.net.named_children()), "auxiliary_head": ppg.auxiliary_head})


# --- losses ---


def test_auxiliary_loss_by_hand() -> None:
    ppg = make_learner()
    data = Batch(obs=torch.rand(4, 3), returns=torch.tensor([1.0, 2.0, 3.0, 4.0]))
    with torch.no_grad():
        ppg.auxiliary_head.linear.weight.zero_()
        ppg.auxiliary_head.linear.bias.fill_(2.0)
    result = probe(ppg, data, "auxiliary_step", old=ppg.net)
    # half the mean of 1, 0, 1, 4; the policy equals the old one
    assert result.metrics["auxiliary_loss"].item() == pytest.approx(0.75)
    assert result.metrics["clone_kl"].item() == pytest.approx(0.0, abs=1e-7)


def test_joint_loss_is_the_auxiliary_loss_plus_the_weighted_kl() -> None:
    ppg = make_learner(clone_coef=0.7, max_grad_norm=None)
    data = Batch(obs=torch.rand(6, 3), returns=torch.rand(6))
    old = copy.deepcopy(ppg.net)
    with torch.no_grad():
        old.policy_head.linear.bias += torch.tensor([0.5, 0.0, -0.5])
    gradient = probe(ppg, data, "auxiliary_step", old=old).gradients["actor_optimizer"][0].clone()
    features = ppg.net.actor(data.obs)
    old_logp, logp = (
        p.log_softmax(-1) for p in (old.policy_head.linear(old.actor(data.obs)), ppg.net.policy_head.linear(features))
    )
    kl = (old_logp.detach().exp() * (old_logp.detach() - logp)).sum(-1).mean()
    loss = 0.5 * (ppg.auxiliary_head(features) - data.returns).square().mean() + 0.7 * kl
    assert torch.allclose(gradient, ppg.actor_optimizer.compute_gradients(loss)[0], atol=1e-6)


# --- phases ---


def test_auxiliary_phase_runs_every_policy_iterations() -> None:
    ppg = make_learner(policy_iterations=3)
    iterations = []
    for iteration in range(1, 8):
        with mock.patch.object(ppg, "auxiliary_phase", wraps=ppg.auxiliary_phase) as auxiliary_phase:
            ppg.update(rollout(ppg, seed=iteration))
        iterations += [iteration] * auxiliary_phase.call_count
        assert len(ppg.rollouts) == iteration % 3
    assert iterations == [3, 6]


def test_auxiliary_phase_gets_all_states_since_the_last_one() -> None:
    ppg = make_learner(policy_iterations=2)
    calls: list[Batch] = []
    ppg.auxiliary_phase = calls.append
    first, second = rollout(ppg, seed=1), rollout(ppg, seed=2)
    observations = [first.obs.clone(), second.obs.clone()]
    ppg.update(first)
    first.obs.zero_()  # collectors reuse the memory of rollouts
    ppg.update(second)
    assert torch.equal(calls[0].obs, torch.cat(observations, 1))
    assert set(calls[0].fields) == {"obs", "returns"}


def test_number_of_updates_includes_both_phases() -> None:
    ppg = make_learner()  # 32 steps per rollout, minibatches of 16
    for i in range(2):
        ppg.update(rollout(ppg, i))
    assert ppg.updates == 2 * 2 * 2
    ppg.update(rollout(ppg, 2))
    assert ppg.updates == 3 * 2 * 2 + 2 * (3 * 32 // 16)


def test_policy_phase_does_not_change_the_auxiliary_head() -> None:
    ppg = make_learner(policy_iterations=2)
    for i in range(2):
        ppg.update(rollout(ppg, i))
    before = named_weights(all_weights(ppg))  # after an auxiliary phase, whose momentum must not have effects
    ppg.update(rollout(ppg, 3))
    assert changed_parts(all_weights(ppg), before) == {"actor", "policy_head", "critic", "value_head"}


def test_phases_have_separate_moments() -> None:
    ppg = make_learner(policy_iterations=2, epochs=1, auxiliary_epochs=3)
    for i in range(2):
        ppg.update(rollout(ppg, i))
    assert ppg.actor_optimizer.steps[0] == 2 * 2
    assert ppg.other_moments["steps"][0] == 3 * 4
    assert ppg.critic_optimizer.steps[0] == 2 * 2 + 3 * 4


def test_auxiliary_phase_trains_the_auxiliary_head_without_changing_the_policy() -> None:
    ppg = make_learner(auxiliary_epochs=150, minibatch_size=96, lr=1e-2, clone_coef=10.0)
    with torch.no_grad():  # makes the policy differ from a uniform one
        ppg.net.policy_head.linear.weight *= 100
    obs = torch.rand(8, 12, 3, generator=torch.Generator().manual_seed(0))
    data = Batch(obs=obs, returns=3 * obs[..., 0] - 2 * obs[..., 1])
    flat = obs.flatten(0, 1)
    before, old = named_weights(all_weights(ppg)), ppg.net(flat).distribution
    error = (ppg.auxiliary_head(ppg.net.actor(flat)) - data.returns.flatten()).square().mean()
    ppg.auxiliary_phase(data)
    after = (ppg.auxiliary_head(ppg.net.actor(flat)) - data.returns.flatten()).square().mean()
    assert after < 0.05 * error
    assert old.kl(ppg.net(flat).distribution).mean() < 1e-3
    assert "actor" in changed_parts(all_weights(ppg), before)  # not only the head
    assert (ppg.value(flat) - data.returns.flatten()).square().mean() < 0.05 * error  # the critic is trained, too


def test_without_the_clone_term_the_auxiliary_phase_changes_the_policy() -> None:
    kls = []
    for clone_coef in (0.0, 10.0):
        ppg = make_learner(auxiliary_epochs=50, minibatch_size=96, lr=1e-2, clone_coef=clone_coef)
        with torch.no_grad():
            ppg.net.policy_head.linear.weight *= 100
        obs = torch.rand(8, 12, 3, generator=torch.Generator().manual_seed(0))
        old = ppg.net(obs.flatten(0, 1)).distribution
        ppg.auxiliary_phase(Batch(obs=obs, returns=3 * obs[..., 0]))
        kls.append(old.kl(ppg.net(obs.flatten(0, 1)).distribution).mean().item())
    assert kls[0] > 10 * kls[1]


# --- state ---


@pytest.mark.parametrize("settings", [{}, {"net__recurrent": "lstm", "net__recurrent_size": 4}], ids=["plain", "lstm"])
@pytest.mark.parametrize("iterations", [2, 4])
def test_restored_learner_continues_identically(iterations: int, settings: dict[str, Any]) -> None:
    # the state is saved between auxiliary phases, with rollouts, and after one, with its moments
    settings = settings | {"normalize_obs": True, "normalize_reward": True}
    ppg, other = make_learner(**settings), make_learner(**settings, seed=9)
    for i in range(iterations):
        ppg.update(rollout(ppg, i))
    state = copy.deepcopy(ppg.state_dict())
    assert len(state["rollouts"]) == iterations % 3
    other.load_state_dict(state)
    for i in range(3):
        batch = rollout(ppg, 10 + i)
        first, second = ppg.update(batch).metrics, other.update(batch).metrics
        assert all(torch.equal(first[name], second[name]) for name in first)
    assert all_equal(copy_weights(all_weights(ppg)), copy_weights(all_weights(other)))


def test_nonfinite_steps_of_both_phases_are_skipped_and_counted() -> None:
    ppg = make_learner(policy_iterations=1)
    batch = rollout(ppg)
    before = named_weights(all_weights(ppg))
    ppg.update(batch.replace(reward=torch.full_like(batch.reward, torch.nan)))
    assert changed_parts(all_weights(ppg), before) == set()
    # actor and critic: 2 epochs of 2 minibatches in each phase
    assert ppg.skipped_steps() == 2 * (4 + 4)


def test_dict_observations_are_stored() -> None:
    spaces = Spaces(Dict({"a": Box(-1, 1, (2,), np.float32), "b": Discrete(3)}), Discrete(2))
    cfg = zx.config.load(algorithm="ppg", env="Acrobot-v1", num_envs=2, policy_iterations=2, auxiliary_epochs=1)
    ppg = PPG(cfg, spaces)
    obs = {"a": torch.rand(4, 2, 2), "b": torch.randint(3, (4, 2))}
    end = torch.zeros(4, 2, dtype=torch.bool)
    batch = Batch(
        **{"obs": obs, "next_obs": obs, "action": torch.zeros(4, 2, dtype=torch.long), "reward": torch.rand(4, 2)},
        **{"terminated": end, "truncated": end, "logp": torch.zeros(4, 2), "value": torch.zeros(4, 2)},
        mask=torch.ones(4, 2, 2, dtype=torch.bool),
    )
    ppg.update(batch)
    assert ppg.rollouts[0].obs["b"].shape == (4, 2)
    assert ppg.update(batch).metrics["auxiliary_loss"] > 0


def test_update_returns_exactly_the_declared_metrics() -> None:
    ppg = make_learner()
    assert set(ppg.update(rollout(ppg)).metrics) == set(PPG.metrics)

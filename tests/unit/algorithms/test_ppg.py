"""PPG's phases: when they happen, what they move, and what they leave alone."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete
from probe import probe
from torch import Tensor

import zhixing as zx
from zhixing.algorithms.ppg import PPG
from zhixing.core.batch import Batch
from zhixing.core.spaces import Spaces
from zhixing.core.tree import tree_map

SPACES = Spaces(Box(-1.0, 1.0, (3,), np.float32), Discrete(3))


def make_learner(**settings: Any) -> PPG:
    short = {"net__hidden_sizes": [16], "num_envs": 4, "rollout_steps": 8, "minibatch_size": 16}
    short |= {"epochs": 2, "policy_iterations": 3, "auxiliary_epochs": 2}
    cfg = zx.config.load(algorithm="ppg", env="Acrobot-v1", **(short | settings))
    return PPG(cfg, SPACES)


def rollout(ppg: PPG, seed: int = 0) -> Batch:
    T, N = 8, 4
    g = torch.Generator().manual_seed(seed)
    obs = torch.rand(T + 1, N, 3, generator=g)
    hidden, rows = ppg.policy.initial_hidden(N), []
    with torch.no_grad():
        for t in range(T):
            decision = ppg.policy.act(obs[t], hidden, None, zx.Phase.COLLECT, g, 0)
            rows.append((decision.action, decision.logp, decision.value, hidden))
            hidden = decision.hidden
    fields: dict[str, Any] = {n: torch.stack([r[i] for r in rows]) for i, n in enumerate(("action", "logp", "value"))}
    if ppg.net.recurrent:
        fields["hidden"] = tree_map(lambda *leaves: torch.stack(leaves), *(row[3] for row in rows))
    end = torch.zeros(T, N, dtype=torch.bool)
    reward = torch.randn(T, N, generator=g)
    return Batch(obs=obs[:-1], reward=reward, terminated=end, truncated=end.clone(), next_obs=obs[1:], **fields)


def weights(ppg: PPG) -> dict[str, Tensor]:
    parts = {"auxiliary_head": ppg.auxiliary_head, "net": ppg.net}
    return {f"{part}.{n}": p.detach().clone() for part, net in parts.items() for n, p in net.named_parameters()}


def moved(ppg: PPG, before: dict[str, Tensor]) -> set[str]:
    now = weights(ppg)
    changed = {name.removeprefix("net.") for name in now if not torch.equal(now[name], before[name])}
    return {name.split(".")[0] for name in changed}


# --- losses ---


def test_the_auxiliary_loss_by_hand() -> None:
    ppg = make_learner()
    data = Batch(obs=torch.rand(4, 3), returns=torch.tensor([1.0, 2.0, 3.0, 4.0]))
    with torch.no_grad():
        ppg.auxiliary_head.linear.weight.zero_()
        ppg.auxiliary_head.linear.bias.fill_(2.0)
    result = probe(ppg, data, "auxiliary_step", old=ppg.net)
    # half the mean of 1, 0, 1, 4; the policy is the old one
    assert result.metrics["auxiliary_loss"].item() == pytest.approx(0.75)
    assert result.metrics["clone_kl"].item() == pytest.approx(0.0, abs=1e-7)


def test_the_joint_loss_is_the_auxiliary_one_and_beta_times_the_kl() -> None:
    ppg = make_learner(clone_coef=0.7, max_grad_norm=None)
    data = Batch(obs=torch.rand(6, 3), returns=torch.rand(6))
    old = copy.deepcopy(ppg.net)
    with torch.no_grad():
        old.policy_head.linear.bias += torch.tensor([0.5, 0.0, -0.5])
    result = probe(ppg, data, "auxiliary_step", old=old).gradients["actor_optimizer"][0].clone()
    features = ppg.net.actor(data.obs)
    old_logp, logp = (
        p.log_softmax(-1) for p in (old.policy_head.linear(old.actor(data.obs)), ppg.net.policy_head.linear(features))
    )
    kl = (old_logp.detach().exp() * (old_logp.detach() - logp)).sum(-1).mean()
    loss = 0.5 * (ppg.auxiliary_head(features) - data.returns).square().mean() + 0.7 * kl
    assert torch.allclose(result, ppg.actor_optimizer.compute_gradients(loss)[0], atol=1e-6)


# --- phases ---


def test_auxiliary_phases_happen_exactly_every_policy_iterations() -> None:
    ppg = make_learner(policy_iterations=3)
    happened: list[int] = []
    phase = ppg.auxiliary_phase
    for iteration in range(1, 8):
        ppg.auxiliary_phase = lambda data, at=iteration: (happened.append(at), phase(data))[1]
        ppg.update(rollout(ppg, seed=iteration))
        assert len(ppg.rollouts) == iteration % 3
    assert happened == [3, 6]


def test_an_auxiliary_phase_sees_every_state_since_the_last() -> None:
    ppg = make_learner(policy_iterations=2)
    seen: list[Batch] = []
    ppg.auxiliary_phase = seen.append
    first, second = rollout(ppg, seed=1), rollout(ppg, seed=2)
    observations = [first.obs.clone(), second.obs.clone()]
    ppg.update(first)
    first.obs.zero_()  # the memory of a rollout is written again
    ppg.update(second)
    assert torch.equal(seen[0].obs, torch.cat(observations, 1))
    assert set(seen[0].fields) == {"obs", "returns"}


def test_the_number_of_updates_is_that_of_both_phases() -> None:
    ppg = make_learner()  # 32 steps a rollout in minibatches of 16
    for i in range(2):
        ppg.update(rollout(ppg, i))
    assert ppg.updates == 2 * 2 * 2
    ppg.update(rollout(ppg, 2))
    assert ppg.updates == 3 * 2 * 2 + 2 * (3 * 32 // 16)


def test_policy_phases_never_move_the_auxiliary_head() -> None:
    ppg = make_learner(policy_iterations=2)
    for i in range(2):
        ppg.update(rollout(ppg, i))
    before = weights(ppg)  # an auxiliary phase has passed: its momentum must not go on
    ppg.update(rollout(ppg, 3))
    assert moved(ppg, before) == {"actor", "policy_head", "critic", "value_head"}


def test_each_phase_has_moments_of_its_own() -> None:
    ppg = make_learner(policy_iterations=2, epochs=1, auxiliary_epochs=3)
    for i in range(2):
        ppg.update(rollout(ppg, i))
    assert ppg.actor_optimizer.steps[0] == 2 * 2
    assert ppg.other_moments["steps"][0] == 3 * 4
    assert ppg.critic_optimizer.steps[0] == 2 * 2 + 3 * 4


def test_the_auxiliary_head_learns_while_the_policy_stays() -> None:
    ppg = make_learner(auxiliary_epochs=150, minibatch_size=96, lr=1e-2, clone_coef=10.0)
    with torch.no_grad():  # a policy that has something to lose
        ppg.net.policy_head.linear.weight *= 100
    obs = torch.rand(8, 12, 3, generator=torch.Generator().manual_seed(0))
    data = Batch(obs=obs, returns=3 * obs[..., 0] - 2 * obs[..., 1])
    flat = obs.flatten(0, 1)
    before, old = weights(ppg), ppg.net(flat).distribution
    error = (ppg.auxiliary_head(ppg.net.actor(flat)) - data.returns.flatten()).square().mean()
    ppg.auxiliary_phase(data)
    after = (ppg.auxiliary_head(ppg.net.actor(flat)) - data.returns.flatten()).square().mean()
    assert after < 0.05 * error
    assert old.kl(ppg.net(flat).distribution).mean() < 1e-3
    assert "actor" in moved(ppg, before)  # its features have learned, not only the head
    assert (ppg.value(flat) - data.returns.flatten()).square().mean() < 0.05 * error  # and so has the critic


def test_without_the_clone_term_the_policy_drifts() -> None:
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
def test_state_round_trip_gives_the_same_next_phases(iterations: int, settings: dict[str, Any]) -> None:
    """Before an auxiliary phase, whose rollouts are in the state, and after one, whose moments are."""
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
    assert all(torch.equal(one, two) for one, two in zip(weights(ppg).values(), weights(other).values(), strict=True))


def test_a_gradient_that_is_not_finite_is_counted_in_either_phase() -> None:
    ppg = make_learner(policy_iterations=1)
    batch = rollout(ppg)
    before = weights(ppg)
    ppg.update(batch.replace(reward=torch.full_like(batch.reward, torch.nan)))
    assert moved(ppg, before) == set()
    # actor and critic: 2 epochs of 2 minibatches, and again in the auxiliary phase
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

"""Edge cases of several algorithms, with numbers worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete
from probe import probe

import zhixing as zx
from zhixing.core.batch import Batch
from zhixing.core.spaces import Spaces

OBS = Box(-9.0, 9.0, (1,), np.float32)
ONE, SEVERAL = Spaces(OBS, Discrete(2)), Spaces(OBS, Discrete(2), num_agents=2, state=1)


def make_learner(name, spaces, **settings):
    env = "toy/team-match" if spaces is SEVERAL else "Acrobot-v1"
    return zx.algorithms.get(name).make(zx.config.load(algorithm=name, env=env, num_envs=1, **settings), spaces)


@pytest.mark.parametrize("name", ["a2c", "ac", "pg", "ppo", "ppg", "trpo"])
def test_networks_may_have_no_hidden_layers(name):
    assert make_learner(name, ONE, net__hidden_sizes=[]).net(torch.zeros(2, 1)).value.shape == (2,)


def test_discrete_actor_of_redq_maximizes_the_mean_of_the_critics():
    learner = make_learner("redq", ONE, net__hidden_sizes=[], critics=2, target_critics=1, alpha=1e-9)
    with torch.no_grad():
        learner.critics.towers.weights[0].zero_()
        learner.critics.towers.biases[0].copy_(torch.tensor([[[6.0, 0.0]], [[-4.0, 0.0]]]))
        learner.actor.layers.linears[0].weight.zero_()
        learner.actor.layers.linears[0].bias.copy_(torch.tensor([50.0, 0.0]))  # probability 1 for the first action
    assert learner.actor_loss(Batch(obs=torch.zeros(1, 1)))[0].item() == pytest.approx(-(6 - 4) / 2)


@pytest.mark.parametrize("baseline", [True, False])
def test_single_known_return_is_not_normalized_to_zero(baseline):
    learner = make_learner("pg", ONE, baseline=baseline)
    never = torch.zeros(1, 1, dtype=torch.bool)
    data = Batch(
        obs=torch.ones(1, 1, 1),
        next_obs=torch.ones(1, 1, 1),
        action=torch.zeros(1, 1, dtype=torch.long),
        reward=torch.full((1, 1), 5.0),
        value=torch.zeros(1, 1),
        terminated=~never,
        truncated=never,
    )
    assert learner.update(data).metrics["policy_loss"].item() == pytest.approx(5 * np.log(2), rel=0.01)


def step_metrics(learner, **fields):
    """Return the metrics of a gradient step from one time step, in which the second agent is dead."""
    base = {
        "obs": torch.zeros(1, 2, 1),
        "critic_obs": torch.zeros(1, 2, 1),
        "action": torch.zeros(1, 2, dtype=torch.long),
        "advantage": torch.ones(1, 2),
        "returns": torch.ones(1, 2),
        "alive": torch.tensor([[True, False]]),
        "logp": torch.full((1, 2), float(np.log(0.5))),
    }
    return probe(learner, Batch(**{**base, **fields}), "gradient_step").metrics


def test_advantage_of_a_single_alive_agent_is_not_normalized_to_zero():
    assert step_metrics(make_learner("mappo", SEVERAL))["policy_loss"].item() == pytest.approx(-1.0, abs=0.01)


def test_metrics_of_the_ratio_exclude_dead_agents():
    metrics = step_metrics(make_learner("mappo", SEVERAL), logp=torch.tensor([[float(np.log(0.5)), -5.0]]))
    assert metrics["clip_fraction"].item() == 0.0
    assert metrics["kl"].item() == pytest.approx(0.0, abs=0.01)


def rollout(obs):
    """Return three steps with rewards 10 that all terminate, in which the second agent is dead."""
    never, alive = torch.zeros(3, 1, dtype=torch.bool), torch.tensor([True, False]).expand(3, 1, 2)
    return Batch(
        obs=obs,
        next_obs=obs,
        state=torch.zeros(3, 1, 1),
        next_state=torch.zeros(3, 1, 1),
        action=torch.zeros(3, 1, 2, dtype=torch.long),
        logp=torch.zeros(3, 1, 2),
        reward=torch.full((3, 1, 2), 10.0),
        terminated=~never,
        truncated=never,
        alive=alive,
        next_alive=alive,
    )


def test_observation_statistics_exclude_dead_agents():
    learner = make_learner("mappo", SEVERAL, normalize_obs=True)
    learner.update(rollout(torch.tensor([1.0, 5.0]).view(1, 1, 2, 1).expand(3, 1, 2, 1)))
    assert learner.actor.agent_nets[0].torso.encoder.part("obs").norm.mean.item() == 1.0


def test_return_statistics_exclude_dead_agents():
    learner = make_learner("ippo", SEVERAL)
    learner.update(rollout(torch.zeros(3, 1, 2, 1)))
    assert learner.value_norm.mean.item() == pytest.approx(10.0)

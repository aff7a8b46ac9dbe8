"""Targets and losses of QMIX, VDN and IDQN, with numbers worked out by hand, and the two-step game of the paper."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from by_hand import all_equal
from gymnasium.spaces import Box, Discrete
from probe import probe
from torch import Tensor, nn

import zhixing as zx
from zhixing.algorithms.qmix import QMIX
from zhixing.core.batch import Batch
from zhixing.core.spaces import Spaces
from zhixing.errors import UserError

SPACES = Spaces(Box(-9.0, 9.0, (2,), np.float32), Discrete(2), num_agents=2)
GAMMA = 0.5


def make_learner(name: str = "vdn", spaces: Spaces = SPACES, **settings: Any) -> QMIX:
    settings = {"gamma": GAMMA, "net__recurrent": "none", "last_action": False, "share_weights": True} | settings
    cfg = zx.config.load(algorithm=name, env="toy/team-match", **settings)
    learner = zx.algorithms.get(name).make(cfg, spaces)
    assert isinstance(learner, QMIX)
    return learner


class ObsAsQ(nn.Module):
    """Q-values proportional to the observation: `q(a) = factor * obs[a]`."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(factor))

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        return self.factor * inputs["obs"]


def with_obs_as_q(qmix: QMIX) -> QMIX:
    """Make the Q-values of the network equal the observations, and those of the target network twice as large."""
    for net, factor in ((qmix.net, 1.0), (qmix.target_net, 2.0)):
        agent_net: Any = net.agents.agent_nets[0]
        agent_net.torso, agent_net.head = ObsAsQ(factor), nn.Identity()
    return qmix


def episode(terminated: bool, **extra_fields: Any) -> Batch:
    """Return an episode of two steps of two agents, terminated or truncated, with last observation [[5, 6], [8, 7]]."""
    obs = torch.tensor([[[[1.0, 2.0], [4.0, 3.0]], [[3.0, 1.0], [0.0, 2.0]]]])  # [1,2,2,2]
    last = torch.tensor([[[[5.0, 6.0], [8.0, 7.0]]]])
    ends = torch.tensor([[False, True]])
    fields = {
        "obs": obs,
        "next_obs": torch.cat([obs[:, 1:], last], 1),
        "action": torch.tensor([[[0, 1], [0, 0]]]),
        "reward": torch.tensor([[[1.0, 3.0], [2.0, 2.0]]]),
        "terminated": ends if terminated else ~ends & False,
        "truncated": ends if not terminated else ~ends & False,
        "valid": torch.ones(1, 2, dtype=torch.bool),
    }
    return Batch(**fields | extra_fields)


def targets(qmix: QMIX, batch: Batch) -> list[Any]:
    q = qmix.q_values(qmix.net, batch)
    return qmix.target_value(batch, q, torch.zeros(3, 1, 1))[:, 0].tolist()


def test_targets_of_vdn_by_hand() -> None:
    # step 1: mean reward 2; the network chooses the next actions 0 and 1, with target Q-values 2 * 3 and 2 * 2
    # step 2: mean reward 2; terminated
    assert targets(with_obs_as_q(make_learner()), episode(terminated=True)) == [2 + GAMMA * (6 + 4), 2.0]
    # truncated instead: the target Q-values of the last observation are 2 * 6 and 2 * 8
    assert targets(with_obs_as_q(make_learner()), episode(terminated=False)) == [7.0, 2 + GAMMA * (12 + 16)]


def test_targets_of_idqn_use_individual_rewards() -> None:
    result = targets(with_obs_as_q(make_learner("idqn")), episode(terminated=False))
    assert result == [[1 + GAMMA * 6, 3 + GAMMA * 4], [2 + GAMMA * 12, 2 + GAMMA * 16]]


def test_td_lambda_targets_by_hand() -> None:
    # λ = 1: 2 + 0.5 * (2 + 0.5 * 28), without intermediate values
    assert targets(with_obs_as_q(make_learner(td_lambda=1.0)), episode(terminated=False)) == pytest.approx([10.0, 16.0])


def test_targets_ignore_invalid_actions() -> None:
    mask = torch.ones(1, 2, 2, 2, dtype=torch.bool)
    next_mask = mask.clone()
    next_mask[0, 1, 0, 1] = False  # the last greedy action of the first agent is invalid
    batch = episode(terminated=False, mask=mask, next_mask=next_mask)
    assert targets(with_obs_as_q(make_learner()), batch) == [7.0, 2 + GAMMA * (10 + 16)]


def second_agent_alive(steps: list[bool], after: bool) -> dict[str, Tensor]:
    """Return fields that tell whether the second agent is alive in the two steps and after them."""
    alive = torch.tensor([[[True, steps[0]], [True, steps[1]]]])
    return {"alive": alive, "next_alive": torch.cat([alive[:, 1:], torch.tensor([[[True, after]]])], 1)}


def test_team_value_excludes_agents_that_have_left() -> None:
    left = episode(terminated=False, **second_agent_alive([True, False], False))
    # without the second agent's values after the first step: 2 + 0.5 * 6, and 2 + 0.5 * 12
    assert targets(with_obs_as_q(make_learner()), left) == [5.0, 8.0]


@pytest.mark.parametrize("name", ["qmix", "vdn", "idqn"])
def test_observations_and_actions_of_dead_agents_have_no_effect(name: str) -> None:
    qmix = make_learner(name, Spaces(SPACES.obs, SPACES.action, num_agents=2, state=1, alive=True))
    state = {"state": torch.ones(1, 2, 1), "next_state": torch.ones(1, 2, 1)}
    batch = episode(terminated=True, **second_agent_alive([True, False], False), **state)
    gradients = probe(qmix, batch, "gradient_step").gradients["optimizer"]
    obs, next_obs, action = batch.obs.clone(), batch.next_obs.clone(), batch.action.clone()
    obs[0, 1, 1], next_obs[0, 0, 1], next_obs[0, 1, 1], action[0, 1, 1] = 9.0, 9.0, -9.0, 1
    changed = batch.replace(obs=obs, next_obs=next_obs, action=action)
    assert all_equal(gradients, probe(qmix, changed, "gradient_step").gradients["optimizer"])
    assert any(g.abs().sum() > 0 for g in gradients)


INDIVIDUAL = Spaces(SPACES.obs, SPACES.action, num_agents=2, alive=True)
SHARED = Spaces(SPACES.obs, SPACES.action, num_agents=2, alive=True, reward_kind="shared")


@pytest.mark.parametrize("td_lambda", [0.0, 0.5, 1.0])
def test_with_individual_rewards_targets_end_with_the_agent(td_lambda: float) -> None:
    reward = torch.tensor([[[1.0, 1.0], [2.0, 19.0]]])
    left = episode(terminated=True, reward=reward, **second_agent_alive([True, False], False))
    result = targets(with_obs_as_q(make_learner("idqn", INDIVIDUAL, gamma=0.9, td_lambda=td_lambda)), left)
    # the second agent leaves with the first step, whose reward is 1
    assert result[0][1] == 1.0
    # the first agent bootstraps: 1 + 0.9 (λ 2 + (1 - λ) 2 * 3)
    assert result[0][0] == pytest.approx(1 + 0.9 * (2 * td_lambda + 6 * (1 - td_lambda)))


def test_at_truncation_only_dead_agents_with_individual_rewards_do_not_bootstrap() -> None:
    batch = episode(terminated=False, **second_agent_alive([True, True], False))
    # the first agent bootstraps: 2 + 0.5 * 12; the second leaves with the same step
    assert targets(with_obs_as_q(make_learner("idqn", INDIVIDUAL)), batch)[1] == [2 + GAMMA * 12, 2.0]
    assert targets(with_obs_as_q(make_learner("idqn", SHARED)), batch)[1] == [2 + GAMMA * 12, 2 + GAMMA * 16]


def test_with_shared_rewards_idqn_trains_agents_that_have_left() -> None:
    shared = torch.tensor([[[1.0, 1.0], [2.0, 2.0]]])
    alive = second_agent_alive([True, False], False)
    for td_lambda, expected in ((0.0, 1 + GAMMA * 4), (1.0, 1 + GAMMA * 2)):
        qmix = with_obs_as_q(make_learner("idqn", SHARED, td_lambda=td_lambda))
        # after the second agent has left, its target Q-value is 2 * 2 and its reward 2
        assert targets(qmix, episode(terminated=True, reward=shared, **alive))[0][1] == pytest.approx(expected)
    # its values after it has left are trained as in PyMARL, so the loss is the mean over 4 steps of agents
    qmix = with_obs_as_q(make_learner("idqn", SHARED))
    metrics = probe(qmix, episode(terminated=True, reward=shared, **alive), "gradient_step").metrics
    # q: 1 and 3, then 3 and 0; y: 1 + 0.5 * 6 and 1 + 0.5 * 4, then 2 and 2
    assert metrics["loss"].item() == pytest.approx((3.0**2 + 0.0 + 1.0 + 4.0) / 4)


@pytest.mark.parametrize("name", ["qmix", "vdn"])
def test_opposed_agents_are_rejected(name: str) -> None:
    opposed = Spaces(SPACES.obs, SPACES.action, num_agents=2, reward_kind="opposed")
    with pytest.raises(UserError, match=f"{name} learns one value for the whole team.*use ippo, mappo, maddpg or idqn"):
        make_learner(name, opposed)
    assert make_learner("idqn", opposed).team_reward is None
    zero_sum = torch.tensor([[[1.0, -1.0], [0.0, 0.0]]])
    episodes = Batch.cat([episode(terminated=True, reward=zero_sum)] * 6)
    learner = make_learner(name)
    learner.update(episodes)  # too few steps with rewards to decide
    with pytest.raises(UserError, match="they sum to zero in each of the first 12 steps with rewards"):
        learner.update(episodes)
    make_learner("idqn").update(episodes)
    # agents are accepted as a team once their rewards don't sum to zero in some step
    learner = make_learner(name)
    reward = torch.cat([zero_sum] * 5 + [torch.tensor([[[1.0, 0.0], [0.0, 0.0]]])])
    learner.update(episodes.replace(reward=reward))
    for _ in range(3):
        learner.update(episodes)


def test_check_for_opposed_agents_ignores_padding() -> None:
    batch = episode(terminated=True, reward=torch.tensor([[[1.0, 0.0], [1.0, -1.0]]]))
    learner = make_learner()
    assert learner.team_reward is not None
    learner.update(batch.replace(valid=torch.tensor([[False, True]])))
    assert (learner.team_reward.undecided, learner.team_reward.rewarded_steps) == (True, 1)
    learner.update(batch)
    assert not learner.team_reward.undecided


def test_loss_ignores_padding() -> None:
    vdn = make_learner()
    batch = Batch.cat([episode(terminated=True)] * 2)
    valid, reward = batch.valid.clone(), batch.reward.clone()
    valid[1, 1], reward[1, 1] = False, 1e6
    losses = [
        probe(vdn, data, "gradient_step").metrics["loss"]
        for data in (batch.replace(valid=valid), batch.replace(valid=valid, reward=reward))
    ]
    assert losses[0] == losses[1]


@pytest.mark.parametrize(("name", "expected"), [("qmix", 8.0), ("vdn", 7.0)])
def test_qmix_solves_the_two_step_game_and_vdn_does_not(name: str, expected: float, tmp_path: Path) -> None:
    result = zx.train(name, env="toy/two-step", seed=0, out=tmp_path / "run", quiet=True, tensorboard=False)
    assert result["final_return"] == expected
    if name == "vdn":
        return
    session = zx.Session.resume(tmp_path / "run", quiet=True)
    net = session.learner.net  # type: ignore[attr-defined]
    q_tot = torch.zeros(2, 2, 2)  # [state, action of agent 1, action of agent 2]
    with torch.no_grad():
        for state in (0, 1):
            obs = torch.eye(3)[[0, 1 + state]][:, None, None].expand(2, 1, 2, 3)  # the first state, then 2A or 2B
            action = net.agents.encode_action(torch.tensor([[[state, 0]]]))
            inputs = net.agents.build_inputs(obs, torch.cat([torch.zeros_like(action), action]))
            rnn_state = net.agents.initial_rnn_state(1)
            q = net.agents.unroll(inputs, rnn_state, torch.zeros(2, 1, dtype=torch.bool))[1, 0]  # [A,n]
            for a in (0, 1):
                for b in (0, 1):
                    q_tot[state, a, b] = net.mixer(torch.stack([q[0, a], q[1, b]]), torch.eye(3)[1 + state])
    session.close()
    payoff = torch.tensor([[[7.0, 7.0], [7.0, 7.0]], [[0.0, 1.0], [1.0, 8.0]]])
    assert torch.allclose(q_tot, payoff, atol=0.25), q_tot

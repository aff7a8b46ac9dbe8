"""QMIX and its kin: targets by hand, ends, masks, agents that left, and the two-step game of the paper."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
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


class Shows(nn.Module):
    """Values that are the observation itself, times a factor: `q(a) = factor * obs[a]`."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(factor))

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        return self.factor * inputs["obs"]


def by_sight(qmix: QMIX, factor: float = 1.0, target: float = 2.0) -> QMIX:
    for net, value in ((qmix.net, factor), (qmix.target_net, target)):
        member: Any = net.agents.agent_nets[0]
        member.torso, member.head = Shows(value), nn.Identity()
    return qmix


def episode(terminated: bool, **more: Any) -> Batch:
    """Two steps of two agents; the last observation is [[5, 6], [8, 7]]."""
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
    return Batch(**fields | more)


def targets(qmix: QMIX, batch: Batch) -> list[Any]:
    q = qmix.q_values(qmix.net, batch)
    return qmix.target_value(batch, q, torch.zeros(3, 1, 1))[:, 0].tolist()


def test_the_sums_target_by_hand() -> None:
    # step 1: mean reward 2; the network prefers actions 0 and 1 there, worth 2 * 3 and 2 * 2 by the target: 2 + 5
    # step 2: mean reward 2; the end is no future
    assert targets(by_sight(make_learner()), episode(terminated=True)) == [2 + GAMMA * (6 + 4), 2.0]
    # cut off instead: what the last observation is worth, 2 * 6 and 2 * 8
    assert targets(by_sight(make_learner()), episode(terminated=False)) == [7.0, 2 + GAMMA * (12 + 16)]


def test_independent_agents_learn_from_their_own_rewards() -> None:
    result = targets(by_sight(make_learner("idqn")), episode(terminated=False))
    assert result == [[1 + GAMMA * 6, 3 + GAMMA * 4], [2 + GAMMA * 12, 2 + GAMMA * 16]]


def test_longer_looks_ahead_by_hand() -> None:
    # λ = 1: the whole return, 2 + 0.5 * (2 + 0.5 * 28); the present values cancel out
    assert targets(by_sight(make_learner(td_lambda=1.0)), episode(terminated=False)) == pytest.approx([10.0, 16.0])


def test_no_target_counts_on_a_forbidden_action() -> None:
    allowed = torch.ones(1, 2, 2, 2, dtype=torch.bool)
    after = allowed.clone()
    after[0, 1, 0, 1] = False  # at the end the first agent may not do what it values most
    masked = episode(terminated=False, mask=allowed, next_mask=after)
    assert targets(by_sight(make_learner()), masked) == [7.0, 2 + GAMMA * (10 + 16)]


def gone(second: list[bool], after: bool) -> dict[str, Tensor]:
    """Whether the second agent is there at the two steps, and after them."""
    alive = torch.tensor([[[True, second[0]], [True, second[1]]]])
    return {"alive": alive, "next_alive": torch.cat([alive[:, 1:], torch.tensor([[[True, after]]])], 1)}


def test_who_has_left_adds_nothing() -> None:
    left = episode(terminated=False, **gone([True, False], False))
    # the second agent's values after the first step don't count: 2 + 0.5 * 6, and 2 + 0.5 * 12
    assert targets(by_sight(make_learner()), left) == [5.0, 8.0]


@pytest.mark.parametrize("name", ["qmix", "vdn", "idqn"])
def test_who_has_left_contributes_nothing_to_a_loss(name: str) -> None:
    """Whatever it is data and does, gradients are the same."""
    qmix = make_learner(name, Spaces(SPACES.obs, SPACES.action, num_agents=2, state=1, alive=True))
    state = {"state": torch.ones(1, 2, 1), "next_state": torch.ones(1, 2, 1)}
    batch = episode(terminated=True, **gone([True, False], False), **state)
    first = [g.clone() for g in probe(qmix, batch, "gradient_step").gradients["optimizer"]]
    obs, next_obs, action = batch.obs.clone(), batch.next_obs.clone(), batch.action.clone()
    obs[0, 1, 1], next_obs[0, 0, 1], next_obs[0, 1, 1], action[0, 1, 1] = 9.0, 9.0, -9.0, 1
    other = probe(qmix, batch.replace(obs=obs, next_obs=next_obs, action=action), "gradient_step").gradients[
        "optimizer"
    ]
    assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))
    assert any(g.abs().sum() > 0 for g in first)


LEAVING = Spaces(SPACES.obs, SPACES.action, num_agents=2, alive=True)
TEAM = Spaces(SPACES.obs, SPACES.action, num_agents=2, alive=True, reward_kind="shared")


@pytest.mark.parametrize("td_lambda", [0.0, 0.5, 1.0])
def test_rewards_that_come_after_an_agents_end_are_not_added_to_its_targets(td_lambda: float) -> None:
    reward = torch.tensor([[[1.0, 1.0], [2.0, 19.0]]])
    left = episode(terminated=True, reward=reward, **gone([True, False], False))
    result = targets(by_sight(make_learner("idqn", LEAVING, gamma=0.9, td_lambda=td_lambda)), left)
    # the second agent left by the first step, which paid 1
    assert result[0][1] == 1.0
    # the first agent goes on: 1 + 0.9 (λ 2 + (1 - λ) 2 * 3)
    assert result[0][0] == pytest.approx(1 + 0.9 * (2 * td_lambda + 6 * (1 - td_lambda)))


def test_a_truncated_agent_has_a_future_and_one_that_left_has_none() -> None:
    cut = episode(terminated=False, **gone([True, True], False))
    # at the cut 2 + 0.5 * 12 for the first; the second left by that step
    assert targets(by_sight(make_learner("idqn", LEAVING)), cut)[1] == [2 + GAMMA * 12, 2.0]
    assert targets(by_sight(make_learner("idqn", TEAM)), cut)[1] == [2 + GAMMA * 12, 2 + GAMMA * 16]


def test_a_shared_reward_counts_for_independent_agents_that_have_left() -> None:
    shared = torch.tensor([[[1.0, 1.0], [2.0, 2.0]]])
    alive = gone([True, False], False)
    for td_lambda, expected in ((0.0, 1 + GAMMA * 4), (1.0, 1 + GAMMA * 2)):
        qmix = by_sight(make_learner("idqn", TEAM, td_lambda=td_lambda))
        # the second agent's value after it left is 2 * 2 by the target, its reward 2
        assert targets(qmix, episode(terminated=True, reward=shared, **alive))[0][1] == pytest.approx(expected)
    # its values after it left are learned, too, as in PyMARL: errors of q - y, 4 steps of single agents
    qmix = by_sight(make_learner("idqn", TEAM))
    told = probe(qmix, episode(terminated=True, reward=shared, **alive), "gradient_step").metrics
    # q: 1 and 3, then 3 and 0; y: 1 + 0.5 * 6 and 1 + 0.5 * 4, then 2 and 2
    assert told["loss"].item() == pytest.approx((3.0**2 + 0.0 + 1.0 + 4.0) / 4)


@pytest.mark.parametrize("name", ["qmix", "vdn"])
def test_opposed_agents_are_rejected(name: str) -> None:
    opposed = Spaces(SPACES.obs, SPACES.action, num_agents=2, reward_kind="opposed")
    with pytest.raises(UserError, match=f"{name} learns one value for the whole team.*use ippo, mappo, maddpg or idqn"):
        make_learner(name, opposed)
    assert make_learner("idqn", opposed).team_reward is None
    versus = torch.tensor([[[1.0, -1.0], [0.0, 0.0]]])
    rows = episode(terminated=True, reward=versus)
    one = Batch(**{field: torch.cat([getattr(rows, field)] * 6) for field in rows.fields})
    learner = make_learner(name)
    learner.update(one)  # six steps with rewards don't decide it yet
    with pytest.raises(UserError, match="they sum to zero in each of the first 12 steps with rewards"):
        learner.update(one)
    make_learner("idqn").update(one)
    # rewards that differ and can be averaged are a team's, whatever single steps pay
    fine = make_learner(name)
    fine.update(one.replace(reward=torch.cat([versus] * 5 + [torch.tensor([[[1.0, 0.0], [0.0, 0.0]]])])))
    for _ in range(3):
        fine.update(one)


def test_padding_does_not_decide_whether_agents_are_opposed() -> None:
    rows = episode(terminated=True, reward=torch.tensor([[[1.0, 0.0], [1.0, -1.0]]]))
    padded = rows.replace(valid=torch.tensor([[False, True]]))
    learner = make_learner()
    assert learner.team_reward is not None
    learner.update(padded)
    assert (learner.team_reward.undecided, learner.team_reward.rewarded_steps) == (True, 1)
    learner.update(rows)
    assert not learner.team_reward.undecided


def test_what_fills_up_shorter_episodes_counts_for_nothing() -> None:
    vdn = make_learner()
    whole = episode(terminated=True)
    twice = Batch(**{name: torch.cat([getattr(whole, name)] * 2) for name in whole.fields})
    valid = twice.valid.clone()
    valid[1, 1] = False
    reward = twice.reward.clone()
    reward[1, 1] = 1e6
    kept, filled = twice.replace(valid=valid), twice.replace(valid=valid, reward=reward)
    assert probe(vdn, kept, "gradient_step").metrics["loss"] == probe(vdn, filled, "gradient_step").metrics["loss"]


@pytest.mark.parametrize(("name", "best"), [("qmix", 8.0), ("vdn", 7.0)])
def test_the_two_step_game_of_the_paper(name: str, best: float, tmp_path: Path) -> None:
    result = zx.train(name, env="toy/two-step", seed=0, out=tmp_path / "run", quiet=True, tensorboard=False)
    assert result["final_return"] == best
    if name == "vdn":
        return
    session = zx.Session.resume(tmp_path / "run", quiet=True)
    net, learned = session.learner.net, session.learner  # type: ignore[attr-defined]
    table = torch.zeros(2, 2, 2)
    with torch.no_grad():
        for state in (0, 1):
            data = torch.eye(3)[[0, 1 + state]]  # the first state, then A or B
            obs = data[:, None, None].expand(2, 1, 2, 3)
            went = learned.net.agents.encode_action(torch.tensor([[[state, 0]]]))
            before = torch.cat([torch.zeros_like(went), went])
            inputs = net.agents.build_inputs(obs, before)
            memory = net.agents.initial_rnn_state(1)
            q = net.agents.unroll(inputs, memory, torch.zeros(2, 1, dtype=torch.bool))[1, 0]  # [A,n]
            for a in (0, 1):
                for b in (0, 1):
                    chosen = torch.stack([q[0, a], q[1, b]])
                    table[state, a, b] = net.mixer(chosen, torch.eye(3)[1 + state])
    session.close()
    payoffs = torch.tensor([[[7.0, 7.0], [7.0, 7.0]], [[0.0, 1.0], [1.0, 8.0]]])
    assert torch.allclose(table, payoffs, atol=0.25), table

"""Several policies in one environment: which agents each acts for, and the steps that its learner reads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete
from torch import Tensor

from zhixing.core.batch import Batch
from zhixing.core.policy import Decision, Phase, Policy
from zhixing.core.spaces import Spaces
from zhixing.nets.joint_policy import END_OF_TRAINING, JointPolicy, RandomPolicy, Seating

OBS = Box(-99.0, 99.0, (1,), np.float32)
SPACES = Spaces(OBS, Discrete(100), num_agents=3, mask=100, alive=True, reward_kind="opposed")
MEMBER = Spaces(OBS, Discrete(100), mask=100)
TEAM = Spaces(OBS, Discrete(100), num_agents=2, mask=100)


class Add(Policy):
    """The action is the observation plus a number. The hidden state counts the steps."""

    def __init__(self, spaces: Spaces, number: int) -> None:
        super().__init__(spaces)
        self.number, self.calls = number, list[tuple[Phase, int]]()

    def initial_hidden(self, num: int) -> Tensor:
        return torch.zeros(num, 1)

    def act(self, obs: Any, hidden: Any, mask: Any, phase: Phase, rng: torch.Generator, env_steps: int) -> Decision:
        self.calls.append((phase, env_steps))
        return Decision(obs[..., 0].long() + self.number, hidden=hidden + 1, value=obs[..., 0])


def act(policy: JointPolicy, obs: list[list[float]], hidden: Any = None, phase: Phase = Phase.COLLECT) -> Decision:
    hidden = policy.initial_hidden(len(obs)) if hidden is None else hidden
    mask = torch.ones(len(obs), 3, 100, dtype=torch.bool)
    return policy.act(torch.tensor(obs)[..., None], hidden, mask, phase, torch.Generator(), 50)


@pytest.fixture
def joint() -> JointPolicy:
    seating = Seating({"one": [2], "two": [0, 1]}, 3)
    return JointPolicy(SPACES, {"one": Add(MEMBER, 10), "two": Add(MEMBER, 20)}, seating)


def test_rotated_policies_play_as_every_agent() -> None:
    seating = Seating({"one": [2], "two": [0, 1]}, 3, rotate=True)
    assert seating.index("one", 4)[1].tolist() == [[2], [0], [1], [2]]
    assert seating.index("two", 4)[1].tolist() == [[0, 1], [1, 2], [2, 0], [0, 1]]


def test_each_agent_gets_the_action_of_its_policy(joint: JointPolicy) -> None:
    assert act(joint, [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]).action.tolist() == [[21, 22, 13], [24, 25, 16]]
    joint.seating = Seating({"one": [2], "two": [0, 1]}, 3, rotate=True)
    assert act(joint, [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]).action.tolist() == [[21, 22, 13], [14, 25, 26]]


def test_team_gets_the_observations_of_its_agents_together() -> None:
    team = JointPolicy(
        SPACES, {"one": Add(MEMBER, 10), "team": Add(TEAM, 20)}, Seating({"one": [1], "team": [2, 0]}, 3)
    )
    hidden = {"one": torch.zeros(2, 3, 1), "team": torch.zeros(2, 1, 1)}
    decision = act(team, [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], hidden)
    assert decision.action.tolist() == [[21, 12, 23], [24, 15, 26]]
    assert decision.hidden["team"].tolist() == [[[1.0]], [[1.0]]]


def test_policy_for_all_agents_acts_only_for_its_own() -> None:
    everyone = Spaces(OBS, Discrete(100), num_agents=3, mask=100)
    policies = {"all": Add(everyone, 10), "one": Add(MEMBER, 20)}
    joint = JointPolicy(SPACES, policies, Seating({"all": [1], "one": [0, 2]}, 3, rotate=True))
    assert act(joint, [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]).action.tolist() == [[21, 12, 23], [24, 25, 16]]


def test_hidden_state_of_an_agent_changes_only_with_its_policy(joint: JointPolicy) -> None:
    hidden = act(joint, [[1.0, 2.0, 3.0]]).hidden
    assert hidden["one"][0, :, 0].tolist() == [0.0, 0.0, 1.0]
    assert hidden["two"][0, :, 0].tolist() == [1.0, 1.0, 0.0]
    assert act(joint, [[1.0, 2.0, 3.0]], hidden).hidden["two"][0, :, 0].tolist() == [2.0, 2.0, 0.0]


def test_evaluations_may_have_other_policies(joint: JointPolicy) -> None:
    joint.eval_seating = Seating({"one": [0, 1, 2]}, 3)
    assert act(joint, [[1.0, 2.0, 3.0]], phase=Phase.EVAL).action.tolist() == [[11, 12, 13]]
    assert act(joint, [[1.0, 2.0, 3.0]]).action.tolist() == [[21, 22, 13]]


def test_policies_begin_to_learn_at_their_own_step_and_others_act_as_after_training(joint: JointPolicy) -> None:
    joint.learning = {"one": 51}
    act(joint, [[1.0, 2.0, 3.0]])
    joint.learning = {"one": 50}
    act(joint, [[1.0, 2.0, 3.0]])
    act(joint, [[1.0, 2.0, 3.0]], phase=Phase.EVAL)
    one, two = joint.policies["one"], joint.policies["two"]
    assert one.calls == [(Phase.RANDOM, 50), (Phase.COLLECT, 50), (Phase.EVAL, 50)]
    assert two.calls == [(Phase.COLLECT, END_OF_TRAINING)] * 3


def test_random_policy_takes_only_valid_actions() -> None:
    mask = torch.zeros(500, 100, dtype=torch.bool)
    mask[:, [3, 7]] = True
    rng = torch.Generator().manual_seed(0)
    action = RandomPolicy(MEMBER).act(torch.zeros(500, 1), None, mask, Phase.EVAL, rng, 0).action
    assert set(action.tolist()) == {3, 7}
    assert 200 < int((action == 3).sum()) < 300


# T=2 steps of N=2 environments with A=3 agents; values are 100 t + 10 env + agent
STEPS = (100 * np.arange(2)[:, None, None] + 10 * np.arange(2)[:, None] + np.arange(3)).astype(np.float32)


def make_batch() -> Batch:
    alive = np.ones((2, 2, 3), bool)
    alive[1, 0, 1] = False  # agent 1 of environment 0 leaves in the first step
    next_alive = alive[[1, 1]]
    terminated = np.array([[False, False], [False, True]])
    fields = {"reward": STEPS, "action": STEPS, "obs": STEPS[..., None], "next_obs": STEPS[..., None] + 100}
    flags = {"terminated": terminated, "truncated": np.zeros((2, 2), bool), "alive": alive, "next_alive": next_alive}
    stored = {"two": {"value": STEPS[..., :2]}}
    return Batch(**fields, **flags, decisions=stored)


def test_learner_of_one_agent_reads_each_of_its_agents_as_an_environment(joint: JointPolicy) -> None:
    view = joint.view("two", make_batch())
    assert view.reward.tolist() == [[0, 1, 10, 11], [100, 101, 110, 111]]
    assert view.obs[..., 0].tolist() == view.reward.tolist() == view.value.tolist()
    assert view.next_obs[..., 0].tolist() == (view.reward + 100).tolist()
    assert "alive" not in view
    assert joint.view("one", make_batch()).reward.tolist() == [[2, 12], [102, 112]]


def test_steps_of_an_agent_terminate_when_it_leaves(joint: JointPolicy) -> None:
    assert joint.view("two", make_batch()).terminated.tolist() == [
        [False, True, False, False],
        [False, True, True, True],
    ]
    joint.spaces = Spaces(OBS, Discrete(100), num_agents=3, alive=True, reward_kind="shared")
    assert joint.view("two", make_batch()).terminated.tolist() == [[False] * 4, [False, False, True, True]]


def test_team_reads_the_steps_of_its_agents_together() -> None:
    joint = JointPolicy(SPACES, {"one": Add(MEMBER, 0), "two": Add(TEAM, 0)}, Seating({"one": [1], "two": [2, 0]}, 3))
    view = joint.view("two", make_batch())
    assert view.reward.tolist() == [[[2, 0], [12, 10]], [[102, 100], [112, 110]]]
    assert view.terminated.tolist() == [[False, False], [False, True]]
    assert view.alive.all()


def test_return_is_that_of_the_learning_policies(joint: JointPolicy) -> None:
    joint.learning = {"two": 0}
    mean, numbers = joint.summarize_returns(np.array([1.0, 3.0, -8.0]), 0, Phase.COLLECT)
    assert mean == 2.0
    assert numbers == {"one/return": -8.0, "two/return": 2.0}
    assert set(numbers) == set(joint.logged_info_keys)


def test_games_of_two_policies_are_won_drawn_or_lost() -> None:
    spaces = Spaces(OBS, Discrete(3), num_agents=2, reward_kind="opposed")
    member = Spaces(OBS, Discrete(3))
    seating = Seating({"me": [0], "other": [1]}, 2, rotate=True)
    joint = JointPolicy(spaces, {"me": RandomPolicy(member), "other": RandomPolicy(member)}, seating)
    joint.learning = {"me": 0}
    outcomes = []
    for env, returns in ((0, [1.0, -1.0]), (1, [1.0, -1.0]), (1, [0.0, 0.0])):
        mean, numbers = joint.summarize_returns(np.array(returns), env, Phase.EVAL)
        outcomes.append((mean, numbers["won"], numbers["drawn"], numbers["lost"]))
    assert outcomes == [(1.0, 1, 0, 0), (-1.0, 0, 0, 1), (0.0, 0, 1, 0)]


def test_opposed_returns_are_kept_per_agent() -> None:
    policy = RandomPolicy(Spaces(OBS, Discrete(3), num_agents=2, reward_kind="opposed", agent_names=("fox", "hen")))
    assert policy.summarize_returns(np.array([2.0, -2.0]), 0, Phase.COLLECT) == (
        0.0,
        {"fox/return": 2.0, "hen/return": -2.0},
    )
    policy = RandomPolicy(Spaces(OBS, Discrete(3), num_agents=2))
    assert policy.summarize_returns(np.array([2.0, 4.0]), 0, Phase.COLLECT) == (3.0, {})

from __future__ import annotations

import sys
from functools import partial
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete, Text

pytest.importorskip("pettingzoo")
pytest.importorskip("mpe2")

import zhixing as zx
from zhixing.envs.adapters import pettingzoo_envs
from zhixing.envs.adapters.pettingzoo_envs import PettingZooAECEnv, PettingZooParallelEnv
from zhixing.envs.env_spec import inspect_env
from zhixing.envs.vector.serial import SerialVectorEnv
from zhixing.envs.wrappers.agents import AgentPadding
from zhixing.envs.wrappers.flat_agents import FlatAgents, pad_agents
from zhixing.errors import UserError
from zhixing.utils.extras import install_hint


def make(name: str, **options: Any) -> Any:
    return pettingzoo_envs.make(name, options)


class LeavingAgentsEnv:
    """Agent k is terminated at step `deaths[k]`, or truncated at step `-deaths[k]` if that is negative. All remaining
    agents are truncated at step 4. The reward of agent k is k + 1."""

    metadata: ClassVar[dict[str, Any]] = {}
    render_mode = None
    possible_agents = ("a", "b", "c")

    def __init__(self, deaths: tuple[int, int, int]) -> None:
        self.deaths = deaths

    def observation_space(self, agent: str) -> gym.Space[Any]:
        return Box(1, 9, (self.possible_agents.index(agent) + 1,), np.float32)

    def action_space(self, agent: str) -> gym.Space[Any]:
        return Discrete(self.possible_agents.index(agent) + 2)

    def observe(self) -> dict[str, Any]:
        return {agent: np.full(self.observation_space(agent).shape, 1.0 + self.steps) for agent in self.agents}

    def reset(self, seed: Any = None, options: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
        self.agents, self.steps = list(self.possible_agents), 0
        return self.observe(), {agent: {} for agent in self.agents}

    def state(self) -> Any:
        return np.array([[self.steps, 7]])

    def step(self, actions: dict[str, Any]) -> tuple[dict[str, Any], ...]:
        assert sorted(actions) == sorted(self.agents)  # agents that left don't act
        self.last_actions = actions
        self.steps += 1
        obs, acting = self.observe(), self.agents
        dead = {agent: self.deaths["abc".index(agent)] == self.steps for agent in acting}
        late = {agent: self.steps in (4, -self.deaths["abc".index(agent)]) for agent in acting}
        truncated = {agent: late[agent] and not dead[agent] for agent in acting}
        self.agents = [agent for agent in acting if not dead[agent] and not truncated[agent]]
        rewards = {agent: float("abc".index(agent) + 1) for agent in acting}
        return obs, rewards, dead, truncated, {agent: {} for agent in acting}

    def close(self) -> None:
        pass


def test_agents_that_leave_observe_zeros_until_the_rest_is_truncated() -> None:
    env = PettingZooParallelEnv(LeavingAgentsEnv((2, 9, 9)))
    obs, info = env.reset(seed=0)
    np.testing.assert_array_equal(obs, [[1, 0, 0], [1, 1, 0], [1, 1, 1]])  # padded with zeros
    assert info["alive"].tolist() == [True, True, True]
    assert info["action_mask"].tolist() == [[True, True, False, False], [True, True, True, False], [True] * 4]
    assert info["state"].tolist() == [0, 7]
    env.step(np.array([1, 2, 3]))
    assert env.env.last_actions == {"a": 1, "b": 2, "c": 3}
    obs, reward, terminated, truncated, info = env.step(np.zeros(3, int))
    assert reward.tolist() == [1, 2, 3]  # an agent is rewarded for the step in which it leaves
    assert info["alive"].tolist() == [False, True, True]
    np.testing.assert_array_equal(obs, [[0, 0, 0], [3, 3, 0], [3, 3, 3]])
    assert info["action_mask"][0].tolist() == [True, False, False, False]
    obs, reward, terminated, truncated, info = env.step(np.zeros(3, int))
    assert reward.tolist() == [0, 2, 3]
    assert not terminated
    assert not truncated
    obs, reward, terminated, truncated, info = env.step(np.zeros(3, int))
    assert (terminated, truncated) == (False, True)
    np.testing.assert_array_equal(obs, [[0, 0, 0], [5, 5, 0], [5, 5, 5]])  # the true final observations
    assert info["alive"].tolist() == [False, True, True]  # truncated agents have a future, the dead one doesn't
    assert info["state"].tolist() == [4, 7]


def test_episode_terminates_when_the_last_agent_does() -> None:
    env = PettingZooParallelEnv(LeavingAgentsEnv((1, 3, 2)))
    for _ in range(2):  # the second episode is independent of the first
        env.reset(seed=0)
        ends = [env.step(np.zeros(3, int))[2:4] for _ in range(3)]
        assert ends == [(False, False), (False, False), (True, False)]


def test_episode_is_truncated_if_one_of_the_last_agents_is() -> None:
    env = PettingZooParallelEnv(LeavingAgentsEnv((4, 1, 9)))  # a dies at step 4, when c is truncated
    env.reset(seed=0)
    steps = [env.step(np.zeros(3, int)) for _ in range(4)]
    assert [step[2:4] for step in steps] == [(False, False)] * 3 + [(False, True)]
    assert steps[-1][4]["alive"].tolist() == [False, False, True]


def test_agent_truncated_earlier_does_not_truncate_the_episode() -> None:
    env = PettingZooParallelEnv(LeavingAgentsEnv((-1, 3, 2)))  # a is truncated at step 1; c and b terminate later
    env.reset(seed=0)
    steps = [env.step(np.zeros(3, int)) for _ in range(3)]
    assert [step[2:4] for step in steps] == [(False, False), (False, False), (True, False)]
    assert [step[4]["alive"].tolist() for step in steps] == [[False, True, True], [False, True, False], [False] * 3]


def test_environments_declare_their_reward_kind() -> None:
    kinds = {"mpe/simple_spread": "individual", "mpe/simple_tag": "opposed", "pettingzoo/tictactoe": "opposed"}
    for name, kind in kinds.items():
        assert zx.envs.make_vector(name, 1, backend="serial").spaces.reward_kind == kind

    def describe_leaving(**options: Any) -> Any:
        return inspect_env(PettingZooParallelEnv(LeavingAgentsEnv((2, 9, 9)), **options), "leaving")

    assert describe_leaving().spaces.individual_termination
    assert not describe_leaving(reward_kind="shared").spaces.individual_termination
    with pytest.raises(UserError, match="reward_kind is 'common'; allowed are shared, individual, opposed"):
        describe_leaving(reward_kind="common")


def test_spread_equals_mpe2() -> None:
    from mpe2 import simple_spread_v3

    env, reference = make("mpe/simple_spread", N=2, max_cycles=5), simple_spread_v3.parallel_env(N=2, max_cycles=5)
    obs, info = env.reset(seed=3)
    assert info == {}  # no masks, no leaving agents, no separate global state
    assert (env.num_agents, obs.shape, obs.dtype) == (2, (2, 12), np.float32)
    np.testing.assert_array_equal(obs, list(reference.reset(seed=3)[0].values()))
    for step in range(5):
        obs, reward, terminated, truncated, _ = env.step(np.array([step % 5, 2]))
        expected_obs, expected_reward, *_ = reference.step({"agent_0": step % 5, "agent_1": 2})
        np.testing.assert_array_equal(obs, list(expected_obs.values()))
        np.testing.assert_allclose(reward, list(expected_reward.values()), rtol=1e-6)
        assert (terminated, truncated) == (False, step == 4)


def test_shorter_observations_are_padded_with_zeros() -> None:
    env = make("mpe/simple_tag")  # three hunters observe 16 values, the prey 14
    obs, info = env.reset(seed=0)
    assert obs.shape == (4, 16)
    assert (obs[3, 14:] == 0).all()
    assert (obs[:3, 14:16] == 0).all()  # the prey's velocity, at rest
    obs, *_ = env.step(np.array([0, 0, 0, 2]))
    assert (obs[:3, 14] > 0).all()  # the hunters observe that it runs right
    assert (obs[3, 14:] == 0).all()
    assert "action_mask" not in info  # all have five actions
    env = make("mpe/simple_adversary")  # the adversary observes 8 values, the other agents 10
    obs, _ = env.reset(seed=0)
    assert obs.shape == (3, 10)
    assert (obs[0, 8:] == 0).all()
    assert (obs[1:, 8:] != 0).all()


def test_unequal_actions_are_masked() -> None:
    env = make("mpe/simple_speaker_listener")  # 3 messages and 5 moves; 3 and 11 observed values
    obs, info = env.reset(seed=0)
    assert (obs.shape, env.action_space) == ((2, 11), Discrete(5))
    masks = [[True, True, True, False, False], [True] * 5]
    assert info["action_mask"].tolist() == masks
    obs, *_, info = env.step(np.array([2, 1]))
    assert obs[1, 8:].tolist() == [0, 0, 1]  # the listener receives the third message
    assert info["action_mask"].tolist() == masks


def test_surplus_dimensions_of_continuous_actions_are_ignored() -> None:
    first, second = (make("mpe/simple_speaker_listener", continuous_actions=True) for _ in range(2))
    assert first.action_space == Box(0.0, 1.0, (5,), np.float32)
    first.reset(seed=0)
    second.reset(seed=0)
    rng = np.random.default_rng(0)
    actions = rng.random((2, 5), np.float32)
    changed = actions.copy()
    changed[0, 3:] = 0.5
    np.testing.assert_array_equal(first.step(actions)[0], second.step(changed)[0])
    changed[1, 3] += 0.1
    assert not np.array_equal(first.step(actions)[0], second.step(changed)[0])


def test_success_terminates_if_requested() -> None:
    env = make("mpe/simple_spread", terminate_on_success=True)
    env.reset(seed=0)
    world = env.env.unwrapped.world
    for x, agent, landmark in zip((-0.8, 0.0, 0.8), world.agents, world.landmarks, strict=True):
        agent.state.p_pos, landmark.state.p_pos = np.array([x, 0.0]), np.array([x, 0.0])
    assert env.step(np.zeros(3, int))[2:4] == (True, False)


def test_env_with_one_agent_has_no_agent_dimension() -> None:
    env = make("mpe/simple")
    obs, info = env.reset(seed=0)
    assert (obs.shape, info, getattr(env, "num_agents", 1)) == ((4,), {}, 1)
    obs, reward, *_ = env.step(1)
    assert obs.shape == (4,)
    assert isinstance(reward, float)
    assert inspect_env(env, "mpe/simple").spaces.agents == ()


def test_tictactoe_players_take_turns_and_the_winner_is_rewarded() -> None:
    env = make("pettingzoo/tictactoe")
    obs, info = env.reset(seed=0)
    assert (obs.shape, obs.dtype, info["turn"]) == ((2, 3, 3, 2), np.float32, 0)
    assert info["action_mask"].tolist() == [[True] * 9, [True] + [False] * 8]
    moves = [0, 3, 1, 4, 2]  # squares run down the columns: player 0 fills the first column
    total = np.zeros(2)
    for step, move in enumerate(moves):
        assert info["turn"] == step % 2
        action = np.zeros(2, int)
        action[info["turn"]] = move
        obs, reward, terminated, truncated, info = env.step(action)
        total += reward
        if step == 0:
            assert obs[0, 0, 0].tolist() == [1, 0]  # player 0 observes its own mark
            assert obs[1, 0, 0].tolist() == [0, 1]  # player 1 observes the opponent's mark
            assert info["action_mask"].tolist() == [[True] + [False] * 8, [False] + [True] * 8]
        assert (terminated, truncated) == (step == 4, False)
    assert reward.tolist() == [1, -1]
    assert total.tolist() == [1, -1]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_illegal_move_loses_as_in_pettingzoo() -> None:
    env = make("pettingzoo/connect_four")
    _, info = env.reset(seed=0)
    for _ in range(6):
        *_, info = env.step(np.array([3, 3]))
    assert not info["action_mask"][0, 3]  # the column is full
    _, reward, terminated, truncated, _ = env.step(np.array([3, 3]))
    assert reward.tolist() == [-1, 0]
    assert (terminated, truncated) == (True, False)


@pytest.mark.parametrize("game", ["connect_four", "leduc_holdem", "rps", "tictactoe", "texas_holdem"])
def test_games_are_zero_sum(game: str) -> None:
    env = make(f"pettingzoo/{game}")
    rng = np.random.default_rng(0)
    absolute_return = 0.0
    for episode in range(5):
        obs, info = env.reset(seed=0 if episode == 0 else None)
        total, over = np.zeros(2), False
        while not over:
            assert info["action_mask"].any(1).all()
            assert env.observation_space.contains(obs[0])
            action = np.array([rng.choice(np.flatnonzero(row)) for row in info["action_mask"]])
            obs, reward, terminated, truncated, info = env.step(action)
            total += reward
            over = terminated or truncated
        assert total.sum() == 0
        assert truncated == (game == "rps")  # which ends after a fixed number of rounds
        absolute_return += abs(total[0])
    assert absolute_return > 0


@pytest.mark.parametrize("name", ["mpe/simple_world_comm", "pettingzoo/connect_four", "pettingzoo/leduc_holdem"])
def test_vector_env_is_restored_by_replay(name: str) -> None:
    first, second = (SerialVectorEnv(partial(make, name), 2) for _ in range(2))
    rng = np.random.default_rng(0)

    def sample_actions(mask: Any) -> Any:
        return (rng.random(mask.shape) * mask).argmax(-1)

    _, info = first.reset(seed=1)
    second.reset(seed=5)
    for _ in range(40):  # into a later episode, started without a seed
        *_, info = first.step(sample_actions(info["action_mask"]))
    obs, _ = second.load_state_dict(first.state_dict())
    assert second.inexact == []
    np.testing.assert_array_equal(obs, first.buffers.obs)
    for _ in range(40):
        actions = sample_actions(info["action_mask"])
        expected_obs, expected_reward, *_, info = first.step(actions)
        obs, reward, *_ = second.step(actions)
        np.testing.assert_array_equal(obs, expected_obs)
        np.testing.assert_array_equal(reward, expected_reward)


def test_render_works_without_a_display() -> None:
    env = make("mpe/simple_spread", render_mode="rgb_array")
    env.reset(seed=0)
    image = env.render()
    assert image.dtype == np.uint8
    assert image.shape[2] == 3
    assert image.std() > 0
    env.close()


def test_names() -> None:
    names = pettingzoo_envs.names()
    assert {"mpe/simple_spread", "mpe/simple_tag", "pettingzoo/tictactoe", "pettingzoo/connect_four"} <= set(names)
    assert pettingzoo_envs.supports("mpe/simple_push")
    for invalid in ("mpe/simple_spread_v3", "mpe/tictactoe", "pettingzoo/simple_tag", "mpe/", "mpe"):
        assert not pettingzoo_envs.supports(invalid)


def test_invalid_options_are_rejected() -> None:
    with pytest.raises(UserError, match=r"no option 'cycles', allowed: N, local_ratio, .*mean 'max_cycles'"):
        make("mpe/simple_spread", cycles=3)
    with pytest.raises(UserError, match=r"can't be made with \(local_ratio=2\): AssertionError: local_ratio is a"):
        make("mpe/simple_spread", local_ratio=2)
    with pytest.raises(UserError, match="pettingzoo/tictactoe has no option 'size'"):
        make("pettingzoo/tictactoe", size=3)


@pytest.mark.parametrize(
    ("name", "package"), [("mpe/simple_spread", "mpe2"), ("pettingzoo/chess", "pettingzoo.classic")]
)
def test_missing_package_names_the_extra(name: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError) as caught:
        make(name)
    assert str(caught.value) == f"{name} needs the extra 'marl': {install_hint('marl')}"


def test_env_missing_in_the_installed_version_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mpe2.__path__", [])
    with pytest.raises(UserError, match="mpe/simple_line: the installed version of mpe2 has no simple_line"):
        make("mpe/simple_line")


def test_incompatible_spaces_are_rejected() -> None:
    box, other = Box(0, 1, (2,)), Box(0, 1, (2, 2))
    with pytest.raises(UserError, match="t has agents whose observations can't be padded to equal spaces"):
        AgentPadding("t", [box, other], [Discrete(2)] * 2)
    with pytest.raises(UserError, match="action spaces can't be padded to equal ones"):
        AgentPadding("t", [box] * 2, [Discrete(2), box])
    with pytest.raises(UserError, match="neither Box nor Discrete: Text"):
        AgentPadding("t", [Text(3)] * 2, [Discrete(2)] * 2)


def test_agents_with_other_kinds_of_spaces_become_vectors() -> None:
    grid = Dict({"observation": Box(0, 9, (2, 2), np.uint8), "action_mask": Box(0, 1, (3,), np.int8)})
    agents = pad_agents("t", [grid, Discrete(5)], [Discrete(3, start=4), Box(-1.0, 1.0, (2,))])
    assert isinstance(agents, FlatAgents)
    assert [space.shape for space in (agents.observation_space, agents.action_space)] == [(4,), (2,)]
    assert agents.agent_spaces[0] == (Box(0, 9, (2, 2), np.uint8), Discrete(3, start=4))
    obs = {0: {"observation": np.array([[1, 2], [3, 4]]), "action_mask": np.array([0, 1, 1])}, 1: 2}
    assert agents.stack_obs(obs).tolist() == [[1, 2, 3, 4], [2, 0, 0, 0]]
    assert agents.stack_masks(obs, {}, [0, 1]).tolist() == [[False, True, True], [True, False, False]]
    assert agents.to_agent_action(0, np.float32([4.9999, 0.0])) == 5
    assert agents.to_agent_action(1, np.float32([0.25, 3.0])).tolist() == [0.25, 1.0]


def test_spaces_that_no_array_stores_are_rejected() -> None:
    with pytest.raises(UserError, match="neither Box nor Discrete: Text"):
        pad_agents("t", [Text(3), Discrete(2)], [Discrete(2)] * 2)


@pytest.mark.parametrize("name", ["mappo", "ippo"])
def test_agents_with_other_kinds_of_spaces_need_several_policies(name: str) -> None:
    vector = zx.envs.make_vector("dummy_envs:make_mixed", 1, backend="serial")
    with pytest.raises(UserError, match=f"{name} needs agents whose spaces can be padded .*use multi_policy"):
        zx.algorithms.get(name).make(zx.config.load(algorithm=name, env="toy/team-match"), vector.spaces)


def test_equal_spaces_are_not_padded() -> None:
    padding = AgentPadding("t", [Box(0, 255, (4, 4, 1), np.uint8)] * 2, [MultiDiscrete([2, 3])] * 2)
    assert padding.observation_space == Box(0, 255, (4, 4, 1), np.uint8)
    assert padding.action_space == MultiDiscrete([2, 3])
    assert padding.valid_actions is None
    assert padding.to_agent_action(1, np.array([1, 2])).tolist() == [1, 2]
    padding = AgentPadding(
        "t", [Dict({"observation": Discrete(3), "action_mask": Box(0, 1, (2,))})] * 2, [Discrete(2)] * 2
    )
    obs = padding.stack_obs({1: {"observation": 2, "action_mask": np.array([0, 1])}})
    assert obs.tolist() == [[0, 0, 0], [0, 0, 1]]  # a discrete observation is one-hot encoded


def test_aec_env_removes_agents_that_are_out() -> None:
    from pettingzoo.utils.conversions import parallel_to_aec

    env = PettingZooAECEnv(parallel_to_aec(LeavingAgentsEnv((2, 9, 9))))  # type: ignore[arg-type]
    _, info = env.reset(seed=0)
    turns, totals, over = [], np.zeros(3), False
    while not over:
        turns.append(info["turn"])
        _, reward, terminated, truncated, info = env.step(np.zeros(3, int))
        totals += reward
        over = terminated or truncated
    assert turns == [0, 1, 2, 0, 1, 2, 1, 2, 1, 2]
    assert totals.tolist() == [2 * 1, 4 * 2, 4 * 3]
    assert (terminated, truncated) == (False, True)

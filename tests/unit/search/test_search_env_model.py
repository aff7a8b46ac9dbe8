"""Tests of searches in copies of environments."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from zhixing import envs
from zhixing.errors import UserError
from zhixing.search.board_game import random_action
from zhixing.search.env_model import EnvModel
from zhixing.search.evaluators import PlayoutEvaluator
from zhixing.search.tree import search


class CardsEnv(gym.Env[Any, Any]):
    """Take one of three cards per step. The mask forbids a random one. Observations are a dict."""

    def __init__(self) -> None:
        self.observation_space = gym.spaces.Dict(
            {"sum": gym.spaces.Box(0.0, 99.0, (1,)), "left": gym.spaces.Discrete(6)}
        )
        self.action_space = gym.spaces.Discrete(3, start=1)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.total, self.left = 0, 5
        return self._obs()

    def _obs(self) -> Any:
        self.forbidden = int(self.np_random.integers(3))
        mask = np.arange(3) != self.forbidden
        return {"sum": np.array([self.total], np.float32), "left": self.left}, {"action_mask": mask}

    def step(self, action: int) -> Any:
        assert action - 1 != self.forbidden
        self.total += action
        self.left -= 1
        obs, info = self._obs()
        return obs, float(action), self.left == 0, False, info


class SharedStateEnv(gym.Env[Any, Any]):
    """An environment whose copies share state."""

    shared: list[int] = []  # noqa: RUF012
    observation_space, action_space = gym.spaces.Box(0.0, 1e6, (1,)), gym.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action: int) -> Any:
        self.shared.append(action)
        return np.array([len(self.shared)], np.float32), 0.0, False, False, {}


ENVS = ["toy/match", "CartPole-v1", "unit.search.test_search_env_model:CardsEnv"]


@pytest.mark.parametrize("name", ENVS)
def test_branches_are_independent(name: str) -> None:
    """The same actions from one state have the same results, whatever was played from it in between."""
    model, rng = EnvModel(name), np.random.default_rng(0)
    state = model.initial_states(3, seed=5)
    for _ in range(2):
        state, _, ended = model.play(state, random_action(model.legal_actions(state), rng))
        assert not ended.any()
    action = random_action(model.legal_actions(state), rng)
    first, reward, ended = model.play(state, action)
    for _ in range(3):
        model.play(state, random_action(model.legal_actions(state), rng))
        model.playout(state, rng)
    second, second_reward, second_ended = model.play(state, action)
    np.testing.assert_array_equal(reward, second_reward)
    np.testing.assert_array_equal(ended, second_ended)
    for a, b in zip(first, second, strict=True):
        for key in a.obs if isinstance(a.obs, dict) else [...]:
            np.testing.assert_array_equal(a.obs[key], b.obs[key])
        np.testing.assert_array_equal(a.mask, b.mask)


@pytest.mark.parametrize("name", ENVS)
def test_model_predicts_the_env(name: str) -> None:
    """Models of running environments, in the middle of their episodes, predict the next step."""
    env = envs.make_vector(name, 3, "serial")
    model, rng = EnvModel(name), np.random.default_rng(0)
    obs, info = env.reset(seed=0)
    for _ in range(25):
        state = model.from_env(env)
        legal = info.get("action_mask", np.ones((3, model.num_actions), bool)).copy()
        np.testing.assert_array_equal(model.legal_actions(state), legal)
        action = random_action(legal, rng)
        after, reward, ended = model.play(state, action)
        obs, env_reward, terminated, truncated, info = env.step(action + model.first_action)
        np.testing.assert_allclose(reward, env_reward, rtol=1e-6)
        np.testing.assert_array_equal(ended, terminated | truncated)
        final_obs = info["final_obs"] if ended.any() else obs
        predicted = model.observe(after)
        for key in predicted if isinstance(predicted, dict) else [...]:
            for row in range(3):
                expected = (final_obs if ended[row] else obs)[key][row]
                np.testing.assert_array_equal(predicted[key][row], expected)
    env.close()


def test_playouts_are_discounted_and_limited() -> None:
    rng = np.random.default_rng(0)
    # CartPole has reward 1: three steps return 1 + 1/2 + 1/4
    model = EnvModel("CartPole-v1", gamma=0.5, playout_steps=3)
    assert model.playout(model.initial_states(2), rng).tolist() == [1.75, 1.75]
    # five cards of 1 to 3 sum up to between 5 and 15
    cards = EnvModel("unit.search.test_search_env_model:CardsEnv", gamma=1.0)
    returns = cards.playout(cards.initial_states(50), rng)
    assert returns.min() >= 5
    assert returns.max() <= 15
    assert abs(returns.mean() - 10.0) < 1.0


def test_search_finds_the_best_cards() -> None:
    rng = np.random.default_rng(0)
    model = EnvModel("unit.search.test_search_env_model:CardsEnv", gamma=1.0)
    state, total = model.initial_states(4), np.zeros(4)
    best = np.zeros(4)
    while not model.is_over(state).any():
        legal = model.legal_actions(state)
        best += np.where(legal, np.arange(3) + 1, 0).max(-1)
        result = search(model, state, 60, PlayoutEvaluator(), rng, select="uct", c=0.7)
        assert (result.visits[~legal] == 0).all()
        state, reward, _ = model.play(state, result.visits.argmax(-1))
        total += reward
    # the forbidden card doesn't depend on the action: greedy play is optimal
    assert (total >= best - 1).all()
    assert total.sum() >= best.sum() - 1


def test_search_balances_a_pole() -> None:
    model, rng = EnvModel("CartPole-v1", gamma=0.95, playout_steps=10), np.random.default_rng(0)
    state = model.initial_states(1)
    for _ in range(50):  # a random policy drops the pole after about 22 steps
        result = search(model, state, 12, PlayoutEvaluator(), rng, select="uct", c=1.0)
        state, _, ended = model.play(state, result.visits.argmax(-1))
        assert not ended.any()


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("Pendulum-v1", "one agent with Discrete actions"),
        ("mpe/simple_spread", "one agent with Discrete actions"),
        ("unit.search.test_search_env_model:SharedStateEnv", "a copy of it behaves differently from the original"),
    ],
)
def test_unsearchable_envs_are_rejected(name: str, reason: str) -> None:
    if name.startswith("mpe"):
        pytest.importorskip("mpe2")
    with pytest.raises(UserError, match=f"{name} can't be searched.*{reason}"):
        EnvModel(name)


def test_native_back_end_is_rejected() -> None:
    env = envs.make_vector("CartPole-v1", 2, "native")
    env.reset(seed=0)
    with pytest.raises(UserError, match="CartPole-v1 can't be searched with the back end native"):
        EnvModel("CartPole-v1").from_env(env)

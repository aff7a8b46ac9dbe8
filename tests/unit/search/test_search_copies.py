from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from zhixing import envs
from zhixing.errors import UserError
from zhixing.search.copies import Copies
from zhixing.search.evaluate import Playouts
from zhixing.search.games import random_action
from zhixing.search.tree import search


class Cards(gym.Env[Any, Any]):
    """Draw one of three cards per step; one is forbidden, which one the mask tells. Observations are a dict."""

    def __init__(self) -> None:
        self.observation_space = gym.spaces.Dict(
            {"sum": gym.spaces.Box(0.0, 99.0, (1,)), "left": gym.spaces.Discrete(6)}
        )
        self.action_space = gym.spaces.Discrete(3, start=1)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.total, self.left = 0, 5
        return self._show()

    def _show(self) -> Any:
        self.forbidden = int(self.np_random.integers(3))
        mask = np.arange(3) != self.forbidden
        return {"sum": np.array([self.total], np.float32), "left": self.left}, {"action_mask": mask}

    def step(self, action: int) -> Any:
        assert action - 1 != self.forbidden
        self.total += action
        self.left -= 1
        obs, info = self._show()
        return obs, float(action), self.left == 0, False, info


class Stubborn(gym.Env[Any, Any]):
    """A task whose copies share what they know."""

    shared: list[int] = []  # noqa: RUF012
    observation_space, action_space = gym.spaces.Box(0.0, 1e6, (1,)), gym.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action: int) -> Any:
        self.shared.append(action)
        return np.array([len(self.shared)], np.float32), 0.0, False, False, {}


TASKS = ["toy/match", "CartPole-v1", "unit.search.test_search_copies:Cards"]


@pytest.mark.parametrize("name", TASKS)
def test_branches_go_their_own_ways(name: str) -> None:
    """From one state, the same actions lead to the same, whatever was played from it in between."""
    model, rng = Copies(name), np.random.default_rng(0)
    state = model.start(3, seed=5)
    for _ in range(2):
        state, _, ended = model.play(state, random_action(model.legal(state), rng))
        assert not ended.any()
    action = random_action(model.legal(state), rng)
    once, reward, ended = model.play(state, action)
    for _ in range(3):
        model.play(state, random_action(model.legal(state), rng))
        model.playout(state, rng)
    again, its_reward, its_ended = model.play(state, action)
    np.testing.assert_array_equal(reward, its_reward)
    np.testing.assert_array_equal(ended, its_ended)
    for mine, its in zip(once, again, strict=True):
        for key in mine.obs if isinstance(mine.obs, dict) else [...]:
            np.testing.assert_array_equal(mine.obs[key], its.obs[key])
        np.testing.assert_array_equal(mine.mask, its.mask)


@pytest.mark.parametrize("name", TASKS)
def test_goes_as_the_environment_goes(name: str) -> None:
    """States taken from running environments, in the middle of their episodes, foresee what these do next."""
    env = envs.make_vector(name, 3, "serial")
    model, rng = Copies(name), np.random.default_rng(0)
    obs, info = env.reset(seed=0)
    for _ in range(25):
        state = model.from_env(env)
        legal = info.get("action_mask", np.ones((3, model.num_actions), bool)).copy()
        np.testing.assert_array_equal(model.legal(state), legal)
        action = random_action(legal, rng)
        after, reward, ended = model.play(state, action)
        obs, its_reward, terminated, truncated, info = env.step(action + model.first_action)
        np.testing.assert_allclose(reward, its_reward, rtol=1e-6)
        np.testing.assert_array_equal(ended, terminated | truncated)
        seen = info["final_obs"] if ended.any() else obs
        mine = model.observe(after)
        for key in mine if isinstance(mine, dict) else [...]:
            for row in range(3):
                expected = (seen if ended[row] else obs)[key][row]
                np.testing.assert_array_equal(mine[key][row], expected)
    env.close()


def test_playouts_are_discounted_and_limited() -> None:
    rng = np.random.default_rng(0)
    # each step of CartPole pays 1: three steps are worth 1 + 1/2 + 1/4
    model = Copies("CartPole-v1", gamma=0.5, limit=3)
    assert model.playout(model.start(2), rng).tolist() == [1.75, 1.75]
    # cards of at most 3, of which one in three is forbidden: five draws pay between 5 and 15
    cards = Copies("unit.search.test_search_copies:Cards", gamma=1.0)
    returns = cards.playout(cards.start(50), rng)
    assert returns.min() >= 5
    assert returns.max() <= 15
    assert abs(returns.mean() - 10.0) < 1.0


def test_search_with_copies_finds_the_best() -> None:
    rng = np.random.default_rng(0)
    model = Copies("unit.search.test_search_copies:Cards", gamma=1.0)
    state, total = model.start(4), np.zeros(4)
    best = np.zeros(4)
    while not model.over(state).any():
        legal = model.legal(state)
        best += np.where(legal, np.arange(3) + 1, 0).max(-1)
        found = search(model, state, 60, Playouts(), rng, select="uct", c=0.7)
        assert (found.visits[~legal] == 0).all()
        state, reward, _ = model.play(state, found.visits.argmax(-1))
        total += reward
    # which card is forbidden next doesn't depend on what is drawn: greedy play is the best
    assert (total >= best - 1).all()
    assert total.sum() >= best.sum() - 1


def test_search_balances_a_pole() -> None:
    model, rng = Copies("CartPole-v1", gamma=0.95, limit=10), np.random.default_rng(0)
    state = model.start(1)
    for _ in range(50):  # random play falls after about 22 steps
        found = search(model, state, 12, Playouts(), rng, select="uct", c=1.0)
        state, _, ended = model.play(state, found.visits.argmax(-1))
        assert not ended.any()


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("Pendulum-v1", "one agent with Discrete actions"),
        ("mpe/simple_spread", "one agent with Discrete actions"),
        ("unit.search.test_search_copies:Stubborn", "a copy of it goes another way than the original"),
    ],
)
def test_what_cannot_be_searched_is_told(name: str, reason: str) -> None:
    if name.startswith("mpe"):
        pytest.importorskip("mpe2")
    with pytest.raises(UserError, match=f"{name} can't be searched.*{reason}"):
        Copies(name)


def test_native_environments_have_no_states_to_search() -> None:
    env = envs.make_vector("CartPole-v1", 2, "native")
    env.reset(seed=0)
    with pytest.raises(UserError, match="the back end native of CartPole-v1 can't be searched"):
        Copies("CartPole-v1").from_env(env)

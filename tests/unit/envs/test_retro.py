"""Games of stable-retro, tested with the free game that it includes."""

from __future__ import annotations

import re
import sys
from typing import Any

import numpy as np
import pytest

from zhixing.envs import make, make_vector
from zhixing.envs.adapters import retro_games
from zhixing.errors import UserError
from zhixing.utils.extras import install_hint

GAME = "retro/Airstriker-Genesis-v0"


def test_any_game_name_is_accepted() -> None:
    assert retro_games.supports("retro/Anything")
    assert not retro_games.supports("retro/")
    with pytest.raises(UserError, match="unknown environment 'retro'"):
        make("retro")


def test_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "stable_retro", None)
    with pytest.raises(UserError, match=re.escape(install_hint("mario"))):
        make("retro/X")
    monkeypatch.setattr(retro_games, "find_spec", lambda name: None)
    assert retro_games.names() == []


def test_invalid_options_are_rejected() -> None:
    with pytest.raises(UserError, match=r"env.actions='some': allowed are discrete, multi_discrete"):
        make("retro/X", actions="some")
    with pytest.raises(UserError, match=r"retro/X has no option 'stat', allowed: state, .*did you mean 'state'"):
        make("retro/X", stat="Level1")


@pytest.fixture
def retro() -> Any:
    return pytest.importorskip("stable_retro")


@pytest.mark.usefixtures("retro")
def test_free_game_resumes_exactly() -> None:
    assert GAME in retro_games.names()
    assert not any("Sonic" in name for name in retro_games.names())  # a patch for a ROM isn't a ROM
    first = make_vector(GAME, 1, "serial", options={"render_mode": "rgb_array", "noops": 8})
    obs, _ = first.reset(seed=0)
    assert obs.shape == (1, 4, 84, 84)
    rng = np.random.default_rng(0)
    for _ in range(20):
        first.step(rng.integers(0, first.single_action_space.n, 1))
    state, image = first.state_dict(), first.render()
    later_actions = rng.integers(0, first.single_action_space.n, (150, 1))
    expected_steps = [[array.copy() for array in first.step(actions)[:4]] for actions in later_actions]
    assert sum(reward[0] for _, reward, _, _ in expected_steps) > 0
    first.close()
    second = make_vector(GAME, 1, "serial", options={"render_mode": "rgb_array", "noops": 8})
    second.reset(seed=9)
    second.load_state_dict(state)
    assert second.inexact == []
    np.testing.assert_array_equal(second.render(), image)
    for actions, expected_step in zip(later_actions, expected_steps, strict=True):
        for actual, expected in zip(second.step(actions)[:4], expected_step, strict=True):
            np.testing.assert_array_equal(actual, expected)
    second.close()


@pytest.mark.usefixtures("retro")
def test_second_game_in_one_process_is_rejected() -> None:
    env = make(GAME)
    with pytest.raises(UserError, match=r"one game per process.*vector.backend=process"):
        make(GAME)
    env.close()
    env = make(GAME, actions="multi_discrete", size=None, grayscale=False, stack=1)
    env.reset(seed=0)
    assert env.step(env.action_space.sample())[0].shape == env.observation_space.shape
    env.close()


@pytest.mark.usefixtures("retro")
def test_unknown_games_states_and_missing_roms_are_rejected() -> None:
    with pytest.raises(UserError, match="unknown game 'retro/Airstrik-Genesis-v0': did you mean 'retro/Airstriker"):
        make("retro/Airstrik-Genesis-v0")
    with pytest.raises(UserError, match=r"unknown state 'Level9'.*Level1"):
        make(GAME, state="Level9")
    with pytest.raises(UserError, match=r"needs its ROM.*python -m stable_retro.import DIR"):
        make("retro/SuperMarioBros-Nes-v0")

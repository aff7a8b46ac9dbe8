"""Box2D environments are restored exactly in the middle of any episode, not only the first."""

from __future__ import annotations

import numpy as np
import pytest

import zhixing as zx

pytest.importorskip("Box2D")


@pytest.mark.parametrize("name", ["BipedalWalker-v3", "CarRacing-v3", "LunarLander-v3"])
def test_later_episode_is_restored_exactly(name: str) -> None:
    first, second = (zx.envs.make_vector(name, 1, backend="serial", options={"max_episode_steps": 60}) for _ in "ab")
    try:
        first.single_action_space.seed(1)
        actions = [np.asarray([first.single_action_space.sample()]) for _ in range(460)]
        first.reset(seed=3)
        for action in actions[:400]:  # at least six episodes, ending in the middle of one
            first.step(action)
        second.load_state_dict(first.state_dict())
        assert list(second.inexact) == []
        for action in actions[400:]:
            expected_obs, expected_reward, *_ = first.step(action)
            obs, reward, *_ = second.step(action)
            assert obs.tobytes() == expected_obs.tobytes()
            assert reward == expected_reward
    finally:
        first.close()
        second.close()

"""Box2D tasks are restored exactly in the middle of any episode, not only of the first."""

from __future__ import annotations

import numpy as np
import pytest

import zhixing as zx

pytest.importorskip("Box2D")


@pytest.mark.parametrize("name", ["BipedalWalker-v3", "CarRacing-v3", "LunarLander-v3"])
def test_a_later_episode_is_restored_exactly_in_another_environment(name: str) -> None:
    vector, other = (zx.envs.make_vector(name, 1, backend="serial", options={"max_episode_steps": 60}) for _ in "ab")
    try:
        vector.single_action_space.seed(1)
        actions = [np.asarray([vector.single_action_space.sample()]) for _ in range(460)]
        vector.reset(seed=3)
        for action in actions[:400]:  # at least six episodes, and into the middle of the next
            vector.step(action)
        other.load_state_dict(vector.state_dict())
        assert list(other.inexact) == []
        for action in actions[400:]:
            obs, reward, *_ = vector.step(action)
            same, same_reward, *_ = other.step(action)
            assert obs.tobytes() == same.tobytes()
            assert reward == same_reward
    finally:
        vector.close()
        other.close()

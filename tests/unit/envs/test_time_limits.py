"""The option `max_episode_steps`: every environment accepts it, saves its count and reports it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import zhixing as zx
from zhixing import envs
from zhixing.envs.vector import backend_choice

ENVS: dict[str, dict[str, Any]] = {
    "toy/reach": {},
    "toy/team-match": {},
    "skirmish/3m": {},
    "CartPole-v1": {},
    "dummy_envs:EndlessEnv": {},
    "dummy_envs:FixedLengthEnv": {"agents": 2},
}


def truncated_lengths(vector: envs.VectorEnv, steps: int) -> list[int]:
    """Return the lengths of the first environment's truncated episodes, within `steps` random steps."""
    _, info = vector.reset(seed=0)
    lengths, length = [], 0
    space = vector.spaces.action
    space.seed(0)
    for _ in range(steps):
        mask = info.get("action_mask")
        masks = [None if mask is None else mask[i] for i in range(vector.num_envs)]
        actions = [vector.spaces.flatten_action(backend_choice.random_action(vector.spaces, row)) for row in masks]
        _, _, _, truncated, info = vector.step(np.array(actions))
        length += 1
        if truncated[0]:
            lengths.append(length)
            length = 0
    return lengths


@pytest.mark.parametrize("name", ENVS)
def test_every_env_accepts_a_time_limit(name: str) -> None:
    vector = envs.make_vector(name, 2, backend="serial", options={**ENVS[name], "max_episode_steps": 3})
    assert truncated_lengths(vector, 9) == [3, 3, 3]
    assert vector.max_episode_steps == 3
    vector.close()


def test_process_and_native_backends_apply_the_limit() -> None:
    for backend, name in (("process", "dummy_envs:EndlessEnv"), ("native", "CartPole-v1")):
        vector = envs.make_vector(name, 2, backend=backend, options={"max_episode_steps": 3})
        assert truncated_lengths(vector, 6) == [3, 3]
        assert vector.max_episode_steps == 3
        vector.close()


def test_registered_limit_is_reported() -> None:
    for backend, limit in (("serial", 500), ("native", 500)):
        vector = envs.make_vector("CartPole-v1", 2, backend=backend)
        assert vector.max_episode_steps == limit
        vector.close()
    vector = envs.make_vector("dummy_envs:EndlessEnv", 1, backend="serial")
    assert vector.max_episode_steps is None
    vector.close()


@pytest.mark.parametrize("value", [0, -2, 2.5, True, "ten"])
@pytest.mark.parametrize("name", ["toy/reach", "CartPole-v1", "dummy_envs:EndlessEnv"])
def test_invalid_limit_is_rejected(name: str, value: Any) -> None:
    with pytest.raises(zx.UserError, match=r"max_episode_steps=.* integers of at least 1"):
        envs.make(name, max_episode_steps=value)


@pytest.mark.parametrize("name", ["toy/reach", "dummy_envs:EndlessEnv"])
def test_step_count_is_restored_mid_episode(name: str) -> None:
    options = {"max_episode_steps": 10}
    first, second = (envs.make_vector(name, 1, backend="serial", options=options) for _ in range(2))
    first.reset(seed=0)
    action = np.array([first.spaces.action.sample()])
    for _ in range(7):
        first.step(action)
    second.load_state_dict(first.state_dict())
    assert [bool(second.step(action)[3][0]) for _ in range(3)] == [False, False, True]
    first.close()
    second.close()


def time_limit_result(env: str, **options: Any) -> tuple[str, str]:
    result = next(result for result in envs.check_env(env, **options) if result.check == "time limit")
    return result.status, result.message


def test_check_env_warns_without_a_time_limit() -> None:
    status, message = time_limit_result("dummy_envs:EndlessEnv")
    assert status == "warning"
    assert "no episode ended within 1,000 steps" in message
    assert "env.max_episode_steps" in message
    assert time_limit_result("dummy_envs:EndlessEnv", max_episode_steps=5)[0] == "ok"
    # also if the limit is longer than the check
    assert time_limit_result("dummy_envs:EndlessEnv", max_episode_steps=5_000)[0] == "ok"


def test_check_env_warns_if_only_termination_ends_episodes() -> None:
    status, message = time_limit_result("dummy_envs:TerminatingEnv")
    assert status == "warning"
    assert "episodes end, but none was truncated" in message
    assert time_limit_result("dummy_envs:FixedLengthEnv")[0] == "ok"  # it truncates by itself

"""The option `max_episode_steps`: taken by every environment, saved in the middle of episodes, and known to others."""

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


def lengths(vector: envs.VectorEnv, steps: int) -> list[int]:
    """After how many steps the first environment was truncated, within `steps` steps of allowed actions."""
    _, info = vector.reset(seed=0)
    found, since = [], 0
    space = vector.spaces.action
    space.seed(0)
    for _ in range(steps):
        mask = info.get("action_mask")
        actions = [backend_choice.random_action(space, None if mask is None else mask[i], vector.spaces.num_agents)
                   for i in range(vector.num_envs)]  # fmt: skip
        _, _, _, truncated, info = vector.step(np.array(actions))
        since += 1
        if truncated[0]:
            found.append(since)
            since = 0
    return found


@pytest.mark.parametrize("name", ENVS)
def test_every_environment_takes_a_time_limit(name: str) -> None:
    vector = envs.make_vector(name, 2, backend="serial", options={**ENVS[name], "max_episode_steps": 3})
    assert lengths(vector, 9) == [3, 3, 3]
    assert vector.max_episode_steps == 3
    vector.close()


def test_worker_processes_and_native_environments_have_it_too() -> None:
    for backend, name in (("process", "dummy_envs:EndlessEnv"), ("native", "CartPole-v1")):
        vector = envs.make_vector(name, 2, backend=backend, options={"max_episode_steps": 3})
        assert lengths(vector, 6) == [3, 3]
        assert vector.max_episode_steps == 3
        vector.close()


def test_the_usual_limit_of_an_environment_is_known() -> None:
    for backend, limit in (("serial", 500), ("native", 500)):
        vector = envs.make_vector("CartPole-v1", 2, backend=backend)
        assert vector.max_episode_steps == limit
        vector.close()
    vector = envs.make_vector("dummy_envs:EndlessEnv", 1, backend="serial")
    assert vector.max_episode_steps is None
    vector.close()


@pytest.mark.parametrize("value", [0, -2, 2.5, True, "ten"])
@pytest.mark.parametrize("name", ["toy/reach", "CartPole-v1", "dummy_envs:EndlessEnv"])
def test_what_is_no_number_of_steps_is_rejected(name: str, value: Any) -> None:
    with pytest.raises(zx.UserError, match=r"max_episode_steps=.* whole numbers from 1"):
        envs.make(name, max_episode_steps=value)


@pytest.mark.parametrize("name", ["toy/reach", "dummy_envs:EndlessEnv"])
def test_its_count_is_restored_in_the_middle_of_an_episode(name: str) -> None:
    options = {"max_episode_steps": 10}
    one, other = (envs.make_vector(name, 1, backend="serial", options=options) for _ in range(2))
    one.reset(seed=0)
    action = np.array([one.spaces.action.sample()])
    for _ in range(7):
        one.step(action)
    other.load_state_dict(one.state_dict())
    assert [bool(other.step(action)[3][0]) for _ in range(3)] == [False, False, True]
    one.close()
    other.close()


def words(task: str, **options: Any) -> tuple[str, str]:
    finding = next(finding for finding in envs.check(task, **options) if finding.check == "time limit")
    return finding.mark, finding.words


def test_check_warns_of_environments_without_a_time_limit() -> None:
    mark, said = words("dummy_envs:EndlessEnv")
    assert mark == "note"
    assert "no episode ended within 1000 steps" in said
    assert "env.max_episode_steps" in said
    assert words("dummy_envs:EndlessEnv", max_episode_steps=5)[0] == "ok"
    assert words("dummy_envs:EndlessEnv", max_episode_steps=5_000)[0] == "ok"  # none ends in the trial, but it is there


def test_check_warns_where_only_termination_ends_episodes() -> None:
    mark, said = words("dummy_envs:TerminatingEnv")
    assert mark == "note"
    assert "no time limit was found" in said
    assert words("dummy_envs:FixedLengthEnv")[0] == "ok"  # its own truncation is seen

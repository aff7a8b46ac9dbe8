"""Environments with Dict, Tuple and MultiBinary actions: back ends, saved states, checks and crash reports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dummy_envs
import gymnasium as gym
import numpy as np
import pytest
from conftest import differing_tensors
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import AutoresetMode

import zhixing as zx
from zhixing.core.tree import tree_leaves
from zhixing.envs import FailurePolicy, make_vector
from zhixing.envs.checker.env_checker import check_env
from zhixing.envs.crash.crash_report import read, reproduce
from zhixing.envs.wrappers.agents import AgentPadding
from zhixing.errors import EnvCrashError, UserError

DICT_OBS = "dummy_envs:DictObsEnv"
CRASHING = "test_composite_actions:FailsAtFiveSteps"


class FailsAtFiveSteps(gym.Env):
    """Fails at the fifth step if that action has part 2."""

    observation_space, action_space = Box(0.0, 1.0, (1,)), dummy_envs.HYBRID

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.t = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        assert self.action_space.contains(action)
        self.t += 1
        if self.t == 5 and action["part"] == 2:
            raise ZeroDivisionError(f"{action['tools'][1][1, 1]:.3f}")
        return np.zeros(1, np.float32), 0.0, False, False, {}


@pytest.fixture(autouse=True)
def _module_of_this_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def act_until_crash(env: Any) -> None:
    for seed in range(100):
        rewards(env, 5, seed)
        env.reset()


def rewards(env: Any, steps: int, seed: int) -> list[list[float]]:
    env.action_space.seed(seed)
    return [env.step(env.action_space.sample())[1].tolist() for _ in range(steps)]


@pytest.mark.parametrize("kind", ["hybrid", "bits"])
def test_back_ends_pass_on_the_same_actions(kind: str) -> None:
    results = []
    for backend in ("serial", "process"):
        env = make_vector(DICT_OBS, 3, backend, 2 if backend == "process" else None, {"kind": kind})
        env.reset(seed=0)
        results.append(rewards(env, 12, seed=1))
        env.close()
    assert results[0] == results[1]
    assert len(np.unique(results[0])) > 3


def test_states_continue_after_recorded_actions() -> None:
    env, other = (make_vector(DICT_OBS, 2, "serial", options={"kind": "hybrid"}) for _ in range(2))
    env.reset(seed=0)
    rewards(env, 5, seed=1)  # in the middle of an episode of 8 steps
    other.load_state_dict(env.state_dict())
    assert other.inexact == []
    assert rewards(env, 12, seed=2) == rewards(other, 12, seed=2)


def test_send_takes_the_actions_of_some_environments() -> None:
    env, reference = (make_vector(DICT_OBS, 2, "serial", options={"kind": "hybrid"}) for _ in range(2))
    env.reset(seed=0)
    reference.reset(seed=0)
    actions = env.action_space.sample()
    env.send(env.spaces.unflatten_action(env.spaces.flatten_action(actions)[1:]), np.array([1]))
    _, _, reward, *_ = env.recv()
    assert reward.tolist() == reference.step(actions)[1][1:].tolist()


def hybrid_vector(num_envs: int) -> gym.vector.VectorEnv:
    env_fns = [lambda: dummy_envs.DictObsEnv("hybrid")] * num_envs
    return gym.vector.SyncVectorEnv(env_fns, autoreset_mode=AutoresetMode.SAME_STEP)


def test_vector_environments_of_users_get_elements_of_their_space() -> None:
    env = make_vector(hybrid_vector, 3)
    assert env.backend == "native"
    env.reset(seed=0)
    results = rewards(env, 12, seed=1)
    assert np.isfinite(results).all()
    assert len(np.unique(results)) > 10


def test_wrong_actions_are_rejected() -> None:
    env = make_vector(DICT_OBS, 2, "serial", options={"kind": "hybrid"})
    env.reset(seed=0)
    with pytest.raises(UserError, match=r"is not in the space Dict"):
        env.step(np.zeros((2, 10)))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        (DICT_OBS, {"kind": "hybrid"}),
        (DICT_OBS, {"kind": "hybrid", "agents": 2}),
        (DICT_OBS, {"kind": "bits"}),
        ("dummy_envs:MaskedHybridEnv", {}),
        ("dummy_envs:MaskedHybridEnv", {"agents": 2}),
        ("toy/throw", {}),
    ],
)
def test_checks_pass(name: str, options: dict[str, Any]) -> None:
    results = check_env(name, **options)
    assert {result.check: result.message for result in results if result.status == "error"} == {}
    assert any(result.check == "speed" and "steps/s" in result.message for result in results)


def test_masks_must_cover_the_choices() -> None:
    class WrongMask(dummy_envs.MaskedHybridEnv):
        def _observe(self) -> tuple[np.ndarray, dict]:
            obs, info = super()._observe()
            return obs, {"action_mask": info["action_mask"][:5]}

    class MaskedBits(dummy_envs.DictObsEnv):
        def _observe(self) -> tuple[dict, dict]:
            return super()._observe()[0], {"action_mask": np.ones(3)}

    with pytest.raises(UserError, match=r"action mask of shape \(5,\); it must have shape \(6,\)"):
        make_vector(WrongMask, 1, "serial")
    with pytest.raises(UserError, match=r"action mask, but its action space MultiBinary\(3\) has no discrete choices"):
        make_vector(lambda: MaskedBits("bits"), 1, "serial")


def test_crash_is_reproduced(tmp_path: Path) -> None:
    env = make_vector(CRASHING, 2, "serial", failure_policy=FailurePolicy("stop", None, tmp_path))
    env.reset(seed=0)
    with pytest.raises(EnvCrashError):
        act_until_crash(env)
    (file,) = tmp_path.glob("crash-*.json")
    assert np.shape(read(file).actions) == (5, 10)
    reproduction = reproduce(file, CRASHING)
    assert reproduction.same, reproduction.message


def test_agents_of_pettingzoo_get_elements_of_their_space() -> None:
    padding = AgentPadding("env", [Box(0, 1, (2,))] * 2, [dummy_envs.HYBRID] * 2)
    assert padding.action_space == dummy_envs.HYBRID
    element = dummy_envs.HYBRID.sample()
    returned = padding.to_agent_action(1, element)
    assert all(np.array_equal(a, b) for a, b in zip(tree_leaves(returned), tree_leaves(element), strict=True))
    with pytest.raises(UserError, match="can't be padded to equal ones"):
        AgentPadding("env", [Box(0, 1, (2,))] * 2, [dummy_envs.HYBRID, Discrete(2)])


def test_training_is_the_same_in_processes_and_after_a_resume(short_config: Any, tmp_path: Path) -> None:
    settings = {"env__kind": "hybrid", "net__cnn": "simple", "num_envs": 2, "rollout_steps": 15, "eval_every": 0}
    for backend in ("serial", "process"):
        cfg = short_config("ppo", DICT_OBS, env_steps=90, vector__backend=backend, **settings)
        zx.Session(cfg, tmp_path / backend, quiet=True).run()
    cfg = short_config("ppo", DICT_OBS, env_steps=30, vector__backend="process", **settings)
    zx.Session(cfg, tmp_path / "parts", quiet=True).run()  # stops in the middle of the second episodes
    zx.Session.resume(tmp_path / "parts", env_steps=90, quiet=True).run()
    assert differing_tensors(tmp_path / "serial", tmp_path / "process") == []
    assert differing_tensors(tmp_path / "serial", tmp_path / "parts") == []

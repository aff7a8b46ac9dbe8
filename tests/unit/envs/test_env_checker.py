"""`zhixing check` and `zx.envs.check_env`: each fault is reported by its check, and by no other check."""

from __future__ import annotations

import re
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import broken_envs as broken
import gymnasium as gym
import numpy as np
import pytest
from conftest import cli_exit_code

import zhixing as zx
from zhixing.envs.checker.env_checker import CHECKS, CheckResult
from zhixing.errors import EnvCrashError, UserError

FAULTS: dict[type, tuple[str, str]] = {
    broken.UnsupportedSpace: ("spaces", "can't be stored as arrays; allowed are Box"),
    broken.MissingActionSpace: ("spaces", "MissingActionSpace has no action_space; set it to .* in __init__"),
    broken.WrongShape: ("observations", r"its observation has shape \(1,\); its space has shape \(2,\) \(at step 3\)"),
    broken.WrongDtype: ("observations", "its observation has dtype float32; its space has dtype uint8"),
    broken.TooLargeForDtype: ("observations", "contains 300"),
    broken.InvalidDiscreteObs: ("observations", r"contains 3; Discrete\(3\) allows 0 to 2"),
    broken.OutOfBounds: ("observations", "at step 3, outside Box.*; widen the bounds"),
    broken.NanObs: ("observations", "contains NaN or infinity at step 3"),
    broken.NanFinalObs: ("observations", "contains NaN or infinity at step 20"),
    broken.NanReward: ("rewards", r"its reward is nan; rewards must be finite numbers \(at step 3\)"),
    broken.TextReward: ("rewards", r"its reward is 'high'; rewards must be finite numbers \(at step 1\)"),
    broken.NoneReward: ("rewards", "its reward is None; rewards must be finite numbers"),
    broken.ThreeRewards: ("rewards", r"its reward has shape \(3,\); it must be one number"),
    broken.SequenceActions: ("spaces", r"the action space is Sequence.*; allowed are Discrete, MultiDiscrete, MultiB"),
    broken.OldReset: ("steps", r"its reset\(\) returned ndarray; .* must return \(obs, info\)"),
    broken.OldSignature: ("steps", r"its reset\(\) takes no argument 'seed'"),
    broken.OldStep: ("steps", r"its step\(\) returned 4 values; step\(action\) must return \(obs, reward, terminated"),
    broken.Unseeded: (
        "seeding",
        r"the observation differs at the first reset in a new instance with the same seed .*; start reset with super\(",
    ),
    broken.CarriesOverState: ("reset", "differs at the first reset in an instance that has run other episodes before"),
    broken.SharedState: ("isolation", "differs at step 1 in an instance that runs alongside another one"),
    broken.TextFlag: ("episode ends", r"its terminated is 'no'; it must be True or False \(at step 20\)"),
    broken.NoneInfo: ("info", "info is a NoneType at step 1; return a dict"),
    broken.MaskForbidsAll: ("action masks", r"is \[0 0 0\] at step 3, which forbids all actions; allow at least one"),
    broken.MaskWrongShape: ("action masks", r"has shape \(1,\) at step 3"),
    broken.MaskForbidsComponent: ("action masks", "at step 3, which forbids all actions of one component"),
    broken.FloatImage: ("render", r"an array of float32 with shape \(8, 8\); return a uint8 array"),
    broken.IncompleteState: ("restore", "continues differently at step"),
    broken.Failing: ("steps", "the environment raised ZeroDivisionError: sampled"),
}


def messages(results: list[CheckResult], status: str) -> dict[str, str]:
    return {result.check: result.message for result in results if result.status == status}


@pytest.mark.parametrize("env", FAULTS, ids=lambda env: env.__name__)
def test_fault_is_reported_by_its_check(env: type) -> None:
    check, pattern = FAULTS[env]
    options = {"render_mode": "rgb_array"} if env is broken.FloatImage else {}
    errors = messages(zx.envs.check_env(env, **options), "error")
    assert list(errors) == [check]
    assert re.search(pattern, errors[check]), errors


@pytest.mark.parametrize(
    ("env", "check", "message"),
    [
        (broken.NeverEnds, "time limit", "no episode ended within 1,000 steps"),
        (broken.ContinuesAfterEnd, "episode ends", "a step after the end of an episode continues it"),
        (broken.ArrayReward, "rewards", "its reward is an array of shape (1,), which is used as a number"),
        (broken.PrivateGenerator, "restore", "an episode can't be restored in the middle"),
    ],
)
def test_tolerable_fault_is_a_warning(env: Any, check: str, message: str) -> None:
    results = zx.envs.check_env(env)
    assert messages(results, "error") == {}
    assert list(messages(results, "warning")) == [check]
    assert message in messages(results, "warning")[check]


def test_checks_that_depend_on_a_failed_check_are_skipped() -> None:
    assert set(messages(zx.envs.check_env(broken.Unseeded), "skipped")) == {"reset", "isolation", "restore"}
    assert set(messages(zx.envs.check_env(broken.NanReward), "skipped")) == {"restore", "speed"}


@pytest.mark.parametrize("backend", ["serial", "process", "mixed"])
@pytest.mark.parametrize(
    "env",
    [
        broken.MissingActionSpace,
        broken.NoneReward,
        broken.ThreeRewards,
        broken.TextReward,
        broken.SequenceActions,
        broken.OldReset,
        broken.OldSignature,
        broken.OldStep,
    ],
)
def test_training_raises_the_message_of_the_check(env: type, backend: str) -> None:
    pattern = FAULTS[env][1].removesuffix(r" \(at step 1\)")

    def train() -> None:
        workers = 2 if backend != "serial" else None
        with closing(zx.envs.make_vector(f"broken_envs:{env.__name__}", 2, backend, workers)) as vector_env:
            vector_env.reset(seed=0)
            vector_env.step(np.zeros(2, int))

    with pytest.raises((UserError, EnvCrashError)) as caught:
        train()
    assert re.search(pattern, str(caught.value)), caught.value
    assert "Traceback" not in str(caught.value)


def test_old_step_is_detected_behind_gymnasium_wrappers() -> None:
    """The wrappers of `gymnasium.make` fail to unpack four values."""
    gym.register("OldStep-v0", broken.OldStep, max_episode_steps=100)
    try:
        env = zx.envs.make_vector("OldStep-v0", 1, "serial")
        env.reset(seed=0)
        with pytest.raises(
            EnvCrashError, match=r"its step\(\) returned 4 values; step\(action\) must return"
        ) as caught:
            env.step(np.zeros(1, int))
        assert "Traceback" not in str(caught.value)
    finally:
        del gym.registry["OldStep-v0"]


@pytest.mark.parametrize("backend", ["serial", "process", "mixed"])
def test_reward_of_shape_1_equals_its_number_in_all_back_ends(backend: str) -> None:
    rewards = []
    for env in ("Valid", "ArrayReward"):
        workers = 2 if backend != "serial" else None
        with closing(zx.envs.make_vector(f"broken_envs:{env}", 2, backend, workers)) as vector_env:
            vector_env.reset(seed=3)
            rewards.append([vector_env.step(np.array([0, 1]))[1] for _ in range(5)])
    assert np.array_equal(*rewards)
    assert np.all(rewards[0])


def test_env_of_the_old_gym_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    Old = type("Old", (), {"__module__": "gym.core", "step": None})
    monkeypatch.setattr(broken, "Old", Old, raising=False)
    message = "returned an instance of Old, an environment of the old package gym; derive it from gymnasium.Env"
    with pytest.raises(UserError, match=message):
        zx.envs.make("broken_envs:Old")
    with pytest.raises(UserError, match="old package gym"):
        zx.envs.check_env(Old)


@pytest.mark.parametrize("name", ["CartPole-v1", *(name for name in zx.envs.names() if name.startswith("toy/"))])
def test_built_in_envs_have_no_errors(name: str) -> None:
    results = zx.envs.check_env(name)
    assert messages(results, "error") == {}
    passed = messages(results, "ok") | messages(results, "warning")
    assert {*CHECKS, "speed"} - set(passed) <= {"action masks", "render"}
    backends = ("uses native",) if name == "CartPole-v1" else ("uses serial", "uses process", "uses mixed")
    assert any(backend in passed["speed"] for backend in backends), passed["speed"]


def test_valid_env_passes_all_checks() -> None:
    rendered = messages(zx.envs.check_env(broken.Valid, render_mode="rgb_array"), "ok")
    assert set(rendered) == {*CHECKS, "speed"} - {"action masks"}
    assert set(messages(zx.envs.check_env(broken.Masked), "ok")) == {*CHECKS, "speed"} - {"render"}


def test_command_prints_one_line_per_check_and_exits_with_2_after_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    assert cli_exit_code(monkeypatch, "check", "broken_envs:ContinuesAfterEnd") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:-1]].count("warning") == 1
    assert lines[-1] == "broken_envs:ContinuesAfterEnd: no errors"
    assert cli_exit_code(monkeypatch, "check", "broken_envs:Failing", "env.how=nan", "env.probability=1.0") == 2
    out = capsys.readouterr().out
    assert "error    rewards       its reward is nan" in out
    assert "Failing: 1 error\n" in out
    assert cli_exit_code(monkeypatch, "check", "CartPoel-v1") == 2
    assert "did you mean 'CartPole-v1'" in capsys.readouterr().err
    assert cli_exit_code(monkeypatch, "check", "CartPole-v1", "lr=3") == 2
    assert "CartPole-v1 has no option 'lr'" in capsys.readouterr().err
    assert "broken_envs" in sys.modules

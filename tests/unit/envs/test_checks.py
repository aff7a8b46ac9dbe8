"""`zhixing check` and `zx.envs.check`: each broken task is told by the check that it breaks, and by no other."""

from __future__ import annotations

import re
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import broken_tasks as broken
import gymnasium as gym
import numpy as np
import pytest
from conftest import cli_exit_code

import zhixing as zx
from zhixing.envs.checker.env_checker import CHECKS, Finding
from zhixing.errors import EnvCrashError, UserError

WRONG: dict[type, tuple[str, str]] = {
    broken.Strange: ("spaces", "can't be stored as arrays; allowed are Box"),
    broken.NoSpace: ("spaces", "NoSpace has no action_space; set it in __init__"),
    broken.WrongShape: ("observations", r"has shape \(1,\); its space has shape \(2,\) \(after 3 steps\)"),
    broken.WrongKind: ("observations", "has dtype float32; its space has dtype uint8"),
    broken.TooLarge: ("observations", "contains 300"),
    broken.NoSuchChoice: ("observations", r"contains 3; Discrete\(3\) allows 0 to 2"),
    broken.Outside: ("observations", "after 3 steps is outside Box"),
    broken.NanObs: ("observations", "not finite after 3 steps"),
    broken.NanLast: ("observations", "not finite after 20 steps"),
    broken.NanReward: ("rewards", r"its reward is nan; rewards must be finite numbers \(after 3 steps\)"),
    broken.WordReward: ("rewards", r"its reward is 'much'; rewards must be finite numbers \(after 1 steps\)"),
    broken.NoReward: ("rewards", "its reward is None; rewards must be finite numbers"),
    broken.RewardOfThree: ("rewards", r"its reward has shape \(3,\); it must be one number"),
    broken.Binary: ("spaces", r"MultiBinary\(3\); allowed are Discrete, MultiDiscrete and a Box of one dimension"),
    broken.OldReset: ("steps", r"its reset\(\) returned ndarray; .* must return \(obs, info\)"),
    broken.OldSignature: ("steps", r"its reset\(\) takes no argument 'seed'"),
    broken.OldStep: ("steps", r"its step\(\) returned 4 values; step\(action\) must return \(obs, reward, terminated"),
    broken.Unseeded: ("seeding", r"the observation differs after 0 steps; begin reset with super\(\).reset"),
    broken.Remembers: ("determinism", "differs after 0 steps; reset must forget"),
    broken.Shares: ("copies", "differs after 1 steps; what a copy changes must belong to it alone"),
    broken.EndsByWord: ("ends", r"its terminated is 'no'; it must be True or False \(after 20 steps\)"),
    broken.NoDict: ("info", "it is of NoneType after 1 steps; it must be a dict"),
    broken.MaskForbidsAll: ("masks", "after 3 steps forbids every action"),
    broken.MaskOfWrongShape: ("masks", r"of shape \(1,\) after 3 steps"),
    broken.MaskForbidsAGroup: ("masks", "after 3 steps forbids every action"),
    broken.BadPicture: ("render", r"float32 of shape \(8, 8\); an array of uint8"),
    broken.ForgetsToRestore: ("restore", "goes on otherwise at step"),
    broken.Fails: ("steps", "ZeroDivisionError: threw"),
}


def by_mark(findings: list[Finding], mark: str) -> dict[str, str]:
    return {finding.check: finding.message for finding in findings if finding.status == mark}


@pytest.mark.parametrize("task", WRONG, ids=lambda task: task.__name__)
def test_a_broken_task_is_told_by_the_check_that_it_breaks(task: type) -> None:
    check, words = WRONG[task]
    options = {"render_mode": "rgb_array"} if task is broken.BadPicture else {}
    wrong = by_mark(zx.envs.check_env(task, **options), "wrong")
    assert list(wrong) == [check]
    assert re.search(words, wrong[check]), wrong


@pytest.mark.parametrize(
    ("task", "check", "words"),
    [
        (broken.NeverEnds, "time limit", "no episode ended within 1000 steps"),
        (broken.GoesOn, "ends", "a step after the end of an episode goes on"),
        (broken.RewardInArray, "rewards", "arrays of shape (1,), taken as the number in them"),
        (broken.OwnChance, "restore", "can't be put back into the middle of an episode"),
    ],
)
def test_what_can_be_lived_with_is_a_note(task: Any, check: str, words: str) -> None:
    findings = zx.envs.check_env(task)
    assert by_mark(findings, "wrong") == {}
    assert list(by_mark(findings, "note")) == [check]
    assert words in by_mark(findings, "note")[check]


@pytest.mark.parametrize("backend", ["serial", "process", "mixed"])
@pytest.mark.parametrize(
    "task", ["NoSpace", "NoReward", "RewardOfThree", "WordReward", "Binary", "OldReset", "OldSignature", "OldStep"]
)
def test_training_rejects_with_the_words_of_the_check(task: str, backend: str) -> None:
    words = WRONG[getattr(broken, task)][1]

    def train() -> None:
        with closing(
            zx.envs.make_vector(f"broken_tasks:{task}", 2, backend, 2 if backend != "serial" else None)
        ) as env:
            env.reset(seed=0)
            env.step(np.zeros(2, int))

    with pytest.raises((UserError, EnvCrashError)) as caught:
        train()
    assert re.search(re.sub(r" \\\(after.*", "", words), str(caught.value)), caught.value
    assert "Traceback" not in str(caught.value)


def test_the_wrappers_of_gymnasium_hide_no_old_step() -> None:
    """`gymnasium.make` puts wrappers around it, which fail at unpacking what it returns."""
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
def test_a_reward_of_shape_1_is_its_number_in_all_back_ends(backend: str) -> None:
    rewards = []
    for task in ("Sound", "RewardInArray"):
        workers = 2 if backend != "serial" else None
        with closing(zx.envs.make_vector(f"broken_tasks:{task}", 2, backend, workers)) as env:
            env.reset(seed=3)
            rewards.append([env.step(np.array([0, 1]))[1] for _ in range(5)])
    assert np.array_equal(*rewards)
    assert np.all(rewards[0])


def test_an_environment_of_the_old_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    Old = type("Old", (), {"__module__": "gym.core", "step": None})
    monkeypatch.setattr(broken, "Old", Old, raising=False)
    with pytest.raises(UserError, match="gives a Old, an environment of the old package gym; derive it from gymnasium"):
        zx.envs.make("broken_tasks:Old")
    with pytest.raises(UserError, match="old package gym"):
        zx.envs.check_env(Old)


@pytest.mark.parametrize("name", ["CartPole-v1", *(name for name in zx.envs.names() if name.startswith("toy/"))])
def test_our_own_tasks_pass(name: str) -> None:
    findings = zx.envs.check_env(name)
    assert by_mark(findings, "wrong") == {}
    told = by_mark(findings, "ok") | by_mark(findings, "note")
    assert {*CHECKS, "speed"} - set(told) <= {"masks", "render"}
    backend = "native" if name == "CartPole-v1" else ("serial", "process", "mixed")
    assert any(word in told["speed"] for word in backend), told["speed"]


def test_a_sound_task_passes_with_pictures_and_masks() -> None:
    assert set(by_mark(zx.envs.check_env(broken.Sound, render_mode="rgb_array"), "ok")) == {*CHECKS, "speed"} - {
        "masks"
    }
    assert set(by_mark(zx.envs.check_env(broken.Masks), "ok")) == {*CHECKS, "speed"} - {"render"}


def test_the_command_reports_line_by_line_and_exits_with_2_if_anything_is_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    assert cli_exit_code(monkeypatch, "check", "broken_tasks:GoesOn") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:-1]].count("note") == 1
    assert lines[-1] == "broken_tasks:GoesOn: nothing wrong"
    assert cli_exit_code(monkeypatch, "check", "broken_tasks:Fails", "env.how=nan", "env.chance=1.0") == 2
    out = capsys.readouterr().out
    assert "wrong  rewards       its reward is nan" in out
    assert "Fails: 1 wrong" in out
    assert cli_exit_code(monkeypatch, "check", "CartPoel-v1") == 2
    assert "did you mean 'CartPole-v1'" in capsys.readouterr().err
    assert cli_exit_code(monkeypatch, "check", "CartPole-v1", "lr=3") == 2
    assert "CartPole-v1 has no option 'lr'" in capsys.readouterr().err
    assert "broken_tasks" in sys.modules

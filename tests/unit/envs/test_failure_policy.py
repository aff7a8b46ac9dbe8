"""Environments that fail in the middle of training: the run stops with name, index and step, or a new copy goes on."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import broken_tasks as broken
import numpy as np
import pytest
from sample_tasks import Counter, Sleeper, Trouble

import zhixing as zx
from zhixing.collect.actor import Actor
from zhixing.envs import FailurePolicy, ProcessVectorEnv, SerialVectorEnv, VectorEnv, make_vector
from zhixing.envs.crash import crash_report
from zhixing.envs.crash.failure_policy import INTERRUPTED, MAX_CONSECUTIVE_FAILURES
from zhixing.errors import EnvCrashError, UserError

REPLACE = FailurePolicy(on_crash="replace")
MISBEHAVIOUR = {
    broken.WrongShape: r"step 3 of an episode: its observation has shape \(1,\); its space has shape \(2,\)",
    broken.WrongKind: "step 3 of an episode: its observation has dtype float32; its space has dtype uint8",
    broken.TooLarge: "step 3 of an episode: its observation contains 300; .* allows 0 to 255",
    broken.NoSuchChoice: r"step 3 of an episode: its observation contains 3; Discrete\(3\) allows 0 to 2",
    broken.NanObs: "step 3 of an episode: its observation contains nan",
    broken.NanLast: "step 20 of an episode: its observation contains nan",
    broken.NanFirst: "a reset: its observation contains inf",
    broken.NanReward: "step 3 of an episode: its reward is nan",
    broken.MaskForbidsAll: "step 3 of an episode: its action mask forbids every action",
    broken.MaskOfWrongShape: r"step 3 of an episode: its action_mask has shape \(1,\)",
}


class Broken:
    """The second copy that is made in the vector is broken, the others are sound."""

    def __init__(self, task: Any, sound: Any = broken.Sound, which: int = 1) -> None:
        self.task, self.sound, self.which, self.made = task, sound, which, -2  # one is made to look at
        self.name = task.__name__

    def __call__(self) -> Any:
        self.made += 1
        return self.task() if self.made == self.which else self.sound()


def zeros(env: VectorEnv) -> np.ndarray:
    return np.zeros_like(env.buffers.action)  # type: ignore[attr-defined]


def many(env: VectorEnv, actions: np.ndarray, steps: int) -> None:
    for _ in range(steps):
        env.step(actions)


@pytest.mark.parametrize("task", MISBEHAVIOUR, ids=lambda task: task.__name__)
def test_misbehaviour_names_environment_index_and_step(task: Any) -> None:
    sound = type("Right", (task,), {"see": lambda self: np.zeros(2, self.observation_space.dtype)})
    if task is broken.NoSuchChoice:
        sound = type("Right", (task,), {"see": lambda self: 1})
    elif task in (broken.MaskForbidsAll, broken.MaskOfWrongShape):
        sound = broken.Masks
    elif task in (broken.NanFirst, broken.NanReward):
        sound = broken.Sound
    env = SerialVectorEnv(Broken(task, sound), 3)
    env.reset(seed=0)
    with pytest.raises(EnvCrashError, match=rf"{task.__name__} \(index 1\) misbehaved at {MISBEHAVIOUR[task]}"):
        many(env, zeros(env), 20)


def test_large_numbers_are_no_fault() -> None:
    class Large(broken.Sound):
        def see(self) -> Any:
            return np.full(2, 1e30, np.float32)  # whose square is no float32

    env = SerialVectorEnv(Large, 2)
    env.reset(seed=0)
    for _ in range(30):
        env.step(np.zeros(2, int))


def test_the_interrupted_episode_is_truncated_at_the_last_right_observation() -> None:
    env = SerialVectorEnv(Broken(broken.NanObs), 3, failure_policy=REPLACE)
    env.reset(seed=0)
    for _ in range(2):
        obs, *_ = env.step(zeros(env))
    before = obs.copy()
    obs, reward, terminated, truncated, info = env.step(zeros(env))  # index 1 shows nan
    assert truncated.tolist() == [False, True, False]
    assert not terminated.any()
    assert reward[1] == 0.0
    assert reward[0] != 0.0
    assert info["final_obs"][1].tolist() == before[1].tolist()
    assert info["final_info"] == {1: {INTERRUPTED: True}}
    assert np.isfinite(obs).all()
    assert obs[1].tolist() != before[1].tolist()  # the new copy's first
    assert env.num_env_restarts == 1
    for _ in range(17):
        _, _, _, truncated, _ = env.step(zeros(env))
    assert truncated.tolist() == [True, False, True]  # 20 steps: the others went on undisturbed
    for _ in range(3):
        _, _, _, truncated, info = env.step(zeros(env))
    assert truncated.tolist() == [False, True, False]  # and the new one's 20 are over 3 later
    assert info["final_info"][1].keys() == {"far"}


def test_a_failing_reset_takes_nothing_from_the_episode_before() -> None:
    env = SerialVectorEnv(Broken(broken.NanFirst), 2, failure_policy=REPLACE)
    env.reset(seed=0)
    for _ in range(20):
        obs, reward, _, truncated, info = env.step(zeros(env))
    assert truncated.all()
    assert INTERRUPTED not in info["final_info"][1]
    assert info["final_info"][1]["far"] == pytest.approx(info["final_obs"][1, 1])
    assert reward[1] == pytest.approx(info["final_obs"][1, 0])
    assert np.isfinite(obs).all()
    assert env.num_env_restarts == 1


class ColdStart(broken.Fails):
    """Fails in its steps, and then so many times in resets."""

    left = 0

    def reset(self, **settings: Any) -> Any:
        if ColdStart.left:
            ColdStart.left -= 1
            raise ConnectionError("the port isn't free yet")
        return super().reset(**settings)


def test_a_new_copy_may_fail_at_its_first_reset() -> None:
    env = SerialVectorEnv(partial(ColdStart, chance=1.0), 1, failure_policy=REPLACE)
    env.reset(seed=0)
    ColdStart.left = 2
    truncated = np.zeros(1, bool)
    while not truncated.any():
        _, _, _, truncated, _ = env.step(np.ones(1, int))
    assert ColdStart.left == 0
    assert env.num_env_restarts == 3


def trajectories(env: VectorEnv, steps: int) -> list[Any]:
    env.reset(seed=4)
    rng, seen = np.random.default_rng(0), []
    for _ in range(steps):
        obs, reward, terminated, truncated, info = env.step(rng.integers(0, 3, env.num_envs))
        final = info["final_obs"][truncated].tolist() if truncated.any() else []
        seen.append((obs.tolist(), reward.tolist(), terminated.tolist(), truncated.tolist(), final))
    return seen


@pytest.mark.parametrize("how", ["raise", "nan", "shape"])
def test_processes_replace_as_serial_does(how: str) -> None:
    factory = partial(broken.Fails, how)
    serial = SerialVectorEnv(factory, 4, failure_policy=REPLACE)
    wanted = trajectories(serial, 200)
    assert serial.num_env_restarts > 3
    again = SerialVectorEnv(factory, 4, failure_policy=REPLACE)
    assert trajectories(again, 200) == wanted
    process = ProcessVectorEnv(factory, 4, 2, failure_policy=REPLACE)
    assert trajectories(process, 200) == wanted
    assert process.num_env_restarts == serial.num_env_restarts
    middle = process.state_dict()
    process.close()
    other = SerialVectorEnv(factory, 4, failure_policy=REPLACE)
    other.reset(seed=0)
    other.load_state_dict(middle)
    assert other.inexact == []
    assert other.num_env_restarts == serial.num_env_restarts


@pytest.mark.parametrize(("action", "how"), [(6, "was killed by SIGKILL"), (5, "exited with code 3")])
def test_a_dead_worker_is_replaced_and_its_environments_begin_anew(action: int, how: str, tmp_path: Path) -> None:
    env = ProcessVectorEnv(Trouble, 4, 2, failure_policy=FailurePolicy("replace", folder=tmp_path))
    pids = [worker.process.pid for worker in env._workers]
    env.reset(seed=0)
    for _ in range(3):
        env.step(np.ones(4, int))
    obs, reward, terminated, truncated, info = env.step(np.array([1, 1, action, 1]))
    assert truncated.tolist() == [False, False, True, True]
    assert not terminated.any()
    assert reward.tolist() == [1, 1, 0, 0]
    assert info["final_obs"][2:].tolist() == [[0, 3], [0, 3]]
    assert obs.tolist() == [[0, 4], [0, 4], [0, 0], [0, 0]]
    assert env.num_env_restarts == 2
    assert env._workers[0].process.pid == pids[0]
    assert not Path(f"/proc/{pids[1]}").exists()
    obs, *_ = env.step(np.ones(4, int))
    assert obs[:, 1].tolist() == [5, 5, 1, 1]
    assert len(env.state_dict()["envs"]) == 4
    (report,) = tmp_path.glob("*.json")
    told = crash_report.read(report)
    assert (told.index, told.actions, told.error.message) == (2, [1, 1, 1, action], how)
    env.close()


def test_a_worker_killed_between_steps_is_replaced() -> None:
    env = ProcessVectorEnv(Counter, 2, 2, failure_policy=REPLACE)
    env.reset(seed=0)
    env._workers[0].process.kill()
    env._workers[0].process.wait()
    _, _, _, truncated, _ = env.step(np.zeros(2, int))
    assert truncated.tolist() == [True, False]
    env.close()


def test_a_step_that_hangs_ends_the_run_or_its_worker() -> None:
    stop = ProcessVectorEnv(Sleeper, 4, 2, failure_policy=FailurePolicy(step_timeout=0.1))
    stop.reset(seed=0)
    stop.step(np.ones(4, int))  # 50 ms each
    with pytest.raises(EnvCrashError, match=r"Sleeper \(index 2 to 3\) took longer than 0.1 s .*, at step 2 of .* 3"):
        stop.step(np.array([0, 0, 0, 7]))  # 350 ms, where two environments have 200
    stop.close()
    env = ProcessVectorEnv(Sleeper, 2, 2, failure_policy=FailurePolicy("replace", step_timeout=0.1))
    env.reset(seed=0)
    _, _, _, truncated, _ = env.step(np.array([7, 0]))
    assert truncated.tolist() == [True, False]
    env.send(np.array([0, 7]), np.arange(2))
    ids, _, _, _, truncated, info = env.recv(min_ready=2)
    assert (ids.tolist(), truncated.tolist(), list(info["final_info"])) == ([0, 1], [False, True], [1])
    assert env.num_env_restarts == 2
    env.close()


def test_a_task_that_always_fails_stops_after_all() -> None:
    env = SerialVectorEnv(partial(broken.Fails, chance=1.0), 1, failure_policy=REPLACE)
    env.reset(seed=0)
    with pytest.raises(
        EnvCrashError, match=f"it failed {MAX_CONSECUTIVE_FAILURES + 1} times without completing an episode"
    ):
        many(env, np.ones(1, int), 50)
    assert env.num_env_restarts == MAX_CONSECUTIVE_FAILURES


def test_what_can_not_be_guarded_is_refused() -> None:
    with pytest.raises(UserError, match=r"timeouts .* need worker processes"):
        make_vector("toy/match", 2, "serial", failure_policy=FailurePolicy(step_timeout=1.0))
    with pytest.raises(UserError, match="native environments step together"):
        make_vector("CartPole-v1", 2, "native", failure_policy=REPLACE)
    with pytest.raises(UserError, match="mixed environments partly run in this process"):
        make_vector("toy/match", 2, "mixed", failure_policy=FailurePolicy(step_timeout=1.0))
    with pytest.raises(UserError, match="did you mean 'replace'"):
        make_vector("CartPole-v1", 2, failure_policy=FailurePolicy("replac"))
    env = make_vector("CartPole-v1", 2, failure_policy=REPLACE)  # auto: what survives most
    assert env.backend == "process"
    env.close()


SHORT: dict[str, Any] = {
    "env_steps": 512,
    "rollout_steps": 32,
    "minibatch_size": 64,
    "num_envs": 2,
    "eval_episodes": 2,
    "eval_every_steps": 256,
    "tensorboard": False,
}


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(os.path.dirname(__file__))


@pytest.mark.usefixtures("here")
def test_a_run_goes_on_with_new_copies_and_shows_how_many(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    env = {"name": "broken_tasks:Fails"}
    result = zx.train("ppo", env=env, out=tmp_path / "run", vector__on_crash="replace", **SHORT)
    assert result["env_steps"] == 512
    assert "environments restarted" in capsys.readouterr().err
    config = (tmp_path / "run" / "config.yaml").read_text()
    assert "backend: process" in config
    assert list((tmp_path / "run" / "crash").glob("crash-*.json"))
    rows = (tmp_path / "run" / "metrics.csv").read_text().splitlines()
    lengths = {float(row.split(",")[6]) for row in rows[1:] if row.split(",")[6]}
    assert lengths == {20.0}  # episodes that were interrupted are no episodes
    serial = zx.config.load(algorithm="ppo", env=env, vector__backend="serial", vector__on_crash="replace", **SHORT)
    zx.Session(serial, tmp_path / "serial", quiet=True).run()
    other = (tmp_path / "serial" / "metrics.csv").read_text().splitlines()
    assert [row.split(",")[5:] for row in rows] == [row.split(",")[5:] for row in other]


@pytest.mark.usefixtures("here")
def test_run_stops_and_names_its_crash_report(tmp_path: Path) -> None:
    with pytest.raises(EnvCrashError, match=r"crashed at step \d+ of an episode") as caught:
        zx.train("ppo", env="broken_tasks:Fails", out=tmp_path / "run", vector__backend="serial", quiet=True, **SHORT)
    report = tmp_path / "run" / "crash" / "crash-001.json"
    assert f"reproduce it with: zhixing reproduce {report} --env broken_tasks:Fails" in str(caught.value)
    assert report.is_file()


def test_evaluation_plays_another_episode_for_one_that_was_interrupted() -> None:
    env = SerialVectorEnv(partial(broken.Fails, "nan"), 2, failure_policy=REPLACE)
    cfg = zx.config.load(algorithm="ppo", env="toy/match")
    actor = Actor(zx.algorithms.get("ppo").make(cfg, env.spaces).policy, env)
    evaluation = actor.evaluate(12, seed=0)
    assert actor.num_env_restarts > 0
    assert [episode.length for episode in evaluation.episodes] == [20] * 12
    assert set(evaluation.summary()) >= {"far"}
    assert INTERRUPTED not in evaluation.summary()

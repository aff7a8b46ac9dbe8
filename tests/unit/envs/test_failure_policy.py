"""Environments that fail during training: the run stops with a crash report, or the environment is replaced."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import broken_envs as broken
import numpy as np
import pytest
from sample_envs import Counter, Crasher, Sleeper

import zhixing as zx
from zhixing.collectors.actor import Actor
from zhixing.envs import FailurePolicy, ProcessVectorEnv, SerialVectorEnv, VectorEnv, make_vector
from zhixing.envs.crash import crash_report
from zhixing.envs.crash.failure_policy import INTERRUPTED, MAX_CONSECUTIVE_FAILURES
from zhixing.errors import EnvCrashError, UserError

REPLACE = FailurePolicy(on_crash="replace")
MISBEHAVIOR = {
    broken.WrongShape: r"step 3 of an episode: its observation has shape \(1,\); its space has shape \(2,\)",
    broken.WrongDtype: "step 3 of an episode: its observation has dtype float32; its space has dtype uint8",
    broken.TooLargeForDtype: "step 3 of an episode: its observation contains 300; .* allows 0 to 255",
    broken.InvalidDiscreteObs: r"step 3 of an episode: its observation contains 3; Discrete\(3\) allows 0 to 2",
    broken.NanObs: "step 3 of an episode: its observation contains nan",
    broken.NanFinalObs: "step 20 of an episode: its observation contains nan",
    broken.InfFirstObs: "a reset: its observation contains inf",
    broken.NanReward: "step 3 of an episode: its reward is nan",
    broken.MaskForbidsAll: "step 3 of an episode: its action mask forbids every action",
    broken.MaskWrongShape: r"step 3 of an episode: its action_mask has shape \(1,\)",
}


class BrokenSecondEnv:
    """Makes a broken environment for index 1 of the vector, and valid ones otherwise."""

    def __init__(self, broken_env: Any, valid_env: Any = broken.Valid) -> None:
        self.broken_env, self.valid_env = broken_env, valid_env
        self.index = -2  # the first instance, at -1, only determines the spaces
        self.name = broken_env.__name__

    def __call__(self) -> Any:
        self.index += 1
        return self.broken_env() if self.index == 1 else self.valid_env()


def zeros(env: VectorEnv) -> np.ndarray:
    return np.zeros_like(env.buffers.action)  # type: ignore[attr-defined]


def repeat(env: VectorEnv, actions: np.ndarray, steps: int) -> None:
    for _ in range(steps):
        env.step(actions)


@pytest.mark.parametrize("broken_env", MISBEHAVIOR, ids=lambda env: env.__name__)
def test_misbehavior_error_contains_name_index_and_step(broken_env: Any) -> None:
    valid_env = type("Valid", (broken_env,), {"get_obs": lambda self: np.zeros(2, self.observation_space.dtype)})
    if broken_env is broken.InvalidDiscreteObs:
        valid_env = type("Valid", (broken_env,), {"get_obs": lambda self: 1})
    elif broken_env in (broken.MaskForbidsAll, broken.MaskWrongShape):
        valid_env = broken.Masked
    elif broken_env in (broken.InfFirstObs, broken.NanReward):
        valid_env = broken.Valid
    env = SerialVectorEnv(BrokenSecondEnv(broken_env, valid_env), 3)
    env.reset(seed=0)
    with pytest.raises(
        EnvCrashError, match=rf"{broken_env.__name__} \(index 1\) misbehaved at {MISBEHAVIOR[broken_env]}"
    ):
        repeat(env, zeros(env), 20)


def test_large_numbers_are_accepted() -> None:
    class Large(broken.Valid):
        def get_obs(self) -> Any:
            return np.full(2, 1e30, np.float32)  # its square overflows float32

    env = SerialVectorEnv(Large, 2)
    env.reset(seed=0)
    for _ in range(30):
        env.step(np.zeros(2, int))


def test_interrupted_episode_is_truncated_at_the_last_valid_observation() -> None:
    env = SerialVectorEnv(BrokenSecondEnv(broken.NanObs), 3, failure_policy=REPLACE)
    env.reset(seed=0)
    for _ in range(2):
        obs, *_ = env.step(zeros(env))
    last_obs = obs.copy()
    obs, reward, terminated, truncated, info = env.step(zeros(env))  # the observation of index 1 is NaN
    assert truncated.tolist() == [False, True, False]
    assert not terminated.any()
    assert reward[1] == 0.0
    assert reward[0] != 0.0
    assert info["final_obs"][1].tolist() == last_obs[1].tolist()
    assert info["final_info"] == {1: {INTERRUPTED: True}}
    assert np.isfinite(obs).all()
    assert obs[1].tolist() != last_obs[1].tolist()  # the first observation of the replacement
    assert env.num_env_restarts == 1
    for _ in range(17):
        _, _, _, truncated, _ = env.step(zeros(env))
    assert truncated.tolist() == [True, False, True]  # the other episodes end after 20 steps, as usual
    for _ in range(3):
        _, _, _, truncated, info = env.step(zeros(env))
    assert truncated.tolist() == [False, True, False]  # the replacement's episode started 3 steps later
    assert info["final_info"][1].keys() == {"far"}


def test_failing_reset_keeps_the_previous_episode() -> None:
    env = SerialVectorEnv(BrokenSecondEnv(broken.InfFirstObs), 2, failure_policy=REPLACE)
    env.reset(seed=0)
    for _ in range(20):
        obs, reward, _, truncated, info = env.step(zeros(env))
    assert truncated.all()
    assert INTERRUPTED not in info["final_info"][1]
    assert info["final_info"][1]["far"] == pytest.approx(info["final_obs"][1, 1])
    assert reward[1] == pytest.approx(info["final_obs"][1, 0])
    assert np.isfinite(obs).all()
    assert env.num_env_restarts == 1


class FailingReset(broken.Failing):
    """Fails in its steps, and then several times in resets."""

    failures_left = 0

    def reset(self, **settings: Any) -> Any:
        if FailingReset.failures_left:
            FailingReset.failures_left -= 1
            raise ConnectionError("the port isn't free yet")
        return super().reset(**settings)


def test_replacement_may_fail_in_its_first_reset() -> None:
    env = SerialVectorEnv(partial(FailingReset, probability=1.0), 1, failure_policy=REPLACE)
    env.reset(seed=0)
    FailingReset.failures_left = 2
    truncated = np.zeros(1, bool)
    while not truncated.any():
        _, _, _, truncated, _ = env.step(np.ones(1, int))
    assert FailingReset.failures_left == 0
    assert env.num_env_restarts == 3


def trajectories(env: VectorEnv, steps: int) -> list[Any]:
    env.reset(seed=4)
    rng, results = np.random.default_rng(0), []
    for _ in range(steps):
        obs, reward, terminated, truncated, info = env.step(rng.integers(0, 3, env.num_envs))
        final = info["final_obs"][truncated].tolist() if truncated.any() else []
        results.append((obs.tolist(), reward.tolist(), terminated.tolist(), truncated.tolist(), final))
    return results


@pytest.mark.parametrize("how", ["raise", "nan", "shape"])
def test_process_backend_replaces_like_serial(how: str) -> None:
    factory = partial(broken.Failing, how)
    serial = SerialVectorEnv(factory, 4, failure_policy=REPLACE)
    expected = trajectories(serial, 200)
    assert serial.num_env_restarts > 3
    repeated = SerialVectorEnv(factory, 4, failure_policy=REPLACE)
    assert trajectories(repeated, 200) == expected
    process = ProcessVectorEnv(factory, 4, 2, failure_policy=REPLACE)
    assert trajectories(process, 200) == expected
    assert process.num_env_restarts == serial.num_env_restarts
    state = process.state_dict()
    process.close()
    other = SerialVectorEnv(factory, 4, failure_policy=REPLACE)
    other.reset(seed=0)
    other.load_state_dict(state)
    assert other.inexact == []
    assert other.num_env_restarts == serial.num_env_restarts


@pytest.mark.parametrize(("action", "how"), [(6, "was killed by SIGKILL"), (5, "exited with code 3")])
def test_dead_worker_is_replaced_with_new_environments(action: int, how: str, tmp_path: Path) -> None:
    env = ProcessVectorEnv(Crasher, 4, 2, failure_policy=FailurePolicy("replace", folder=tmp_path))
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
    crash = crash_report.read(report)
    assert (crash.index, crash.actions, crash.error.message) == (2, [1, 1, 1, action], how)
    env.close()


def test_worker_killed_between_steps_is_replaced() -> None:
    env = ProcessVectorEnv(Counter, 2, 2, failure_policy=REPLACE)
    env.reset(seed=0)
    env._workers[0].process.kill()
    env._workers[0].process.wait()
    _, _, _, truncated, _ = env.step(np.zeros(2, int))
    assert truncated.tolist() == [True, False]
    env.close()


def test_hanging_step_stops_the_run_or_is_replaced() -> None:
    stop = ProcessVectorEnv(Sleeper, 4, 2, failure_policy=FailurePolicy(step_timeout=0.1))
    stop.reset(seed=0)
    stop.step(np.ones(4, int))  # 50 ms each
    with pytest.raises(EnvCrashError, match=r"Sleeper \(index 2 to 3\) took longer than 0.1 s .*, at step 2 of .* 3"):
        stop.step(np.array([0, 0, 0, 7]))  # 350 ms; the limit of two environments is 200 ms
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


def test_env_that_always_fails_stops_the_run() -> None:
    env = SerialVectorEnv(partial(broken.Failing, probability=1.0), 1, failure_policy=REPLACE)
    env.reset(seed=0)
    with pytest.raises(
        EnvCrashError, match=f"it failed {MAX_CONSECUTIVE_FAILURES + 1} times without completing an episode"
    ):
        repeat(env, np.ones(1, int), 50)
    assert env.num_env_restarts == MAX_CONSECUTIVE_FAILURES


def test_unsupported_policies_are_rejected() -> None:
    with pytest.raises(UserError, match=r"timeouts .* need worker processes"):
        make_vector("toy/match", 2, "serial", failure_policy=FailurePolicy(step_timeout=1.0))
    with pytest.raises(UserError, match="native environments step together"):
        make_vector("CartPole-v1", 2, "native", failure_policy=REPLACE)
    with pytest.raises(UserError, match="mixed environments partly run in this process"):
        make_vector("toy/match", 2, "mixed", failure_policy=FailurePolicy(step_timeout=1.0))
    with pytest.raises(UserError, match="did you mean 'replace'"):
        make_vector("CartPole-v1", 2, failure_policy=FailurePolicy("replac"))
    env = make_vector("CartPole-v1", 2, failure_policy=REPLACE)  # auto selects the back end that survives most failures
    assert env.backend == "process"
    env.close()


SHORT: dict[str, Any] = {
    "env_steps": 512,
    "rollout_steps": 32,
    "minibatch_size": 64,
    "num_envs": 2,
    "eval_episodes": 2,
    "eval_every": 256,
    "tensorboard": False,
}


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(os.path.dirname(__file__))


@pytest.mark.usefixtures("here")
def test_run_continues_with_replacements(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    env = {"name": "broken_envs:Failing"}
    result = zx.train("ppo", env=env, out=tmp_path / "run", vector__on_crash="replace", **SHORT)
    assert result["env_steps"] == 512
    assert "environments restarted" in capsys.readouterr().err
    config = (tmp_path / "run" / "config.yaml").read_text()
    assert "backend: process" in config
    assert list((tmp_path / "run" / "crash").glob("crash-*.json"))
    rows = (tmp_path / "run" / "metrics.csv").read_text().splitlines()
    lengths = {float(row.split(",")[6]) for row in rows[1:] if row.split(",")[6]}
    assert lengths == {20.0}  # interrupted episodes don't count
    serial = zx.config.load(algorithm="ppo", env=env, vector__backend="serial", vector__on_crash="replace", **SHORT)
    zx.Session(serial, tmp_path / "serial", quiet=True).run()
    other = (tmp_path / "serial" / "metrics.csv").read_text().splitlines()
    assert [row.split(",")[5:] for row in rows] == [row.split(",")[5:] for row in other]


@pytest.mark.usefixtures("here")
def test_run_stops_and_names_its_crash_report(tmp_path: Path) -> None:
    with pytest.raises(EnvCrashError, match=r"crashed at step \d+ of an episode") as caught:
        zx.train("ppo", env="broken_envs:Failing", out=tmp_path / "run", vector__backend="serial", quiet=True, **SHORT)
    report = tmp_path / "run" / "crash" / "crash-001.json"
    assert f"reproduce it with: zhixing reproduce {report} --env broken_envs:Failing" in str(caught.value)
    assert report.is_file()


def test_evaluation_repeats_interrupted_episodes() -> None:
    env = SerialVectorEnv(partial(broken.Failing, "nan"), 2, failure_policy=REPLACE)
    cfg = zx.config.load(algorithm="ppo", env="toy/match")
    actor = Actor(zx.algorithms.get("ppo").make(cfg, env.spaces).policy, env)
    evaluation = actor.evaluate(12, seed=0)
    assert actor.num_env_restarts > 0
    assert [episode.length for episode in evaluation.episodes] == [20] * 12
    assert set(evaluation.summary()) >= {"far"}
    assert INTERRUPTED not in evaluation.summary()

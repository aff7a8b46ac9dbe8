"""Environments that take their process along, hang, fork or leave something behind: only a worker process suffers."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hostile_envs import HostileEnv

import zhixing as zx
from zhixing.envs import FailurePolicy, ProcessVectorEnv, make_vector
from zhixing.envs.vector import worker_process
from zhixing.errors import EnvCrashError, UserError
from zhixing.experiments.sweep import plan
from zhixing.report.video import record_video
from zhixing.training.collect_data import collect_from_agent

TESTS = Path(__file__).parents[1]
DEATHS = {
    "segfault": "was killed by SIGSEGV",
    "abort": "was killed by SIGABRT",
    "leave": "exited with code 5",
    "exit": "exited with code 3",
}
CALLS = {
    "constructor": "the constructor",
    "reset": "the first reset",
    "step": "step 2 of an episode of index 1",
    "render": "render",
    "state": "state_dict",
}


def hostile(where: str = "", how: str = "", log: Path | None = None) -> partial[HostileEnv]:
    factory = partial(HostileEnv, where, how, None if log is None else str(log))
    factory.name = "Hostile"  # type: ignore[attr-defined]
    return factory


def visit(env: ProcessVectorEnv) -> None:
    """Make every call once, and the second step of environment 1 with action 1."""
    env.reset(seed=0)
    env.step(np.zeros(2, int))
    env.step(np.array([0, 1]))
    env.render(1)
    env.state_dict()
    env.close()


def alive(pid: int) -> bool:
    """Return whether a process runs. A zombie doesn't."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone(pids: list[int], seconds: float = 60.0) -> bool:
    end = time.monotonic() + seconds
    while any(map(alive, pids)) and time.monotonic() < end:
        time.sleep(0.02)
    return not any(map(alive, pids))


def numbers(log: Path) -> list[int]:
    return [int(line) for line in log.read_text().split()]


@pytest.mark.parametrize(
    ("where", "how"),
    [
        ("constructor", "segfault"),
        ("constructor", "exit"),
        ("reset", "abort"),
        ("reset", "leave"),
        ("step", "segfault"),
        ("step", "exit"),
        ("render", "abort"),
        ("state", "leave"),
    ],
)
def test_death_of_an_environment_ends_only_its_worker(where: str, how: str) -> None:
    with pytest.raises(EnvCrashError, match=rf"Hostile \(index .*\) {DEATHS[how]}, at {CALLS[where]}"):
        visit(ProcessVectorEnv(hostile(where, how), 2, 2))


def test_the_number_of_workers_is_found_without_the_environment_in_this_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"
    env = make_vector("hostile_envs:HostileEnv", 2, "process", options={"how": "made", "log": str(log)})
    env.reset(seed=0)
    env.close()
    assert len(numbers(log)) == 3  # one to try, two to use
    assert os.getpid() not in numbers(log)
    with pytest.raises(EnvCrashError, match="was killed by SIGSEGV, at the first reset"):
        make_vector("hostile_envs:HostileEnv", 2, "process", options={"where": "reset", "how": "segfault"})


class DiesLate(HostileEnv):
    """Is killed at its third step, whatever the action."""

    def step(self, action: Any) -> Any:
        if self.t == 2:
            os.kill(os.getpid(), 9)
        return super().step(action)


def test_death_in_trial_steps_writes_a_crash_report(tmp_path: Path) -> None:
    with pytest.raises(EnvCrashError, match=r"was killed by SIGKILL, at step 3 of an episode of index 0\nreproduce it"):
        ProcessVectorEnv(DiesLate, 2, None, failure_policy=FailurePolicy(folder=tmp_path))


@pytest.mark.parametrize("sentinel", [True, False])
def test_a_worker_that_forked_and_died_is_noticed(
    sentinel: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not sentinel:  # as on systems without pidfd_open
        monkeypatch.delattr(os, "pidfd_open", raising=False)
    log = tmp_path / "log"
    env = ProcessVectorEnv(hostile("step", "fork", log), 2, 2)
    env.reset(seed=0)
    with pytest.raises(EnvCrashError, match=r"\(index 1\) was killed by SIGKILL, at step 1"):
        env.step(np.array([0, 1]))
    env.close()
    assert gone(numbers(log))
    env = ProcessVectorEnv(hostile("step", "fork", log), 2, 2)
    env.reset(seed=0)
    env.send(np.array([0, 1]), np.arange(2))
    with pytest.raises(EnvCrashError, match=r"\(index 1\) was killed by SIGKILL, at step 1"):
        env.recv(min_ready=2)
    env.close()


def test_a_worker_that_forked_and_died_is_replaced(tmp_path: Path) -> None:
    log = tmp_path / "log"
    env = ProcessVectorEnv(hostile("step", "fork", log), 2, 2, failure_policy=FailurePolicy("replace"))
    env.reset(seed=0)
    *_, truncated, _ = env.step(np.array([0, 1]))
    assert truncated.tolist() == [False, True]
    *_, truncated, _ = env.step(np.zeros(2, int))
    assert not truncated.any()
    assert gone(numbers(log))
    env.close()


class DiesInResets(HostileEnv):
    """The first two resets of a new process after the log has its first line end that process."""

    def reset(self, **settings: Any) -> Any:
        assert self.log is not None
        if self.log.exists() and len(numbers(self.log)) < 3:
            with self.log.open("a") as file:
                print(os.getpid(), file=file)
            os._exit(7)
        return super().reset(**settings)


def test_a_replacement_may_die_in_its_first_reset(tmp_path: Path) -> None:
    log = tmp_path / "log"
    env = ProcessVectorEnv(
        partial(DiesInResets, "step", "leave", str(log)), 2, 2, failure_policy=FailurePolicy("replace")
    )
    env.reset(seed=0)
    log.write_text("0\n")
    *_, truncated, _ = env.step(np.array([0, 1]))
    assert truncated.tolist() == [False, True]
    assert env.num_env_restarts == 3
    env.close()


def test_a_worker_that_dies_in_a_reset_with_a_seed_is_replaced(tmp_path: Path) -> None:
    log = tmp_path / "log"
    env = ProcessVectorEnv(partial(DiesInResets, log=str(log)), 1, 1, failure_policy=FailurePolicy("replace"))
    env.reset(seed=0)
    log.write_text("0\n")
    env.reset(seed=1)  # as evaluations begin
    assert env.num_env_restarts == 2
    *_, truncated, _ = env.step(np.zeros(1, int))
    assert not truncated.any()
    env.close()


def test_a_constructor_has_a_limit() -> None:
    words = r"the constructor of Hostile \(index 0\) took longer than 0.3 s \(vector.call_timeout\)"
    with pytest.raises(EnvCrashError, match=words):
        ProcessVectorEnv(hostile("constructor", "hang"), 2, 2, failure_policy=FailurePolicy(call_timeout=0.3))


@pytest.mark.parametrize("where", ["reset", "render", "state"])
def test_every_call_has_a_limit(where: str, tmp_path: Path) -> None:
    env = ProcessVectorEnv(Switched, 2, 2)
    env.reset(seed=0)
    for worker in env._workers:
        worker.failure_policy = FailurePolicy(call_timeout=0.3)  # type: ignore[union-attr]  # not before: a start may take long
    env.step(np.array([SWITCHES.index(where), 0]))
    calls = {"reset": lambda: env.reset(seed=1), "render": env.render, "state": env.state_dict}
    with pytest.raises(EnvCrashError, match=r"took longer than 0.3 s \(vector.call_timeout\)"):
        calls[where]()
    pids = [worker.process.pid for worker in env._workers]  # type: ignore[union-attr]
    env.close()
    assert not any(map(alive, pids))


SWITCHES = ("", "reset", "render", "state")


class Switched(HostileEnv):
    """Hangs from now on at the call that the action says."""

    def __init__(self) -> None:
        super().__init__("", "hang")
        self.action_space = type(self.action_space)(len(SWITCHES))

    def step(self, action: Any) -> Any:
        self.where = SWITCHES[int(action)]
        return super().step(0)


def test_a_limit_of_steps_brings_a_generous_one_for_other_calls() -> None:
    assert FailurePolicy().effective_call_timeout is None
    assert FailurePolicy(step_timeout=1.0).effective_call_timeout == 120.0
    assert FailurePolicy(step_timeout=60.0).effective_call_timeout == 600.0
    assert FailurePolicy(step_timeout=60.0, call_timeout=2.0).effective_call_timeout == 2.0
    with pytest.raises(UserError, match=r"timeouts .* need worker processes"):
        make_vector("toy/match", 2, "serial", failure_policy=FailurePolicy(call_timeout=1.0))


LEAVES = """
import sys
import numpy as np
from zhixing.envs import make_vector
options = dict(zip(("where", "how", "log"), sys.argv[1:]))
env = make_vector("hostile_envs:HostileEnv", 2, "process", options=options)
env.reset(seed=0)
env.step(np.zeros(2, int))
if sys.argv[1] != "close":
    env.close()
print("done")
"""


@pytest.mark.parametrize(
    ("where", "how"), [("constructor", "thread"), ("reset", "child"), ("constructor", "daemon"), ("close", "child")]
)
def test_what_an_environment_leaves_behind_does_not_keep_the_program_from_ending(
    where: str, how: str, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    # the output ends when the last process that has it is gone
    program = [sys.executable, "-c", LEAVES, where, how, str(log)]
    ended = subprocess.run(program, capture_output=True, text=True, timeout=120, cwd=TESTS, check=False)
    assert (ended.returncode, ended.stdout) == (0, "done\n"), ended.stderr
    assert how == "thread" or gone(numbers(log))


def test_a_worker_that_can_not_be_started_is_named_and_the_others_end(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []

    class Limited(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, *arguments: Any, **settings: Any) -> None:
            if len(started) == 2:
                raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
            super().__init__(*arguments, **settings)
            started.append(self)

    monkeypatch.setattr(worker_process.subprocess, "Popen", Limited)
    files = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0
    with pytest.raises(UserError, match=r"worker process 3 of 200 can't be started: .*; use fewer \(vector.workers\)"):
        ProcessVectorEnv(HostileEnv, 200, 200)
    assert [process.poll() is not None for process in started] == [True, True]
    if files:
        assert len(os.listdir("/proc/self/fd")) == files


# --- whole runs ---

SHORT: dict[str, Any] = {
    "env_steps": 64,
    "num_envs": 2,
    "vector__workers": 1,
    "vector__backend": "process",
    "eval_episodes": 2,
    "eval_every_steps": 32,
    "tensorboard": False,
    "quiet": True,
}
PPO: dict[str, Any] = {"rollout_steps": 16, "minibatch_size": 32, "net__hidden_sizes": [8]}
SAC: dict[str, Any] = {"learning_starts": 16, "batch_size": 8, "net__hidden_sizes": [8], "replay__capacity": 100}


def test_nothing_of_an_environment_runs_in_the_process_that_trains(tmp_path: Path) -> None:
    log, run = tmp_path / "log", tmp_path / "run"
    env = {"name": "hostile_envs:HostileEnv", "how": "made", "log": str(log)}
    zx.train("ppo", env=env, out=run, eval_video=True, **SHORT, **PPO)
    zx.evaluate(run, 2)
    record_video(run, tmp_path / "video.mp4")
    collect_from_agent(run, str(tmp_path / "data"), 20)
    plan([{"algorithm": "ppo", "env": env, "vector": {"backend": "process"}}], {"lr": [1e-3]}, [0], tmp_path / "sweep")
    goals = {**env, "name": "hostile_envs:HostileGoalEnv"}
    zx.train("sac", env=goals, out=tmp_path / "goals", replay__her=True, **SHORT, **SAC)
    assert len(set(numbers(log))) > 10
    assert os.getpid() not in numbers(log)


def test_death_in_an_evaluation_is_an_error_not_the_end_of_the_program(tmp_path: Path) -> None:
    harmful = {"where": "reset", "how": "segfault"}
    with pytest.raises(EnvCrashError, match="was killed by SIGSEGV, at the first reset"):
        zx.train("ppo", env="hostile_envs:HostileEnv", out=tmp_path / "run", eval_env=harmful, **SHORT, **PPO)


def test_death_while_rewards_of_goals_are_computed_is_an_error(tmp_path: Path) -> None:
    env = {"name": "hostile_envs:HostileGoalEnv", "where": "goals", "how": "abort"}
    with pytest.raises(EnvCrashError, match="was killed by SIGABRT, at the goal functions"):
        zx.train("sac", env=env, out=tmp_path / "run", replay__her=True, **SHORT, **SAC)


def test_hindsight_in_another_process_learns_the_same(tmp_path: Path) -> None:
    def metrics(backend: str) -> list[str]:
        settings = {**SHORT, "vector__backend": backend, "vector__workers": 1}
        zx.train("sac", env="hostile_envs:HostileGoalEnv", out=tmp_path / backend, replay__her=True, **settings, **SAC)
        rows = (tmp_path / backend / "metrics.csv").read_text().splitlines()
        return [",".join(row.split(",")[5:]) for row in rows]  # without times

    assert metrics("process") == metrics("serial")

"""Environments that kill their process, hang, fork or leave processes running harm only their worker process."""

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
from zhixing.reports.video import record_video
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
    env_fn = partial(HostileEnv, where, how, None if log is None else str(log))
    env_fn.name = "Hostile"  # type: ignore[attr-defined]
    return env_fn


def call_all_methods(env: ProcessVectorEnv) -> None:
    """Make every call once. The second step of environment 1 has action 1."""
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


def all_ended(pids: list[int], seconds: float = 60.0) -> bool:
    """Wait for the processes to end. Return whether they did in time."""
    deadline = time.monotonic() + seconds
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(map(alive, pids))


def read_pids(log: Path) -> list[int]:
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
def test_dying_env_ends_only_its_worker(where: str, how: str) -> None:
    with pytest.raises(EnvCrashError, match=rf"Hostile \(index .*\) {DEATHS[how]}, at {CALLS[where]}"):
        call_all_methods(ProcessVectorEnv(hostile(where, how), 2, 2))


def test_number_of_workers_is_chosen_without_an_env_in_this_process(tmp_path: Path) -> None:
    log = tmp_path / "log"
    env = make_vector("hostile_envs:HostileEnv", 2, "process", options={"how": "made", "log": str(log)})
    env.reset(seed=0)
    env.close()
    assert len(read_pids(log)) == 3  # the probe and two in use
    assert os.getpid() not in read_pids(log)
    with pytest.raises(EnvCrashError, match="was killed by SIGSEGV, at the first reset"):
        make_vector("hostile_envs:HostileEnv", 2, "process", options={"where": "reset", "how": "segfault"})


class DiesLate(HostileEnv):
    """Kills its process at its third step."""

    def step(self, action: Any) -> Any:
        if self.t == 2:
            os.kill(os.getpid(), 9)
        return super().step(action)


def test_death_in_probe_steps_writes_a_crash_report(tmp_path: Path) -> None:
    with pytest.raises(EnvCrashError, match=r"was killed by SIGKILL, at step 3 of an episode of index 0\nreproduce it"):
        ProcessVectorEnv(DiesLate, 2, None, failure_policy=FailurePolicy(folder=tmp_path))


@pytest.mark.parametrize("sentinel", [True, False])
def test_death_of_a_worker_that_forked_is_noticed(
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
    assert all_ended(read_pids(log))
    env = ProcessVectorEnv(hostile("step", "fork", log), 2, 2)
    env.reset(seed=0)
    env.send(np.array([0, 1]), np.arange(2))
    with pytest.raises(EnvCrashError, match=r"\(index 1\) was killed by SIGKILL, at step 1"):
        env.recv(min_ready=2)
    env.close()


def test_dead_worker_that_forked_is_replaced(tmp_path: Path) -> None:
    log = tmp_path / "log"
    env = ProcessVectorEnv(hostile("step", "fork", log), 2, 2, failure_policy=FailurePolicy("replace"))
    env.reset(seed=0)
    *_, truncated, _ = env.step(np.array([0, 1]))
    assert truncated.tolist() == [False, True]
    *_, truncated, _ = env.step(np.zeros(2, int))
    assert not truncated.any()
    assert all_ended(read_pids(log))
    env.close()


class DiesInResets(HostileEnv):
    """Once the log exists, the first two resets exit their process."""

    def reset(self, **settings: Any) -> Any:
        assert self.log is not None
        if self.log.exists() and len(read_pids(self.log)) < 3:
            with self.log.open("a") as file:
                print(os.getpid(), file=file)
            os._exit(7)
        return super().reset(**settings)


def test_replacement_may_die_in_its_first_reset(tmp_path: Path) -> None:
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


def test_worker_that_dies_in_a_seeded_reset_is_replaced(tmp_path: Path) -> None:
    log = tmp_path / "log"
    env = ProcessVectorEnv(partial(DiesInResets, log=str(log)), 1, 1, failure_policy=FailurePolicy("replace"))
    env.reset(seed=0)
    log.write_text("0\n")
    env.reset(seed=1)  # as at the start of an evaluation
    assert env.num_env_restarts == 2
    *_, truncated, _ = env.step(np.zeros(1, int))
    assert not truncated.any()
    env.close()


def test_constructor_times_out() -> None:
    message = r"the constructor of Hostile \(index 0\) took longer than 0.3 s \(vector.call_timeout\)"
    with pytest.raises(EnvCrashError, match=message):
        ProcessVectorEnv(hostile("constructor", "hang"), 2, 2, failure_policy=FailurePolicy(call_timeout=0.3))


@pytest.mark.parametrize("where", ["reset", "render", "state"])
def test_every_call_times_out(where: str) -> None:
    env = ProcessVectorEnv(HangsOnDemand, 2, 2)
    env.reset(seed=0)
    for worker in env._workers:
        # not earlier: starting a worker may take longer
        worker.failure_policy = FailurePolicy(call_timeout=0.3)  # type: ignore[union-attr]
    env.step(np.array([HANGING_CALLS.index(where), 0]))
    calls = {"reset": lambda: env.reset(seed=1), "render": env.render, "state": env.state_dict}
    with pytest.raises(EnvCrashError, match=r"took longer than 0.3 s \(vector.call_timeout\)"):
        calls[where]()
    pids = [worker.process.pid for worker in env._workers]  # type: ignore[union-attr]
    env.close()
    assert not any(map(alive, pids))


HANGING_CALLS = ("", "reset", "render", "state")


class HangsOnDemand(HostileEnv):
    """The action of a step is the index of the call that hangs from now on."""

    def __init__(self) -> None:
        super().__init__("", "hang")
        self.action_space = type(self.action_space)(len(HANGING_CALLS))

    def step(self, action: Any) -> Any:
        self.where = HANGING_CALLS[int(action)]
        return super().step(0)


def test_step_timeout_implies_a_generous_call_timeout() -> None:
    assert FailurePolicy().effective_call_timeout is None
    assert FailurePolicy(step_timeout=1.0).effective_call_timeout == 120.0
    assert FailurePolicy(step_timeout=60.0).effective_call_timeout == 600.0
    assert FailurePolicy(step_timeout=60.0, call_timeout=2.0).effective_call_timeout == 2.0
    with pytest.raises(UserError, match=r"timeouts .* need worker processes"):
        make_vector("toy/match", 2, "serial", failure_policy=FailurePolicy(call_timeout=1.0))


LEAVING_SCRIPT = """
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
def test_threads_and_processes_of_an_env_dont_keep_the_program_alive(where: str, how: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    # run() returns when the last process that has inherited stdout is gone
    command = [sys.executable, "-c", LEAVING_SCRIPT, where, how, str(log)]
    completed = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=TESTS, check=False)
    assert (completed.returncode, completed.stdout) == (0, "done\n"), completed.stderr
    assert how == "thread" or all_ended(read_pids(log))


def test_worker_that_cant_be_started_ends_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []

    class LimitedPopen(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, *arguments: Any, **settings: Any) -> None:
            if len(started) == 2:
                raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
            super().__init__(*arguments, **settings)
            started.append(self)

    monkeypatch.setattr(worker_process.subprocess, "Popen", LimitedPopen)
    num_files = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0
    with pytest.raises(UserError, match=r"worker process 3 of 200 can't be started: .*; use fewer \(vector.workers\)"):
        ProcessVectorEnv(HostileEnv, 200, 200)
    assert [process.poll() is not None for process in started] == [True, True]
    if num_files:
        assert len(os.listdir("/proc/self/fd")) == num_files


# --- whole runs ---

SHORT: dict[str, Any] = {
    "env_steps": 64,
    "num_envs": 2,
    "vector__workers": 1,
    "vector__backend": "process",
    "eval_episodes": 2,
    "eval_every": 32,
    "tensorboard": False,
    "quiet": True,
}
PPO: dict[str, Any] = {"rollout_steps": 16, "minibatch_size": 32, "net__hidden_sizes": [8]}
SAC: dict[str, Any] = {"learning_starts": 16, "batch_size": 8, "net__hidden_sizes": [8], "replay__capacity": 100}


def test_no_env_code_runs_in_the_training_process(tmp_path: Path) -> None:
    log, run = tmp_path / "log", tmp_path / "run"
    env = {"name": "hostile_envs:HostileEnv", "how": "made", "log": str(log)}
    zx.train("ppo", env=env, out=run, eval_video=True, **SHORT, **PPO)
    zx.evaluate(run, 2)
    record_video(run, tmp_path / "video.mp4")
    collect_from_agent(run, str(tmp_path / "data"), 20)
    plan([{"algorithm": "ppo", "env": env, "vector": {"backend": "process"}}], {"lr": [1e-3]}, [0], tmp_path / "sweep")
    goals = {**env, "name": "hostile_envs:HostileGoalEnv"}
    zx.train("sac", env=goals, out=tmp_path / "goals", replay__her=True, **SHORT, **SAC)
    assert len(set(read_pids(log))) > 10
    assert os.getpid() not in read_pids(log)


def test_death_in_an_evaluation_raises(tmp_path: Path) -> None:
    hostile_options = {"where": "reset", "how": "segfault"}
    with pytest.raises(EnvCrashError, match="was killed by SIGSEGV, at the first reset"):
        zx.train("ppo", env="hostile_envs:HostileEnv", out=tmp_path / "run", eval_env=hostile_options, **SHORT, **PPO)


def test_death_in_compute_reward_raises(tmp_path: Path) -> None:
    env = {"name": "hostile_envs:HostileGoalEnv", "where": "goals", "how": "abort"}
    with pytest.raises(EnvCrashError, match="was killed by SIGABRT, at the goal functions"):
        zx.train("sac", env=env, out=tmp_path / "run", replay__her=True, **SHORT, **SAC)


def test_her_with_worker_processes_matches_serial(tmp_path: Path) -> None:
    def metrics(backend: str) -> list[str]:
        settings = {**SHORT, "vector__backend": backend, "vector__workers": 1}
        zx.train("sac", env="hostile_envs:HostileGoalEnv", out=tmp_path / backend, replay__her=True, **settings, **SAC)
        rows = (tmp_path / backend / "metrics.csv").read_text().splitlines()
        return [",".join(row.split(",")[5:]) for row in rows]  # without times

    assert metrics("process") == metrics("serial")

"""Vector environments in worker processes: crashes, asynchronous results, and cleanup."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from sample_envs import Crasher, ProcessInfo, Sleeper

from zhixing.envs import ProcessVectorEnv, SerialVectorEnv, VectorEnv, make_vector
from zhixing.errors import EnvCrashError, UserError


def actions(num: int, **at: int) -> np.ndarray:
    """Return zeros, except at given indices: `at2=6` is action 6 at index 2."""
    array = np.zeros(num, int)
    for index, action in at.items():
        array[int(index.removeprefix("at"))] = action
    return array


def alive(pid: int) -> bool:
    """Return whether the process runs. A zombie doesn't."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def all_ended(pids: list[int], seconds: float = 5.0) -> bool:
    """Wait until the processes end. Return whether they did."""
    deadline = time.monotonic() + seconds
    while any(alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(alive(pid) for pid in pids)


@pytest.mark.parametrize(("backend", "index"), [("serial", 3), ("process", 3), ("mixed", 3), ("mixed", 0)])
def test_crash_error_contains_traceback_name_index_and_step(backend: str, index: int) -> None:
    env: VectorEnv = SerialVectorEnv(Crasher, 4)
    if backend != "serial":
        env = ProcessVectorEnv(Crasher, 4, 2, mixed=backend == "mixed")
    env.reset(seed=0)
    env.step(actions(4))
    with pytest.raises(EnvCrashError) as caught:
        env.step(actions(4, **{f"at{index}": 7}))
    message = str(caught.value)
    assert f"Crasher (index {index}) crashed at step 2" in message
    assert "ZeroDivisionError: the wheels came off" in message
    assert "sample_envs.py" in message
    env.close()
    env.close()


@pytest.mark.parametrize(("action", "how"), [(6, "was killed by SIGKILL"), (5, "exited with code 3")])
def test_dead_worker_raises_crash_error(action: int, how: str) -> None:
    env = ProcessVectorEnv(Crasher, 4, 2)
    env.reset(seed=0)
    with pytest.raises(EnvCrashError, match=rf"Crasher \(index 2 to 3\) {how}"):
        env.step(actions(4, at2=action))
    with pytest.raises(EnvCrashError, match=how):
        env.state_dict()
    env.close()


def test_close_ends_workers_during_a_step() -> None:
    env = ProcessVectorEnv(Sleeper, 2, 2)
    env.reset(seed=0)
    pids = [worker.process.pid for worker in env._workers]
    env.send(actions(2, at0=7), np.arange(2))
    env.close()
    assert all_ended(pids, 0.0)


@pytest.mark.parametrize(("mixed", "slow", "fast"), [(False, [0, 1], [2, 3]), (True, [2, 3], [0, 1])])
def test_ready_environments_are_returned_first(mixed: bool, slow: list[int], fast: list[int]) -> None:
    env = ProcessVectorEnv(Sleeper, 4, 2, mixed=mixed)
    env.reset(seed=0)
    env.send(actions(4, **{f"at{slow[0]}": 7}), np.arange(4))  # its worker sleeps 350 ms
    ids, obs, _, _, _, _ = env.recv()
    assert ids.tolist() == fast
    assert obs.tolist() == [[0, 1], [0, 1]]
    with pytest.raises(RuntimeError, match=f"{slow[0]} to {slow[1]} are still stepping"):
        env.send(actions(2), np.array(slow))
    with pytest.raises(ValueError, match="are not all environments of some workers"):
        env.send(actions(1), np.array([3]))
    env.send(actions(2), ids)
    with pytest.raises(RuntimeError, match=f"{fast[0]} to {fast[1]} are still stepping"):
        env.send(actions(2), ids)
    ids, obs, _, _, _, _ = env.recv(min_ready=4)
    assert ids.tolist() == [0, 1, 2, 3]
    assert obs[slow, 1].tolist() == [1, 1]
    assert obs[fast, 1].tolist() == [2, 2]
    env.close()


def test_first_worker_of_mixed_backend_is_this_process() -> None:
    env = ProcessVectorEnv(ProcessInfo, 5, 2, mixed=True)
    assert (env.backend, env.workers) == ("mixed", 2)
    env.reset(seed=0)
    infos = env.step(actions(5))[4]["final_info"]
    pids = [infos[index]["pid"] for index in range(5)]
    assert pids == [os.getpid()] * 3 + pids[-1:] * 2
    assert pids[-1] != os.getpid()
    env.close()


def test_workers_are_separate_processes_without_torch() -> None:
    env = ProcessVectorEnv(ProcessInfo, 3, 3)
    env.reset(seed=0)
    infos = env.step(actions(3))[4]["final_info"]
    assert [info["torch"] for info in infos.values()] == [False, False, False]
    assert len({info["pid"] for info in infos.values()} - {os.getpid()}) == 3
    env.close()


def test_workers_survive_the_thread_that_started_them() -> None:
    envs: list[ProcessVectorEnv] = []
    thread = threading.Thread(target=lambda: envs.append(ProcessVectorEnv(Sleeper, 2, 2)))
    thread.start()
    thread.join()
    time.sleep(0.05)
    envs[0].reset(seed=0)
    envs[0].step(actions(2))
    envs[0].close()


def test_workers_ignore_ctrl_c() -> None:
    env = ProcessVectorEnv(Sleeper, 2, 2)
    env.reset(seed=0)
    for worker in env._workers:
        worker.process.send_signal(signal.SIGINT)
    env.step(actions(2))
    env.close()


def test_env_is_usable_after_an_interrupted_step(monkeypatch: pytest.MonkeyPatch) -> None:
    env = ProcessVectorEnv(Sleeper, 2, 2)
    env.reset(seed=0)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    with pytest.raises(KeyboardInterrupt):
        env.step(actions(2, at0=7))
    signal.signal(signal.SIGALRM, previous)
    assert [len(sub_env["actions"]) for sub_env in env.state_dict()["envs"]] == [1, 1]
    assert env.step(actions(2))[0][:, 1].tolist() == [2, 2]
    env.close()


# Without `if __name__ == "__main__"`: workers must not run the script again. With action 1, a step never ends.
SCRIPT = """
import os, sys, time
import numpy as np
from zhixing.envs import ProcessVectorEnv
import gymnasium as gym

class Endless(gym.Env):
    observation_space = gym.spaces.Box(0, 1, (1,))
    action_space = gym.spaces.Discrete(2)
    def reset(self, *, seed=None, options=None):
        return np.zeros(1, np.float32), {}
    def step(self, action):
        if action:
            time.sleep(1000)
        return np.zeros(1, np.float32), 0.0, False, False, {}

env = ProcessVectorEnv(Endless, 4, 2)
env.reset(seed=0)
env.step(np.zeros(4, int))
print(*(worker.process.pid for worker in env._workers), flush=True)
env.step(np.array([0, 0, 0, int(sys.argv[1])]))
time.sleep(1000)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
@pytest.mark.parametrize("stuck", [0, 1])
def test_killed_parent_leaves_no_worker_and_no_shared_memory(stuck: int) -> None:
    before = set(os.listdir("/dev/shm"))
    parent = subprocess.Popen([sys.executable, "-c", SCRIPT, str(stuck)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pids = [int(word) for word in parent.stdout.readline().split()]
    assert len(pids) == 2
    assert all(alive(pid) for pid in pids)
    assert set(os.listdir("/dev/shm")) == before
    time.sleep(0.1)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert all_ended(pids)


def test_invalid_numbers_of_workers_and_envs_are_rejected() -> None:
    with pytest.raises(UserError, match="workers is 3; it must be from 1 to num_envs"):
        make_vector("toy/match", 2, "process", workers=3)
    with pytest.raises(UserError, match="workers is 2, but backend serial has no workers; use process, mixed or ray"):
        make_vector("toy/match", 2, "serial", workers=2)
    with pytest.raises(UserError, match="num_envs is 0"):
        make_vector("toy/match", 0)

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
from sample_tasks import Sleeper, Spy, Trouble

from zhixing.envs import ProcessVectorEnv, SerialVectorEnv, VectorEnv, make_vector
from zhixing.errors import EnvCrashError, UserError


def actions(num: int, **special: int) -> np.ndarray:
    chosen = np.zeros(num, int)
    for index, action in special.items():
        chosen[int(index.removeprefix("at"))] = action
    return chosen


def alive(pid: int) -> bool:
    """Running, not a zombie that waits to be collected."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone(pids: list[int], seconds: float = 5.0) -> bool:
    end = time.monotonic() + seconds
    while any(alive(pid) for pid in pids) and time.monotonic() < end:
        time.sleep(0.02)
    return not any(alive(pid) for pid in pids)


@pytest.mark.parametrize(("backend", "index"), [("serial", 3), ("process", 3), ("mixed", 3), ("mixed", 0)])
def test_crash_shows_traceback_name_index_and_step(backend: str, index: int) -> None:
    env: VectorEnv = SerialVectorEnv(Trouble, 4)
    if backend != "serial":
        env = ProcessVectorEnv(Trouble, 4, 2, mixed=backend == "mixed")
    env.reset(seed=0)
    env.step(actions(4))
    with pytest.raises(EnvCrashError) as caught:
        env.step(actions(4, **{f"at{index}": 7}))
    message = str(caught.value)
    assert f"Trouble (index {index}) crashed at step 2" in message
    assert "ZeroDivisionError: the wheels came off" in message
    assert "sample_tasks.py" in message
    env.close()
    env.close()


@pytest.mark.parametrize(("action", "how"), [(6, "was killed by SIGKILL"), (5, "exited with code 3")])
def test_death_of_a_worker_is_told(action: int, how: str) -> None:
    env = ProcessVectorEnv(Trouble, 4, 2)
    env.reset(seed=0)
    with pytest.raises(EnvCrashError, match=rf"Trouble \(index 2 to 3\) {how}"):
        env.step(actions(4, at2=action))
    with pytest.raises(EnvCrashError, match=how):
        env.state_dict()
    env.close()


def test_close_ends_workers_even_in_the_middle_of_a_step() -> None:
    env = ProcessVectorEnv(Sleeper, 2, 2)
    env.reset(seed=0)
    pids = [worker.process.pid for worker in env._workers]
    env.send(actions(2, at0=7), np.arange(2))
    env.close()
    assert gone(pids, 0.0)


@pytest.mark.parametrize(("mixed", "slow", "fast"), [(False, [0, 1], [2, 3]), (True, [2, 3], [0, 1])])
def test_ready_environments_are_returned_first(mixed: bool, slow: list[int], fast: list[int]) -> None:
    env = ProcessVectorEnv(Sleeper, 4, 2, mixed=mixed)
    env.reset(seed=0)
    env.send(actions(4, **{f"at{slow[0]}": 7}), np.arange(4))  # it sleeps 350 ms, and its worker with it
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


def test_the_first_worker_of_a_mixed_vector_is_this_process() -> None:
    env = ProcessVectorEnv(Spy, 5, 2, mixed=True)
    assert (env.backend, env.workers) == ("mixed", 2)
    env.reset(seed=0)
    infos = env.step(actions(5))[4]["final_info"]
    pids = [infos[index]["pid"] for index in range(5)]
    assert pids == [os.getpid()] * 3 + pids[-1:] * 2
    assert pids[-1] != os.getpid()
    env.close()


def test_workers_import_no_torch_and_share_nothing_but_rows() -> None:
    env = ProcessVectorEnv(Spy, 3, 3)
    env.reset(seed=0)
    infos = env.step(actions(3))[4]["final_info"]
    assert [info["torch"] for info in infos.values()] == [False, False, False]
    assert len({info["pid"] for info in infos.values()} - {os.getpid()}) == 3
    env.close()


def test_workers_outlive_the_thread_that_made_them() -> None:
    made: list[ProcessVectorEnv] = []
    thread = threading.Thread(target=lambda: made.append(ProcessVectorEnv(Sleeper, 2, 2)))
    thread.start()
    thread.join()
    time.sleep(0.05)
    made[0].reset(seed=0)
    made[0].step(actions(2))
    made[0].close()


def test_ctrl_c_is_left_to_the_parent() -> None:
    env = ProcessVectorEnv(Sleeper, 2, 2)
    env.reset(seed=0)
    for worker in env._workers:
        worker.process.send_signal(signal.SIGINT)
    env.step(actions(2))
    env.close()


def test_interrupted_step_leaves_the_vector_usable(monkeypatch: pytest.MonkeyPatch) -> None:
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


# No guard around it: workers must not run the script again. The second step is one that never ends.
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
    assert gone(pids)


def test_wrong_numbers_are_refused_before_a_process_starts() -> None:
    with pytest.raises(UserError, match="workers is 3; it must be from 1 to num_envs"):
        make_vector("toy/match", 2, "process", workers=3)
    with pytest.raises(UserError, match="workers is 2, but backend serial has no workers; use process, mixed or ray"):
        make_vector("toy/match", 2, "serial", workers=2)
    with pytest.raises(UserError, match="num_envs is 0"):
        make_vector("toy/match", 0)

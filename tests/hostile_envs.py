"""Environments that crash, hang or leave processes behind. Commands name them as `hostile_envs:HostileEnv`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from dummy_envs import FixedLengthEnv
from gymnasium.spaces import Box, Dict

LONG = 600.0  # seconds, longer than any test waits


def harm(how: str, log: Path | None = None) -> None:
    """Crash, hang or leave a process behind, and write the ids of processes left behind to `log`."""
    if how == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    elif how == "abort":
        os.abort()
    elif how == "leave":
        os._exit(5)
    elif how == "exit":
        sys.exit(3)
    elif how == "hang":
        time.sleep(LONG)
    elif how == "fork":  # the child inherits the pipes of its parent, which is killed
        child = os.fork()
        if child == 0:
            time.sleep(LONG)
            os._exit(0)
        _write_pid(log, child)
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "thread":
        threading.Thread(target=time.sleep, args=[LONG]).start()
    elif how == "child":
        _write_pid(log, subprocess.Popen(["sleep", str(LONG)]).pid)
    elif how == "daemon":
        _write_pid(log, subprocess.Popen(["sleep", str(LONG)], start_new_session=True).pid)
    else:
        raise ValueError(how)


def _write_pid(log: Path | None, pid: int) -> None:
    if log is not None:
        with log.open("a") as file:
            print(pid, file=file)


class HostileEnv(FixedLengthEnv):
    """Calls `harm(how)` in the method `where`; in a step only if the action is 1.

    `log` is a file for process ids: of the processes in which the environment was made, if `how` is "made", else of
    those that it leaves behind.
    """

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012

    def __init__(self, where: str = "", how: str = "", log: str | None = None, render_mode: str | None = None) -> None:
        super().__init__()
        self.where, self.how, self.log, self.render_mode = where, how, None if log is None else Path(log), render_mode
        if how == "made":
            _write_pid(self.log, os.getpid())
        self._harm_at("constructor")

    def _harm_at(self, where: str) -> None:
        if where == self.where:
            harm(self.how, self.log)

    def reset(self, **settings: Any) -> Any:
        self._harm_at("reset")
        return super().reset(**settings)

    def step(self, action: Any) -> Any:
        if action:
            self._harm_at("step")
        return super().step(action)

    def render(self) -> Any:
        self._harm_at("render")
        return np.zeros((16, 16, 3), np.uint8)

    def close(self) -> None:
        self._harm_at("close")

    def state_dict(self) -> dict[str, Any]:
        self._harm_at("state")
        return {"t": self.t}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.t = state["t"]


class HostileGoalEnv(HostileEnv):
    """A `HostileEnv` with goals. With `where="goals"`, computing rewards calls `harm`."""

    def __init__(self, where: str = "", how: str = "", log: str | None = None) -> None:
        super().__init__(where, how, log)
        part = Box(0.0, 1.0, (1,), np.float32)
        self.observation_space = Dict({"observation": part, "achieved_goal": part, "desired_goal": part})
        self.action_space = Box(-1.0, 1.0, (1,), np.float32)

    def _obs(self) -> Any:
        position = np.full(1, self.t / self.length, np.float32)
        return {"observation": position, "achieved_goal": position, "desired_goal": np.ones(1, np.float32)}

    def step(self, action: Any) -> Any:
        return super().step(0)

    def compute_reward(self, achieved: Any, desired: Any, info: Any) -> Any:
        self._harm_at("goals")
        return -np.abs(achieved - desired)[..., 0]

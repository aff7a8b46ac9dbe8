"""Train a run in processes that get a signal at random moments, and resume it until it completes.

    python kill_and_resume.py FOLDER KILLS SEED COMBINATION

A combination is an algorithm, an environment, a back end and a signal, as in `COMBINATIONS`. Each attempt is a fork of
this process, which has imported everything, so it can be killed after a few hundredths of a second. Half of the signals
are sent at a random moment, half while a file is being written. Prints the counts as JSON.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

import zhixing as zx
from zhixing.training.run_folder import read_checkpoint

torch.set_num_threads(1)
# every test run tries the first two, `make soak` all of them
COMBINATIONS = """
ppo CartPole-v1 serial SIGKILL
dqn CartPole-v1 serial SIGKILL
ppo CartPole-v1 process SIGKILL
ppo CartPole-v1 native SIGTERM
ppo Pendulum-v1 mixed SIGHUP
ppo toy/recall serial SIGKILL
a2c Acrobot-v1 process SIGTERM
a2c toy/match serial SIGHUP
a3c CartPole-v1 serial SIGKILL
pg CartPole-v1 process SIGINT
trpo Pendulum-v1 serial SIGKILL
ppg CartPole-v1 native SIGKILL
impala CartPole-v1 serial SIGTERM
dqn MountainCar-v0 process SIGKILL
dqn CartPole-v1 native SIGHUP
double_dqn toy/match mixed SIGKILL
dueling_dqn CartPole-v1 process SIGINT
rainbow CartPole-v1 serial SIGKILL
c51 Acrobot-v1 process SIGTERM
qrdqn CartPole-v1 serial SIGHUP
munchausen_dqn CartPole-v1 native SIGKILL
ddpg Pendulum-v1 process SIGKILL
td3 Pendulum-v1 serial SIGTERM
td3 toy/reach mixed SIGKILL
sac Pendulum-v1 process SIGINT
sac CartPole-v1 serial SIGKILL
redq Pendulum-v1 serial SIGHUP
mappo toy/team-match process SIGKILL
qmix toy/team-match serial SIGTERM
maddpg toy/team-reach serial SIGKILL
alphazero pettingzoo/tictactoe serial SIGKILL
""".strip().splitlines()
BY_SCHEME: dict[str, dict[str, Any]] = {
    "on_policy": {"rollout_steps": 16, "minibatch_size": 32, "epochs": 2},
    "asynchronous": {"rollout_steps": 8},
    "off_policy": {"learning_starts": 100, "batch_size": 16, "updates_per_step": 0.5, "replay__capacity": 500},
    "self_play": {"simulations": 4, "batch_size": 16, "net__blocks": 1, "net__channels": 8, "capacity": 500},
}
STOPPED = 3  # exit code of an attempt that stopped on a signal after saving, or had nothing to save yet


def settings(name: str, kills: int, backend: str) -> dict[str, Any]:
    """Return settings for a run that lasts longer than all kills."""
    model = zx.algorithms.get(name).settings
    intervals = {"log_every": 50, "checkpoint_every": 100, "eval_every": 400, "eval_episodes": 1}
    small = {"num_envs": 2, "vector__backend": backend, "tensorboard": False, "seed": 4, "net__hidden_sizes": [8]}
    values = {"env_steps": 500 + 100 * kills, **intervals, **small, **BY_SCHEME[model.scheme]}
    return {key: value for key, value in values.items() if has_setting(model, key)}


def has_setting(model: type[zx.config.RunConfig], key: str) -> bool:
    first, _, rest = key.partition("__")
    field = model.model_fields.get(first)
    return field is not None and (not rest or rest in field.annotation.model_fields)  # type: ignore[union-attr]


def start_attempt(run: Path, combination: str, kills: int) -> int:
    """Train or resume the run in a child process. Return its process id."""
    pid = os.fork()
    if pid:
        return pid
    try:
        name, env, backend, _ = combination.split()
        if (run / "config.yaml").exists():
            zx.Session.resume(run, quiet=True).run()
        else:
            zx.train(name, env, out=run, quiet=True, **settings(name, kills, backend))
        os._exit(0)
    except KeyboardInterrupt:
        os._exit(STOPPED)
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
    finally:
        os._exit(1)


def temporary_files(run: Path) -> set[tuple[Path, int]]:
    """Return files that are being written or that an earlier kill left, with their modification times."""
    files = set()
    for path in run.rglob(".*.tmp"):
        with suppress(FileNotFoundError):  # it was renamed when complete
            files.add((path, path.stat().st_mtime_ns))
    return files


def main(folder: Path, kills: int, seed: int, combination: str) -> dict[str, Any]:
    rng = random.Random(seed)
    name, env, _, signal_name = combination.split()
    number = signal.Signals[signal_name]
    short = {"env_steps": 200, "eval_every": 0}  # warms up torch, so the forks needn't
    zx.train(name, env, out=folder / "warm", quiet=True, **settings(name, kills, "serial") | short)
    start = time.monotonic()
    assert os.waitpid(start_attempt(folder / "whole", combination, kills), 0)[1] == 0
    duration = time.monotonic() - start
    run = folder / "killed"
    done = unreadable = while_writing = 0
    while True:
        left_before = temporary_files(run)
        pid = start_attempt(run, combination, kills)
        if done < kills:
            deadline = time.monotonic() + rng.uniform(0.0, duration / kills)
            while time.monotonic() < deadline:
                time.sleep(0.001)
            wait_for_write = done % 2 == 1
            while wait_for_write and temporary_files(run) <= left_before and os.waitpid(pid, os.WNOHANG) == (0, 0):
                pass
            while_writing += not temporary_files(run) <= left_before
            try:
                os.kill(pid, number)
            except ProcessLookupError:  # it completed in the meantime
                break
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if code == 0:
            break
        if code not in (-number, STOPPED):
            return {"kills": done, "while_writing": while_writing, "unreadable": unreadable, "exit_code": code}
        done += 1
        for file in (run / "checkpoints").glob("*.safetensors"):
            try:
                read_checkpoint(file)
            except zx.UserError:
                unreadable += 1
    # once more, in case the last kill came after the training had completed
    code = os.waitstatus_to_exitcode(os.waitpid(start_attempt(run, combination, kills), 0)[1])
    return {"kills": done, "while_writing": while_writing, "unreadable": unreadable, "exit_code": code}


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])))
